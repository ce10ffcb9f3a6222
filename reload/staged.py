"""A staged version: arrays that map what the staging process has read. Nothing is copied."""

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.storage import join
from mtx2vllm.converter.version.pieces import DTYPES
from mtx2vllm.reload.job import Item
from mtx2vllm.reload.match import Target
from mtx2vllm.schemas.manifest import Manifest

_POPULATE_READ = 22  # madvise, Linux 5.14: fault the pages in now, not during the pause
_STRIDE = 32 << 20
_LIBC = ctypes.CDLL(None)

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


def open_staged(
    version: Version,
    targets: Mapping[str, Target],
    items: list[Item],
    done: dict[str, Any],
    memory: tuple[int, int] | None,
) -> tuple[dict[str, NDArray[Any]], dict[str, Identity]]:
    """Map what the worker reports as `done`; the arrays, and the identities of the version's files among them."""
    maps: dict[str, mmap.mmap] = {}
    files: dict[str, Identity] = {}
    shared = mmap.mmap(memory[0], memory[1], prot=mmap.PROT_READ) if memory is not None else None
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
    """Page tables now rather than page faults in the pause. Called in C: `mmap.madvise` holds the GIL, and the engine's
    steps with it, for as long as pages must be read again. In strides, so that an end of the process need not wait."""
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = min(offset + nbytes, len(source))
    base = np.frombuffer(source, np.uint8).ctypes.data
    for start in range(begin, end, _STRIDE):
        length = min(_STRIDE, end - start)
        if _LIBC.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(length), _POPULATE_READ):
            return  # an older kernel; faults will do
