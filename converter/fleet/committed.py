"""A version that has its manifest: can it be served, as far as the manifest and a listing tell? No shard is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import split

from mtx2vllm.converter.errors import InputError, NotCommitted
from mtx2vllm.converter.fleet import root
from mtx2vllm.converter.storage import Store, join
from mtx2vllm.converter.version.verify import load_manifest
from mtx2vllm.schemas.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Committed:
    """What one look tells. `bytes` by the manifest, None where that cannot be read; `problem` says in words why the
    version is not whole, None where it is."""

    modified: float
    bytes: int | None
    problem: str | None

    @property
    def whole(self) -> bool:
        """Whether it can be served: only then does it count as a version."""
        return self.problem is None


def look(store: Store, location: str, step: int) -> Committed | None:
    """One version of a root; None where it has no manifest."""
    stat = store.stat(root.manifest_path(location, step))
    if stat is None:
        return None
    directory = join(location, str(step))
    try:
        manifest, _ = load_manifest(directory, store)
    except NotCommitted:  # removed since
        return None
    except InputError as error:
        return Committed(stat.modified, None, str(error).rstrip("."))
    size = sum(entry.size for entry in manifest.files.values())
    damaged = list(_damaged(store, directory, manifest))
    more = f" (and {len(damaged) - 1} more file{'s' * (len(damaged) > 2)})" if len(damaged) > 1 else ""
    problem = f"not complete, {damaged[0]}{more}; copy or convert it again" if damaged else None
    return Committed(stat.modified, size, problem)


def _damaged(store: Store, directory: str, manifest: Manifest) -> Iterator[str]:
    """The shards that are missing or of another size, in words: one listing for each folder that holds shards."""
    shards = {name: entry.size for name, entry in manifest.files.items() if entry.shard}
    sizes: dict[str, int] = {}
    for folder in sorted({split(name)[0] for name in shards}):
        entries = store.listdir(join(directory, folder) if folder else directory)
        sizes |= {f"{folder}/{e.name}".lstrip("/"): e.size for e in entries if not e.is_dir}
    for name in sorted(shards):
        if name not in sizes:
            yield f"{name} is missing"
        elif sizes[name] != shards[name]:
            yield f"{name} has {sizes[name]} bytes where the manifest says {shards[name]}"
