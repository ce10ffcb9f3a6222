"""Bringing a version's bytes within reach before anything pauses.

The work is done by a process of its own (`stage_worker`); this side starts it, listens, and maps what it has read:
files of a local disk as they are (only hashed by then, and in the page cache), everything else from shared memory or
the cache. Nothing is copied, and nothing runs under the engine's GIL but this bookkeeping.
"""

import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.pieces import DTYPES
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.reload.job import Item, Job
from mtx2vllm.reload.match import Target
from mtx2vllm.reload.watch import is_silent
from mtx2vllm.schemas.manifest import Manifest

_ALIGNMENT = 4096  # of tensors in shared memory: whole pages go to the device fastest
_SILENCE_S = 300.0  # a worker that reads nothing for so long hangs in a mount
_TICK_S = 0.2
_POPULATE_READ = 22  # madvise, Linux 5.14: fault the pages in now, not during the pause
_STRIDE = 32 << 20
# The worker allocates chunks over and over: keep freed memory instead of faulting fresh pages in each time.
_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_ARENA_MAX": "1"}

Identity = tuple[int, ...]


class StageFailed(Exception):
    """Nothing was staged. `reason` is one word for the metrics (`invalid`: the version's fault, for good)."""

    def __init__(self, reason: str, problems: list[str]) -> None:
        self.reason, self.problems = reason, problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class Version:
    """A committed version, as far as its manifest says. `step` is the number that the engine will carry."""

    step: int
    location: str
    digest: str
    manifest: Manifest
    published: float = 0.0  # when the manifest was written, by the store's clock


@dataclass(frozen=True, slots=True)
class Options:
    """How to stage: where what cannot be mapped goes, and whether to screen values."""

    cache_dir: str | None = None
    cache_size: int = 0
    screen: bool = False


@dataclass(frozen=True)
class Staged:
    """Arrays by the engine's names, read-only, backed by maps that live as long as they do."""

    weights: Mapping[str, NDArray[Any]]
    nbytes: int
    verify_s: float  # until sizes and headers were checked
    stage_s: float  # the rest
    keys: frozenset[str] = frozenset()  # cached
    files: Mapping[str, Identity] = field(default_factory=dict)

    def check(self) -> None:
        """Right before a swap: what was hashed is what is mapped.

        Raises:
            StageFailed: a file was replaced or written to.
        """
        touched = [path for path, identity in self.files.items() if _identity(path) not in {identity, None}]
        if touched:
            raise StageFailed("changed", [f"{touched[0]} was written to after it was staged; versions are immutable."])


def _identity(path: str) -> Identity | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None  # unlinked: the map keeps the bytes
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def stage(
    version: Version,
    targets: Mapping[str, Target],
    options: Options,
    cancelled: Callable[[], bool] = lambda: False,
    keep: Collection[str] = (),
) -> Staged:
    """Verify and read `targets` of a version. `keep`: cached keys not to remove for it.

    Raises:
        StageFailed: with the reason and whole sentences.
    """
    if not targets:
        return Staged({}, 0, 0.0, 0.0)
    items, size = _items(version, targets, options)
    memory = _memory(size)
    job = Job(
        location=version.location, digest=version.digest, items=items, parent=os.getpid(), memory=memory,
        memory_size=size, cache_dir=options.cache_dir, cache_size=options.cache_size, keep=sorted(keep),
        screen=options.screen,
    )  # fmt: skip
    try:
        begun = time.monotonic()
        done, verified = _work(job, cancelled)
        staged = _open(version, targets, items, done, (memory, size))
    finally:
        if memory is not None:
            os.close(memory)
    total = sum(target.nbytes for target in targets.values())
    cached = frozenset(item.key for item in items if item.where == "cache")
    return Staged(staged[0], total, verified - begun, time.monotonic() - verified, cached, staged[1])


def _memory(size: int) -> int | None:
    """Anonymous memory that another process can fill: unlike /dev/shm, no container bounds it to 64 MB."""
    if size == 0:
        return None
    fd = os.memfd_create("mtx2vllm-stage")
    os.ftruncate(fd, size)
    return fd


def mappable(location: str) -> bool:
    """Whether the files of a version can be mapped for good: on a network mount a server's trouble would be a signal
    that kills the engine."""
    local = store_for(location).local(location)
    return local is not None and not is_silent(local)


def _items(version: Version, targets: Mapping[str, Target], options: Options) -> tuple[list[Item], int]:
    """What the worker is to do, and how much shared memory that takes."""
    local, items, size = mappable(version.location), [], 0
    for target in targets.values():
        width = DTYPES[target.dtype].itemsize
        entry = version.manifest.tensors[target.recipe.pieces[0].source]
        where: Literal["file", "memory", "cache"]
        offset = 0
        if local and target.as_stored and entry.offset % width == 0:
            where = "file"
        elif options.cache_dir is not None:
            where = "cache"
        else:
            where, offset = "memory", size
            size += -(-max(target.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        items.append(Item(folded=target.folded, dtype=target.dtype, where=where, key=target.key, offset=offset))
    return items, size


def _work(job: Job, cancelled: Callable[[], bool]) -> tuple[dict[str, Any], float]:
    """Run the worker to its end; what it reports, and when the checks of headers were over."""
    command = [sys.executable, "-P", "-m", "mtx2vllm.reload.stage_worker"]
    try:
        process = subprocess.Popen(  # noqa: S603  (our own module)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **_MALLOC},
            pass_fds=[] if job.memory is None else [job.memory],
        )  # fmt: skip
    except OSError as error:
        raise StageFailed("internal", [f"the staging process could not be started: {error}."]) from None
    try:
        with suppress(BrokenPipeError):  # it ended at once; its exit says so below
            if process.stdin is not None:
                process.stdin.write(job.model_dump_json().encode() + b"\n")
                process.stdin.close()
        return _listen(process, cancelled)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _listen(process: "subprocess.Popen[bytes]", cancelled: Callable[[], bool]) -> tuple[dict[str, Any], float]:
    verified = heard = time.monotonic()
    fd, buffer = process.stdout.fileno() if process.stdout else -1, b""
    poll = select.poll()  # unlike select(), it takes the large descriptors of a busy server
    poll.register(fd, select.POLLIN)
    while True:
        if cancelled():
            raise StageFailed("cancelled", ["staging was given up."])
        if not poll.poll(_TICK_S * 1000):
            if time.monotonic() - heard > _SILENCE_S:
                raise StageFailed("storage", [f"reading made no progress for {_SILENCE_S:.0f} s; does the mount hang?"])
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            raise StageFailed("internal", [f"the staging process ended early (exit status {process.wait()})."])
        heard = time.monotonic()
        *lines, buffer = (buffer + data).split(b"\n")
        for message in map(json.loads, lines):
            if "failed" in message:
                raise StageFailed(message["failed"], message["problems"])
            if "done" in message:
                return message["done"], verified
            verified = heard if "verified" in message else verified


def _open(
    version: Version, targets: Mapping[str, Target], items: list[Item], done: dict[str, Any], memory: tuple[int | None, int]
) -> tuple[dict[str, NDArray[Any]], dict[str, Identity]]:
    """Map everything; the arrays, and the identities of the version's files among them."""
    maps: dict[str, mmap.mmap] = {}
    files: dict[str, Identity] = {}
    shared = mmap.mmap(memory[0], memory[1], prot=mmap.PROT_READ) if memory[0] is not None else None
    weights: dict[str, NDArray[Any]] = {}
    for (name, target), item in zip(targets.items(), items, strict=True):
        offset = item.offset
        source: mmap.mmap | None = shared
        if item.where == "cache":
            path, offset = done["cached"][item.key], 0
            if path not in maps and target.nbytes:
                maps[path] = _map(path, None)
            source = maps.get(path)
        elif item.where == "file":
            entry = version.manifest.tensors[target.recipe.pieces[0].source]
            path, offset = join(version.location, entry.file), entry.offset
            if path not in maps:
                files[path] = tuple(done["files"][entry.file])
                maps[path] = _map(path, files[path])
            source = maps[path]
        weights[name] = _array(source, offset, target)
    return weights, files


def _map(path: str, identity: Identity | None) -> mmap.mmap:
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            if identity is not None and identity != (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns):
                raise StageFailed("changed", [f"{path} was replaced while it was staged."])
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except FileNotFoundError:
        raise StageFailed("vanished", [f"{path} was deleted while it was staged."]) from None


def _array(source: mmap.mmap | None, offset: int, target: Target) -> NDArray[Any]:
    dtype = DTYPES[target.dtype]
    if source is None or target.nbytes == 0:
        return np.zeros(target.recipe.shape, dtype)
    _populate(source, offset, target.nbytes)
    flat = np.frombuffer(source, np.uint8, target.nbytes, offset)
    return flat.view(dtype).reshape(target.recipe.shape)


def _populate(source: mmap.mmap, offset: int, nbytes: int) -> None:
    """Page tables now rather than page faults in the pause; in strides, for the call may hold the GIL."""
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = min(offset + nbytes, len(source))
    for start in range(begin, end, _STRIDE):
        try:
            source.madvise(_POPULATE_READ, start, min(_STRIDE, end - start))
        except (OSError, ValueError):
            return  # an older kernel; faults will do
