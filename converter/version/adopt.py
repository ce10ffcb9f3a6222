"""Give somebody else's Hugging Face directory a manifest, so that its users have hot reload and verification, too.

look (whole? the model that its config says?) -> digest every tensor -> with --as: link or copy into ROOT/STEP -> manifest

Nothing is moved or changed in the directory itself. Only shards are linked: safetensors from 0.8 on puts a new file in an
old one's place, which leaves the link as it was. Older ones write into the file and damage the version, as verification
says; for them shards are copied, too (`copy`). config.json and the other small files are always copied, since
`save_pretrained` writes them in place.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from mtx2vllm.converter.errors import InputError, LostRace
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.hf_files import local_path
from mtx2vllm.converter.options import Location
from mtx2vllm.converter.shards import DTYPES
from mtx2vllm.converter.storage import basename, join, store_for
from mtx2vllm.converter.version import claim as claims
from mtx2vllm.converter.version.adopt_check import Found, look
from mtx2vllm.converter.version.verify import CHUNK, hash_tensor, load_manifest
from mtx2vllm.schemas import manifest as manifests
from mtx2vllm.schemas.manifest import FileEntry, Manifest, Source, TensorEntry

Progress = Callable[[int, int], None]
_THREADS = 4


@dataclass(frozen=True)
class Adopted:
    """What was adopted: `bytes` of weights, `linked` shards that share their bytes with the directory."""

    out: str
    family: str
    step: int | None
    tensors: int
    bytes: int
    linked: int
    copied: int
    seconds: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What `adopt --json` prints."""
        return {**asdict(self), "layout": "hf"}

    def sentence(self) -> str:
        """One line for people."""
        how = f", {_count(self.copied, 'file')} copied" if self.copied else ""
        if self.linked:
            how = f", {_count(self.linked, 'shard')} hard-linked (never write into the source's in place){how}"
        step = "" if self.step is None else f" (step {self.step})"
        return f"{self.out}: adopted {self.tensors} tensors, {self.bytes:,} bytes, {self.family}{step}{how}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def adopt(
    location: Location, out: Location | None = None, *, copy: bool = False, progress: Progress | None = None
) -> Adopted:
    """Check a Hugging Face directory whole and make a version of it, in its place or (`out`) as ROOT/STEP.

    Args:
        location: the directory; a local path (string or `pathlib.Path`) or gs://.
        out: ROOT/STEP; None: the manifest goes into the directory itself.
        copy: never link, so that the version shares no bytes with the directory.
        progress: receives bytes read and bytes in all.

    Raises:
        InputError: it is not whole, or not a model that we know; OUT is taken. Nothing is left then.
        LostRace: it was changed meanwhile, or another writer was first.
    """
    started = time.monotonic()
    location, out = os.fspath(location), out if out is None else os.fspath(out)
    place = out or location
    step = roots.step_of(basename(place))
    if out is not None and step is None:
        raise InputError(f"--as {out} does not end in a step's number; a version of a root is named ROOT/STEP")
    _refuse_versions(location, out)
    found = look(location)
    if out is None and found.aside:
        raise InputError(
            f"{location} also holds {', '.join(found.aside[:3])}, which a loader could read instead; remove them, or "
            "adopt it --as ROOT/STEP, where they are left out"
        )
    digests = _digests(found, progress)
    if found.tied_head and len({digests[name] for name in found.tied_head}) > 1:
        raise InputError(
            f"{location}: config.json ties the output head to the embedding, but {found.tied_head[0]} has other values; "
            "set tie_word_embeddings to false in config.json"
        )
    made = _manifest(found, digests, step)
    if out is None:
        _unchanged(found)
        _commit(place, made)
        linked = copied = 0
    else:
        linked, copied = _place(found, made, out, copy)
    size = sum(t.nbytes for t in made.tensors.values())
    notes = found.notes + ((f"left out: {', '.join(found.aside)}",) if found.aside else ())
    seconds = round(time.monotonic() - started, 3)
    return Adopted(place, made.family, step, len(made.tensors), size, linked, copied, seconds, notes)


def _refuse_versions(location: str, out: str | None) -> None:
    """A place that is taken, and a directory that is a version of ours: the hf layout alone can be had elsewhere, too."""
    if out is not None and store_for(out).stat(join(out, manifests.NAME)):
        raise InputError(f"{out} is a version already; give another step with --as")
    if not store_for(location).stat(join(location, manifests.NAME)):
        return
    layout = load_manifest(location)[0].layout
    if out is None:
        raise InputError(
            f"{location} is a version already (layout {layout}), and there is nothing to adopt: `mtx2vllm verify {location}` "
            "checks it"
        )
    if layout != "hf":
        raise InputError(
            f"{location} is a version already (layout {layout}), not a Hugging Face directory; `mtx2vllm fetch {location} {out}` "
            "copies it"
        )


def _digests(found: Found, progress: Progress | None) -> dict[str, str]:
    """blake3 of every tensor, each byte read once, in the order in which they lie."""
    store = store_for(found.location)
    total, done = sum(stored.nbytes for _, stored in found.tensors.values()), 0

    def one(name: str) -> tuple[str, str]:
        file, stored = found.tensors[name]
        entry = TensorEntry(file=file, offset=stored.offset, dtype=stored.dtype, shape=stored.shape, blake3="0" * 64)
        return name, hash_tensor(store, found.location, entry, bytearray(max(1, min(stored.nbytes, CHUNK))))

    order = sorted(found.tensors, key=lambda name: (found.tensors[name][0], found.tensors[name][1].offset))
    digests: dict[str, str] = {}
    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="mtx2vllm-adopt") as pool:
            for name, digest in pool.map(one, order):
                digests[name] = digest
                done += found.tensors[name][1].nbytes
                if progress:
                    progress(done, total)
    except (FileNotFoundError, EOFError) as error:
        raise LostRace(f"{found.location} changed while it was read ({error}); wait until its writer is done") from None
    return digests


def _manifest(found: Found, digests: Mapping[str, str], step: int | None) -> Manifest:
    store = store_for(found.location)
    files = {}
    for name, stat in found.stats.items():
        data = found.shards[name].raw if name in found.shards else store.read(join(found.location, name))
        files[name] = FileEntry(size=stat.size, digest=manifests.digest(data), shard=name in found.shards)
    tensors = {
        name: TensorEntry(file=file, offset=s.offset, dtype=s.dtype, shape=s.shape, blake3=digests[name])
        for name, (file, s) in found.tensors.items()
    }
    return Manifest(
        layout="hf",
        family=found.plan.family,
        architecture=_architecture(found),
        source=Source(uri=local_path(found.location), step=step, kind="hf"),
        conventions={k: v for k, v in found.plan.conventions.items() if k == "head_dim"},
        dtype=_dtype(tensors),
        tool=f"mtx2vllm {package_version('mtx2vllm')}",
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        files=files,
        tensors=tensors,
    )


def _architecture(found: Found) -> str:
    named = found.config.get("architectures") or [found.plan.architecture]
    return str(named[0])


def _dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """The type that most bytes have, by its long name."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    return next(long for long, short in DTYPES.items() if short == most)


def _place(found: Found, made: Manifest, out: str, copy: bool) -> tuple[int, int]:
    """Link shards (or copy them, where links do not work) and copy every other file of the manifest into a version
    directory, the manifest last; how many were linked and how many copied."""
    store, linked = store_for(out), 0
    with claims.Claim(out) as claim:
        if store.stat(join(out, manifests.NAME)):
            raise InputError(f"{out} has a manifest already: another writer was first; give another step")
        claims.refuse_foreign(store, out, ())
        claim.announce(tuple(made.files))
        for name, file in made.files.items():
            source, target = join(found.location, name), join(out, name)
            linked += (file.shard and not copy and _link(source, target)) or _copy(found, name, out)
        _unchanged(found)
        _commit(out, made)
    return linked, len(made.files) - linked


def _link(source: str, target: str) -> bool:
    here, there = store_for(source).local(source), store_for(target).local(target)
    if here is None or there is None:
        return False
    with contextlib.suppress(OSError):
        os.link(Path(here).resolve(), there)
        return True
    return False  # another disk, or a mount without links


def _copy(found: Found, name: str, out: str) -> bool:
    size = found.stats[name].size
    source, buffer = store_for(found.location), memoryview(bytearray(max(1, min(size, CHUNK))))
    writer = store_for(out).writer(join(out, name), size)
    try:
        for offset in range(0, size, CHUNK):
            part = buffer[: min(CHUNK, size - offset)]
            source.read_into(join(found.location, name), offset, part)
            writer.write(offset, part)
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return False


def _unchanged(found: Found) -> None:
    store = store_for(found.location)
    changed = [name for name, stat in found.stats.items() if store.stat(join(found.location, name)) != stat]
    if changed:
        raise LostRace(
            f"{found.location}: {changed[0]} was written while it was read; wait until its writer is done and run again"
        )


def _commit(place: str, made: Manifest) -> None:
    store_for(place).create(join(place, manifests.NAME), made.dumps())
