"""A gs:// object written in ranges: each range goes up as a part at once, and the store composes the parts at the end.

Nothing is kept on a local disk, and memory is bounded in bytes: what waits to become a part (`PENDING`) and what is on
its way (`IN_FLIGHT`), for all objects being written together. Parts lie below `LEFTOVER` names in the object's own
directory, so a killed run leaves nothing that looks like a file of a version.
"""

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING

from mtx2vllm.converter.errors import Mtx2vllmError, StorageError
from mtx2vllm.converter.storage import LEFTOVER, Stat, Ticket, basename, crc32c, gs_http, join, parent

if TYPE_CHECKING:
    from mtx2vllm.converter.storage.gs import GsStore

PART = 4 << 20  # by one request each; a shard of 4 GiB is 1024 of them, composed in two rounds
IN_FLIGHT = 32 << 20  # a part exists twice while it is sent, so this costs about 64 MiB
PENDING = 16 << 20
FAN_IN = 32  # objects that one compose request may name


class Uploads:
    """What the writers of one store share: threads, and the bound on bytes under way."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._room = threading.Condition()
        self._under_way = 0
        self.pending = 0  # bytes that wait in the writers; each writer adds its own under its own lock

    def submit(self, nbytes: int, call: Callable[[], None]) -> Future[None]:
        """Run `call`, which holds `nbytes`, as soon as there is room for them."""
        with self._room:
            self._room.wait_for(lambda: self._under_way == 0 or self._under_way + nbytes <= IN_FLIGHT)
            self._under_way += nbytes

        def run() -> None:
            try:
                call()
            finally:
                with self._room:
                    self._under_way -= nbytes
                    self._room.notify_all()

        return self._pool.submit(run)

    def count_pending(self, nbytes: int) -> int:
        """Add to the bytes that wait; their sum."""
        with self._room:
            self.pending += nbytes
            return self.pending


class Part:
    """A part on its way or there: [offset, offset + length)."""

    __slots__ = ("checksum", "length", "offset", "path")

    def __init__(self, path: str, offset: int, data: bytes) -> None:
        self.path, self.offset, self.length = path, offset, len(data)
        self.checksum = gs_http.checksum(data)


class GsRangeWriter:
    """See `SharedWriter`, and `GuestWriter`: a guest has a `directory` for its parts within its host's."""

    def __init__(
        self, store: "GsStore", uploads: Uploads, path: str, size: int, directory: str | None = None, before: int = 0
    ) -> None:
        """`before`: the generation of what lies at `path`, which stays until `commit` and nothing else may replace."""
        self._store, self._uploads, self._path, self._size, self._before = store, uploads, path, size, before
        own = join(parent(path), f"{LEFTOVER}parts", secrets.token_hex(8), basename(path))
        self._directory = directory or own
        self._lock = threading.Lock()
        self._runs: dict[int, bytearray] = {}  # end offset -> bytes that wait, so that the next range finds its run
        self._parts: list[Part] = []
        self._sent: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._closed = False

    def write(self, offset: int, data: memoryview) -> None:
        """See `RangeWriter.write`.

        Raises:
            ValueError: the range lies outside the file.
            StorageError: an earlier part could not be sent.
        """
        view = data.cast("B")
        if offset < 0 or offset + len(view) > self._size:
            raise ValueError(f"{self._path}: range {offset}+{len(view)} lies outside {self._size} bytes")
        if self._failure:
            raise self._failure
        with self._lock:
            ready = self._add(offset, view)
            if self._uploads.count_pending(len(view) - sum(len(run) for _, run in ready)) > PENDING:
                ready += self._largest()
        for start, run in ready:
            self._send(start, run)

    def _add(self, offset: int, view: memoryview) -> list[tuple[int, bytearray]]:
        """Append to the run that ends here, or begin one; the parts that are complete by that."""
        run = self._runs.pop(offset, bytearray())
        start, ready = offset - len(run), []
        missing = PART - len(run)
        while len(view) >= missing:
            run += view[:missing]
            ready.append((start, run))
            start, view, run, missing = start + PART, view[missing:], bytearray(), PART
        run += view
        if run:
            self._runs[start + len(run)] = run
        return ready

    def _largest(self) -> list[tuple[int, bytearray]]:
        if not self._runs:
            return []
        end = max(self._runs, key=lambda end: len(self._runs[end]))
        run = self._runs.pop(end)
        self._uploads.count_pending(-len(run))
        return [(end - len(run), run)]

    def _send(self, offset: int, run: bytearray) -> None:
        data = bytes(run)
        part = Part(join(self._directory, f"{offset:016d}"), offset, data)
        sent = self._uploads.submit(part.length, lambda: self._put(part, data))
        with self._lock:
            self._parts.append(part)
            self._sent.append(sent)

    def _put(self, part: Part, data: bytes) -> None:
        if self._closed or self._failure:
            return
        try:
            self._store.put(part.path, data, None)
        except BaseException as error:
            self._failure = error
            raise

    def commit(self) -> Stat:
        """See `RangeWriter.commit`."""
        try:
            self._flush()
            parts = sorted(self._parts, key=lambda part: part.offset)
            self._require_whole(parts)
            stat = self._compose(parts)
        except BaseException:
            self.abort()
            raise
        self._clean()
        return stat

    def _flush(self) -> None:
        while self._runs:
            with self._lock:
                ready = self._largest()
            for start, run in ready:
                self._send(start, run)
        for sent in self._sent:
            sent.result()

    def _require_whole(self, parts: list[Part]) -> None:
        end = 0
        for part in parts:
            if part.offset != end:
                break
            end += part.length
        if end != self._size or sum(part.length for part in parts) != self._size:
            raise Mtx2vllmError(
                f"{self._path}: not every one of its {self._size:,} bytes was written exactly once; this is a fault of ours."
            )

    def _compose(self, parts: list[Part]) -> Stat:
        """Compose 32 at a time until one request makes the object itself."""
        over = min(self._before, self._store.generation(self._path))  # 0 where it was deleted meanwhile
        if not parts:
            return self._store.put(self._path, b"", over)
        pieces = [(part.path, part.checksum, part.length) for part in parts]
        level = 0
        while len(pieces) > FAN_IN:
            level += 1
            pieces = self._level(pieces, level)
        names = [path for path, _, _ in pieces]
        return self._store.compose(self._path, names, crc32c.whole((crc, n) for _, crc, n in pieces), over)

    def _level(self, pieces: list[tuple[str, int, int]], level: int) -> list[tuple[str, int, int]]:
        made, sent = [], []
        for number in range(0, len(pieces), FAN_IN):
            group = pieces[number : number + FAN_IN]
            path = join(self._directory, f"level{level}-{number:08d}")
            crc, length = crc32c.whole((crc, n) for _, crc, n in group), sum(n for _, _, n in group)
            names = [name for name, _, _ in group]
            sent.append(self._uploads.submit(0, lambda p=path, n=names, c=crc: self._join(p, n, c)))  # type: ignore[misc]
            made.append((path, crc, length))
        for one in sent:
            one.result()
        return made

    def _join(self, path: str, names: list[str], checksum: int) -> None:
        self._store.compose(path, names, checksum, None)

    def ticket(self) -> Ticket:
        """See `SharedWriter.ticket`."""
        return Ticket(self._path, self._directory, self._size)

    def finish(self) -> list[Part]:
        """See `GuestWriter.finish`."""
        self._flush()
        return self._parts

    def accept(self, receipt: list[Part]) -> None:
        """See `SharedWriter.accept`; a receipt is a list of parts."""
        with self._lock:
            self._parts += receipt

    def extents(self, offset: int, length: int) -> list[tuple[str, int, int]]:
        """See `SharedWriter.extents`."""
        self._flush()
        found = []
        for part in sorted(self._parts, key=lambda part: part.offset):
            low, high = max(offset, part.offset), min(offset + length, part.offset + part.length)
            if low < high:
                found.append((part.path, low - part.offset, high - low))
        return found

    def abort(self) -> None:
        """See `RangeWriter.abort`."""
        if self._closed:
            return
        with self._lock:
            self._uploads.count_pending(-sum(len(run) for run in self._runs.values()))
            self._runs.clear()
        self._closed = True
        wait(self._sent)
        self._clean()

    def _clean(self) -> None:
        self._closed = True
        with suppress(StorageError):  # leftovers are harmless, and the next run removes them
            self._store.delete_all(self._directory)
