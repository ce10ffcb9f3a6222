"""Where bytes lie: local files and gs:// objects behind one small set of verbs.

A location is a string: an absolute or relative local path, or `gs://bucket/key`. `store_for(location)` is the only
place that looks at the scheme; every other module uses the verbs of `Store` and the pure functions `join`, `parent`
and `basename`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

GS = "gs://"


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store knows of one object. `generation` changes whenever the object is replaced."""

    size: int
    generation: int
    modified: float  # seconds since the epoch, by the store's clock


@dataclass(frozen=True, slots=True)
class Entry:
    """One name directly below a directory (or a prefix ending in '/')."""

    name: str
    is_dir: bool
    size: int


class RangeWriter(Protocol):
    """A file being written in ranges, in any order and from several threads; every byte exactly once."""

    def write(self, offset: int, data: memoryview) -> None:
        """Put `data` at `offset`. The buffer may be reused as soon as this returns."""

    def commit(self) -> None:
        """All ranges are written: make the file durable (fsync, or compose the uploaded parts)."""

    def abort(self) -> None:
        """Drop what was written; nothing visible remains."""


class Store(Protocol):
    """The verbs. All raise `StorageError` on a permanent refusal; transient faults are retried inside."""

    def stat(self, path: str) -> Stat | None:
        """Size and generation of a file or object, None where there is none."""

    def listdir(self, path: str) -> list[Entry]:
        """Names directly below `path`, by one listing; [] where there is nothing."""

    def walk(self, path: str) -> Iterator[str]:
        """Every file below `path`, as locations relative to it with '/' between the parts."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file. FileNotFoundError where there is none; EOFError where the range ends beyond it."""

    def read_into(self, path: str, start: int, out: memoryview) -> None:
        """Fill `out` from offset `start`. Errors as `read`."""

    def create(self, path: str, data: bytes) -> Stat:
        """Write a small file that must not exist yet. `LostRace` where it does (of two writers exactly one wins)."""

    def replace(self, path: str, data: bytes, generation: int | None = None) -> Stat:
        """Write a small file whole, atomically for readers; with `generation`, only over that very one, else LostRace
        (0: only where none exists)."""

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens where there is none."""

    def writer(self, path: str, size: int) -> RangeWriter:
        """Begin a file of `size` bytes that is written in ranges."""

    def kvstore(self, path: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of a directory."""

    def local(self, path: str) -> str | None:
        """The path for mmap and inotify, None where the store is remote."""


def store_for(location: str) -> Store:
    """The store that holds `location`.

    Raises:
        InputError: a scheme that is not supported.
    """
    raise NotImplementedError


def join(base: str, *names: str) -> str: ...


def parent(location: str) -> str: ...


def basename(location: str) -> str: ...


__all__ = ["GS", "AbstractContextManager", "Entry", "RangeWriter", "Stat", "Store", "basename", "join", "parent", "store_for"]
