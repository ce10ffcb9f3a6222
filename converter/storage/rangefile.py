"""A local file written in ranges, with its dirty pages bounded.

Writing into the page cache without limit makes the kernel stop the writer at a moment of its own choice and touches
fresh memory for every byte. Two windows are kept instead: while one is filled, the one before goes to the disk and its
pages are given back.
"""

import os
import secrets
import threading
from pathlib import Path

from mtx2vllm.converter.errors import LostRace, Mtx2vllmError
from mtx2vllm.converter.storage import LEFTOVER, Stat, Ticket, posix

WINDOW = 32 << 20  # bytes per window; 2 x 32 MiB keeps a disk busy, and more only costs fresh pages
_MANY = 64  # extents a window; beyond that one call over the whole span is cheaper

Extent = tuple[int, int]  # start, end


class Window:
    """Writes at offsets of a descriptor, with at most two windows of dirty pages. Only the bookkeeping is locked."""

    def __init__(self, fd: int, path: Path, size: int) -> None:
        self.fd, self._path, self._size = fd, path, size
        self.written = 0
        self._lock = threading.Lock()
        self._dirty: list[Extent] = []
        self._dirty_bytes = 0
        self._leaving: list[Extent] = []

    def write(self, offset: int, data: memoryview) -> None:
        """See `RangeWriter.write`."""
        view = data.cast("B")
        if offset < 0 or offset + len(view) > self._size:
            raise ValueError(f"{self._path}: range {offset}+{len(view)} lies outside {self._size} bytes")
        with posix.sentences(str(self._path), len(view)):
            done = 0
            while done < len(view):
                done += os.pwrite(self.fd, view[done:], offset + done)
        self._account(offset, len(view))

    def _account(self, offset: int, length: int) -> None:
        with self._lock:
            self.written += length
            self._dirty_bytes += length
            if self._dirty and self._dirty[-1][1] == offset:
                self._dirty[-1] = (self._dirty[-1][0], offset + length)
            else:
                self._dirty.append((offset, offset + length))
            if self._dirty_bytes < WINDOW:
                return
            full, self._dirty, self._dirty_bytes = merged(self._dirty), [], 0
            before, self._leaving = self._leaving, full
        for start, end in full:
            posix.start_write_back(self.fd, start, end - start)
        for start, end in before:
            posix.finish_write_back(self.fd, start, end - start)

    def sync(self) -> None:
        """Everything to the disk, and its pages back."""
        with posix.sentences(str(self._path), self._size):
            os.fsync(self.fd)
            posix.drop_pages(self.fd, 0, 0)

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FileRangeWriter:
    """See `SharedWriter`. Threads may write at the same time."""

    def __init__(self, path: str, size: int) -> None:
        """Begin a file of `size` bytes; until `commit`, what was at `path` stays there. Raises OSError, a full disk
        included."""
        self._path, self._size = Path(path), size
        self._before = _identity(self._path)
        self._hidden = self._path.with_name(f"{LEFTOVER}{secrets.token_hex(8)}")
        fd = os.open(self._hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._window = Window(fd, self._path, size)
        self._guests = 0  # bytes that guests have written
        try:
            posix.allocate(fd, size)
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """See `RangeWriter.write`.

        Raises:
            ValueError: the range lies outside the file.
            Mtx2vllmError: the disk is full.
        """
        self._window.write(offset, data)

    def commit(self) -> Stat:
        """See `RangeWriter.commit`."""
        written, size = self._window.written + self._guests, self._size
        if written != size:
            self.abort()
            raise Mtx2vllmError(f"{self._path}: {written:,} of {size:,} bytes were written; this is a fault of ours.")
        self._window.sync()
        with posix.sentences(str(self._path), self._size):
            if _identity(self._path) not in {None, self._before}:
                self.abort()
                raise LostRace(f"{self._path} was written by another process meanwhile; ours was not put there.")
            self._hidden.replace(self._path)  # a mapped file keeps its bytes; truncating would take them away
            ours = os.fstat(self._window.fd)
            self._window.close()
            posix.sync_directory(self._path.parent)
            return posix.stat_of(ours)

    def abort(self) -> None:
        """See `RangeWriter.abort`."""
        if self._window.fd >= 0:
            self._window.close()
            self._hidden.unlink(missing_ok=True)

    def ticket(self) -> Ticket:
        """See `SharedWriter.ticket`; guests need the same path on their machines."""
        return Ticket(str(self._path.absolute()), str(self._hidden.absolute()), self._size)

    def accept(self, receipt: int) -> None:
        """See `SharedWriter.accept`; a receipt is a number of bytes."""
        self._guests += receipt

    def extents(self, offset: int, length: int) -> list[tuple[str, int, int]]:
        """See `SharedWriter.extents`."""
        return [(str(self._hidden.absolute()), offset, length)]


class FileGuest:
    """See `GuestWriter`. A range that is written again, after a guest was killed, has the same bytes at the same place."""

    def __init__(self, ticket: Ticket) -> None:
        self._window = Window(os.open(ticket.hidden, os.O_RDWR), Path(ticket.path), ticket.size)

    def write(self, offset: int, data: memoryview) -> None:
        """See `FileRangeWriter.write`."""
        self._window.write(offset, data)

    def finish(self) -> int:
        """See `GuestWriter.finish`."""
        self._window.sync()
        self._window.close()
        return self._window.written

    def abort(self) -> None:
        """See `GuestWriter.abort`."""
        self._window.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def merged(extents: list[Extent]) -> list[Extent]:
    """Adjacent extents joined; one span over all where there are too many of them."""
    joined: list[Extent] = []
    for start, end in sorted(extents):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined if len(joined) <= _MANY else [(joined[0][0], joined[-1][1])]
