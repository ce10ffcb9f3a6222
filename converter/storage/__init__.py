"""Where bytes lie: local files and gs:// objects behind one small set of verbs.

A location is a string: an absolute or relative local path, or `gs://bucket/key`. `store_for(location)` is the only
place that looks at the scheme; every other module uses the verbs of `Store` and the pure functions `join`, `parent`
and `basename`. Trailing slashes mean nothing; keys and names are compared whole (`v1` is no prefix of `v10`).

Names that start with `LEFTOVER` are ours and temporary: a killed run leaves nothing else that is half written.
"""

import functools
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtx2vllm.converter.errors import InputError

GS = "gs://"
LEFTOVER = ".mtx2vllm-"  # starts the name of whatever a store writes on the way to the file that was asked for
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:/")


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

    def commit(self) -> Stat:
        """All ranges are written: make the file durable (fsync, or compose the uploaded parts).

        Raises:
            LostRace: another writer has put its own file under this name meanwhile.
            Mtx2vllmError: not every byte was written, or the disk is full.
        """

    def abort(self) -> None:
        """Drop what was written; nothing visible remains. Does nothing after `commit`."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who holds it may write ranges into a file that another process has begun. `hidden` is where its bytes wait."""

    path: str
    hidden: str
    size: int


class SharedWriter(RangeWriter, Protocol):
    """A RangeWriter that lets other processes write as its guests."""

    def ticket(self) -> Ticket:
        """What a guest needs; see `Store.guest`."""

    def accept(self, receipt: Any) -> None:
        """Count a guest's ranges as written. Ranges of guests that were never accepted do not exist."""

    def extents(self, offset: int, length: int) -> list[tuple[str, int, int]]:
        """Where bytes of the file lie before it is committed: (location, start, length) in order."""


class GuestWriter(Protocol):
    """A guest's side of a SharedWriter."""

    def write(self, offset: int, data: memoryview) -> None:
        """As `RangeWriter.write`."""

    def finish(self) -> Any:
        """Make everything durable; the receipt for `SharedWriter.accept`, which can be pickled."""

    def abort(self) -> None:
        """Stop; nothing is handed over."""


class Store(Protocol):
    """The verbs. All raise `StorageError` on a permanent refusal; transient faults are retried inside."""

    def stat(self, path: str) -> Stat | None:
        """Size and generation of a file or object, None where there is none (a directory is none)."""

    def listdir(self, path: str) -> list[Entry]:
        """Names directly below `path`, sorted, by one listing; [] where there is nothing."""

    def walk(self, path: str) -> Iterator[str]:
        """Every file below `path`, sorted, as locations relative to it with '/' between the parts."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file. FileNotFoundError where there is none; EOFError where the range ends beyond it."""

    def read_into(self, path: str, start: int, out: memoryview) -> None:
        """Fill `out` from offset `start`. Errors as `read`."""

    def create(self, path: str, data: bytes) -> Stat:
        """Write a small file that must not exist yet. `LostRace` where it does (of two writers exactly one wins).

        On a mount without hard links the name can be seen before its content is whole: readers must take a text that
        does not parse for one that is still being written. What we create is JSON, and no prefix of it parses.
        """

    def replace(self, path: str, data: bytes, generation: int | None = None) -> Stat:
        """Write a small file whole, atomically for readers; with `generation`, only over that very one, else LostRace
        (0: only where none exists)."""

    def delete(self, path: str, generation: int | None = None) -> None:
        """Remove a file; nothing happens where there is none. With `generation`, only that very one, else LostRace."""

    def delete_all(self, path: str) -> int:
        """Remove every file below `path`, and the directories; the number of files removed."""

    def clean_leftovers(self, path: str, folders: Sequence[str] = ("",)) -> int:
        """Remove what killed writers left (names that start with `LEFTOVER`) in these folders of `path`, and not below
        others, which may be another writer's; the number of files."""

    def writer(self, path: str, size: int) -> SharedWriter:
        """Begin a file of `size` bytes that is written in ranges. What is there already stays until `commit`, and is
        then unlinked, not truncated: it may be mapped."""

    def guest(self, ticket: Ticket) -> GuestWriter:
        """Write into a file that another process has begun."""

    def kvstore(self, path: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of a directory."""

    def local(self, path: str) -> str | None:
        """The path for mmap and inotify, None where the store is remote."""


def store_for(location: str) -> Store:
    """The store that holds `location`.

    Raises:
        InputError: a scheme that is not supported, or gs:// without a bucket.
    """
    if location.startswith(GS):
        if not split_gs(location)[0]:
            raise InputError(f"{location!r} names no bucket: write gs://BUCKET/PATH.")
        return _gs_store(os.environ.get("STORAGE_EMULATOR_HOST") or None)
    if location.startswith("gs:/"):
        raise InputError(f"{location!r} is neither a path nor a bucket: write gs:// with two slashes.")
    if _SCHEME.match(location):
        raise InputError(f"{location!r}: only local paths and gs:// are supported.")
    if not location or "\0" in location:
        raise InputError(f"{location!r} is not a path.")
    return _file_store()


@functools.cache
def _gs_store(emulator: str | None) -> Store:
    # Imported here: a local conversion must not pay for Google's client libraries.
    from mtx2vllm.converter.storage.gs import GsStore

    return GsStore(emulator)


@functools.cache
def _file_store() -> Store:
    from mtx2vllm.converter.storage.files import FileStore

    return FileStore()


def split_gs(location: str) -> tuple[str, str]:
    """(bucket, key) of a gs:// location; the key has no trailing slash and is empty for the bucket's root."""
    bucket, _, key = location[len(GS) :].partition("/")
    return bucket, key.rstrip("/")


def normal(location: str) -> str:
    """The location without trailing slashes."""
    if location.startswith(GS):
        bucket, key = split_gs(location)
        return f"{GS}{bucket}/{key}" if key else f"{GS}{bucket}"
    return location.rstrip("/") or ("/" if location.startswith("/") else location)


def join(base: str, *names: str) -> str:
    """`base` with names below it. A name never replaces the base, even when it starts with a slash."""
    for name in (name.strip("/") for name in names):
        if name:
            base = normal(base)
            base = f"{base}{'' if base.endswith('/') or not base else '/'}{name}"
    return normal(base)


def is_leftover(name: str) -> bool:
    """Whether a file, by its path in a directory, is one that a writer has not finished, or lies in a folder of such."""
    return any(part.startswith(LEFTOVER) for part in name.split("/"))


def parent(location: str) -> str:
    """The directory that holds `location`; a bucket and `/` are their own parents."""
    location = normal(location)
    if location.startswith(GS):
        bucket, key = split_gs(location)
        return normal(f"{GS}{bucket}/{key.rpartition('/')[0]}")
    return posixpath.dirname(location) or "."


def basename(location: str) -> str:
    """The last name of a location; empty for a bucket and for `/`."""
    if location.startswith(GS):
        return split_gs(location)[1].rpartition("/")[2]
    return posixpath.basename(normal(location))
