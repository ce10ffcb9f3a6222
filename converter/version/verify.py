"""Is a version what its manifest says, to the bit?

Three steps that can be had one by one, so that a sampler hashes only what it loads, and never twice:
`load_manifest` (one small file), `one_file_problems` (sizes and headers: a few kilobytes a shard), `hash_tensor` (all
bytes of one tensor). `verify_version` does all of it. Memory is bounded by `CHUNK` a thread, whatever the model's size.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from mtx2vllm.converter.errors import InputError, NotCommitted
from mtx2vllm.converter.storage import Store, join, store_for
from mtx2vllm.converter.version.header import LAYOUT_KEY, Header, read_header
from mtx2vllm.schemas.manifest import NAME, FileEntry, Manifest, TensorEntry, digest

CHUNK = 8 << 20  # one read and one hash update: long enough for the network, short enough for the cache
_LOCAL_THREADS = 2  # one reads while the other hashes
_REMOTE_THREADS = 8  # hides the latency of a range request
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt")  # what a loader may pick up by its name

Progress = Callable[[int], None]  # told the bytes read since the last call


@dataclass(frozen=True, slots=True)
class Differing:
    """A tensor whose elements differ: how many `elements` `of` all, and the largest absolute difference (None where
    one is not finite)."""

    name: str
    elements: int
    of: int
    max_abs: float | None


@dataclass(frozen=True, slots=True)
class Verification:
    """`problems` holds whole sentences: what is wrong with the version itself, or what only one side has."""

    ok: bool
    tensors: int
    identical: int
    differing: list[Differing] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The object that `verify --json` prints."""
        return asdict(self)


def load_manifest(location: str, store: Store | None = None) -> tuple[Manifest, str]:
    """The manifest of a version and the digest of its bytes, by which a version is known.

    Raises:
        NotCommitted: there is none; whatever lies there is not (yet) a version.
        InputError: it is not a manifest.
    """
    path = join(location, NAME)
    try:
        data = (store or store_for(location)).read(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotCommitted(_no_version(location, store or store_for(location))) from None
    try:
        return Manifest.parse(data), digest(data)
    except ValueError as error:
        raise InputError(f"{location}: {error}") from None


def _no_version(location: str, store: Store) -> str:
    local = store.local(location)
    if local is not None and not Path(local).exists():
        return f"{location} does not exist; give the directory of a version."
    if store.stat(location) is not None:
        return f"{location} is a file; give the directory of a version, which holds {NAME}."
    return (
        f"{location} holds no {NAME}: it is not a version, or not completely written. Convert it with "
        "`mtx2vllm convert`, or adopt a Hugging Face directory with `mtx2vllm adopt`."
    )


def one_file_problems(store: Store, location: str, name: str, manifest: Manifest) -> list[str]:
    """Whatever is wrong with one file apart from tensors' bytes: its size, a shard's header and how it agrees with the
    manifest, a side file's digest."""
    entry = manifest.files[name]
    if entry.shard:
        return shard_problems(store, location, name, manifest)
    return _side_file_problems(store, location, name, entry)


def shard_problems(store: Store, location: str, name: str, manifest: Manifest) -> list[str]:
    """As `one_file_problems`, for a shard: a few kilobytes are read."""
    path, entry = join(location, name), manifest.files[name]
    problems = _size_problems(store, path, entry)
    if problems:
        return problems
    try:
        header = read_header(store, path, entry.size)
    except InputError as error:
        return list(error.problems)
    except FileNotFoundError:
        return [_missing(path)]
    if digest(header.raw) != entry.digest:
        problems.append(f"{path}: the header's digest is not the manifest's; the file was changed after publication.")
    return problems + _layout_problems(path, header, manifest) + _agreement_problems(path, name, header, manifest)


def _size_problems(store: Store, path: str, entry: FileEntry) -> list[str]:
    stat = store.stat(path)
    if stat is None:
        return [_missing(path)]
    if stat.size != entry.size:
        cause = "it was truncated" if stat.size < entry.size else "it was changed after publication"
        return [f"{path} has {stat.size} bytes, the manifest says {entry.size}: {cause}; copy the version again."]
    return []


def _missing(path: str) -> str:
    return f"{path} is missing, though the manifest lists it: deleted, or the version was not copied whole."


def _side_file_problems(store: Store, location: str, name: str, entry: FileEntry) -> list[str]:
    path = join(location, name)
    problems = _size_problems(store, path, entry)
    if not problems and _hash(store, path, (0, entry.size), _buffer(entry.size)) != entry.digest:
        problems.append(f"{path}: its digest is not the manifest's; it was changed after publication.")
    return problems


def _layout_problems(path: str, header: Header, manifest: Manifest) -> list[str]:
    # A Hugging Face directory that was adopted has headers of its own; canonical shards are always ours.
    said = header.metadata.get(LAYOUT_KEY, "hf")
    if said == manifest.layout:
        return []
    return [f"{path}: the header says layout {said!r}, the manifest {manifest.layout!r}; do not load either."]


def _agreement_problems(path: str, name: str, header: Header, manifest: Manifest) -> list[str]:
    problems = []
    listed = {key: tensor for key, tensor in manifest.tensors.items() if tensor.file == name}
    for key in sorted(listed.keys() - header.tensors.keys()):
        problems.append(f"{path}: tensor {key!r} of the manifest is not in the file.")
    for key in sorted(header.tensors.keys() - listed.keys()):
        problems.append(f"{path}: tensor {key!r} is not in the manifest.")
    for key in sorted(listed.keys() & header.tensors.keys()):
        ours, found = listed[key], header.tensors[key]
        if (ours.dtype, ours.shape, ours.offset) != (found.dtype, found.shape, found.offset):
            problems.append(
                f"{path}: tensor {key!r} is {found.dtype} {list(found.shape)} at {found.offset} in the file, but "
                f"{ours.dtype} {list(ours.shape)} at {ours.offset} in the manifest."
            )
    return problems


def hash_tensor(
    store: Store, location: str, entry: TensorEntry, buffer: bytearray, seen: Callable[[memoryview], None] | None = None
) -> str:
    """blake3 of a tensor's bytes, read once through `buffer`; `seen` gets each part while it is there.

    Raises:
        FileNotFoundError, EOFError: the file is gone, or too short.
    """
    return _hash(store, join(location, entry.file), (entry.offset, entry.offset + entry.nbytes), buffer, seen)


def _hash(
    store: Store, path: str, span: tuple[int, int], buffer: bytearray, seen: Callable[[memoryview], None] | None = None
) -> str:
    hasher, view, (offset, end) = blake3(), memoryview(buffer), span
    while offset < end:
        part = view[: min(len(view), end - offset)]
        store.read_into(path, offset, part)
        hasher.update(part)
        if seen is not None:
            seen(part)
        offset += len(part)
    return str(hasher.hexdigest())


def _buffer(nbytes: int) -> bytearray:
    return bytearray(max(min(nbytes, CHUNK), 1))


def tensor_problems(
    store: Store, location: str, tensors: Mapping[str, TensorEntry], progress: Progress | None = None
) -> Iterator[str]:
    """One sentence for each tensor whose bytes are not the manifest's. Each byte is read once, by several threads."""

    def check(item: tuple[str, TensorEntry]) -> str | None:
        name, entry = item
        where = f"{join(location, entry.file)}: tensor {name!r}"
        try:
            found = hash_tensor(store, location, entry, _buffer(entry.nbytes))
        except FileNotFoundError:
            return f"{where}: the file disappeared while it was read."
        except EOFError as error:
            return f"{where}: {error}."
        if progress is not None:
            progress(entry.nbytes)
        if found == entry.blake3:
            return None
        return f"{where}: its bytes have another digest than the manifest says: damaged; copy the version again."

    order = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    threads = _REMOTE_THREADS if store.local(location) is None else _LOCAL_THREADS
    with ThreadPoolExecutor(threads, thread_name_prefix="mtx2vllm-verify") as pool:
        yield from (problem for problem in pool.map(check, order) if problem is not None)


def stray_problems(store: Store, location: str, manifest: Manifest) -> list[str]:
    """Weights that the manifest does not know: a loader that goes by names would read them too."""
    found = (name for name in store.walk(location) if name.endswith(_WEIGHTS) and name not in manifest.files)
    return [f"{join(location, name)} is not in the manifest, but a loader may read it: remove it." for name in found]


def index_problems(store: Store, location: str, manifest: Manifest) -> list[str]:
    """Where `*.index.json`, by which other tools find the tensors, says something else than the manifest."""
    problems: list[str] = []
    for name in manifest.files:
        if not name.endswith(".safetensors.index.json"):
            continue
        path, base = join(location, name), name.rpartition("/")[0]
        try:
            listed = json.loads(store.read(path))["weight_map"]
            told = {key: join(base, file) for key, file in listed.items()}
        except FileNotFoundError:
            continue  # named by `one_file_problems`
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.append(f"{path} has no weight_map: it is not an index.")
            continue
        ours = {key: tensor.file for key, tensor in manifest.tensors.items()}
        if told != ours:
            odd = sorted(key for key in told.keys() | ours.keys() if told.get(key) != ours.get(key))
            problems.append(f"{path} and the manifest disagree on {len(odd)} tensors, {odd[0]!r} first.")
    return problems


def verify_version(
    location: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check a version whole, and with `against` (another version, or a plain Hugging Face directory) compare its text
    tensors bit by bit. What is wrong is in the result, all of it.

    Raises:
        NotCommitted: `location` is no version.
        InputError: the manifest cannot be read, or `against` holds no weights.
    """
    location = os.fspath(location)
    against = None if against is None else os.fspath(against)
    store = store_for(location)
    manifest, _ = load_manifest(location, store)
    unsound: set[str] = set()
    problems: list[str] = []
    for name in manifest.files:
        found = one_file_problems(store, location, name, manifest)
        problems += found
        if found:
            unsound.add(name)
    problems += index_problems(store, location, manifest) + stray_problems(store, location, manifest)
    sound = {name: entry for name, entry in manifest.tensors.items() if entry.file not in unsound}
    damaged = list(tensor_problems(store, location, sound, progress))
    if problems or damaged or against is None:
        identical = len(sound) - len(damaged)
        return Verification(not (problems or damaged), len(manifest.tensors), identical, problems=problems + damaged)
    from mtx2vllm.converter.version.compare import compare  # numpy, which a plain check does not need

    return compare(location, against, progress)
