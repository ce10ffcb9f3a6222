"""One shard on its way to a local file: in parallel ranges, hashed in order as they come.

Every byte of a shard belongs to its header or to one tensor. These pieces are what can be trusted or not, so they are
what is asked for. A fetched byte is touched once: read, written, hashed, and its page given back.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from blake3 import blake3

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.storage import posix
from mtx2vllm.converter.storage.rangefile import Window
from mtx2vllm.schemas.manifest import Manifest

RANGE = 4 << 20  # bytes a request: at 20 ms of latency a connection still carries 100 MB/s
THREADS = 16  # requests at a time; with RANGE, 64 MiB of buffers
LOCAL_THREADS = 4  # a disk has no latency worth more

Read = Callable[[int, memoryview], None]  # fill the buffer with the source's bytes from an offset on


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of a shard, and their blake3."""

    what: str
    start: int
    end: int
    digest: str


def pieces_of(manifest: Manifest, name: str) -> list[Piece]:
    """The header and the tensors of a shard, in order; together they are the whole file.

    Raises:
        InputError: bytes of the file belong to nothing in the manifest, or to two tensors.
    """
    entry = manifest.files[name]
    tensors = sorted(((t.offset, t.nbytes, key) for key, t in manifest.tensors.items() if t.file == name))
    end = tensors[0][0] if tensors else entry.size
    pieces = [Piece("its header", 0, end, entry.digest)]
    for offset, nbytes, key in tensors:
        if offset != end:
            raise InputError(f"{name}: the manifest covers bytes {min(offset, end)} to {max(offset, end)} not once.")
        end += nbytes
        pieces.append(Piece(f"tensor {key!r}", offset, end, manifest.tensors[key].blake3))
    if end != entry.size:
        raise InputError(f"{name}: the manifest says nothing of the bytes from {end} on.")
    return pieces


def ranges(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """What to ask for: neighbours in one request, none longer than RANGE."""
    joined: list[tuple[int, int]] = []
    for piece in pieces:
        if joined and joined[-1][1] == piece.start:
            joined[-1] = (joined[-1][0], piece.end)
        else:
            joined.append((piece.start, piece.end))
    return [(at, min(at + RANGE, end)) for start, end in joined for at in range(start, end, RANGE)]


def copy(read: Read, into: Window, pieces: Sequence[Piece], pool: ThreadPoolExecutor, at_a_time: int) -> list[Piece]:
    """Read `pieces` and write them, so many ranges at a time; those whose bytes came with another digest."""
    free = SimpleQueue[memoryview]()
    for _ in range(at_a_time):
        free.put(memoryview(bytearray(RANGE)))

    def one(start: int, end: int) -> memoryview:
        buffer = free.get()
        part = buffer[: end - start]
        read(start, part)
        into.write(start, part)
        return buffer

    check, under_way = _Check(pieces), deque[tuple[Future[memoryview], int]]()

    def finish_first() -> None:
        future, length = under_way.popleft()
        buffer = future.result()
        check.feed(buffer[:length])
        free.put(buffer)

    try:
        for start, end in ranges(pieces):
            if len(under_way) == at_a_time:
                finish_first()
            under_way.append((pool.submit(one, start, end), end - start))
        while under_way:
            finish_first()
    finally:
        wait([future for future, _ in under_way])  # nobody may still write when the caller closes the file
    return check.wrong


class _Check:
    """Hashes pieces as their bytes come, in order and without gaps between the pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.wrong = [piece for piece in pieces if piece.start == piece.end and blake3().hexdigest() != piece.digest]
        self._pieces = iter([piece for piece in pieces if piece.start < piece.end])
        self._next()

    def _next(self) -> None:
        self._piece = next(self._pieces, None)
        self._hasher, self._missing = blake3(), self._piece.end - self._piece.start if self._piece else 0

    def feed(self, data: memoryview) -> None:
        """The next bytes."""
        while len(data) and self._piece is not None:
            part = data[: self._missing]
            self._hasher.update(part)
            self._missing, data = self._missing - len(part), data[len(part) :]
            if self._missing == 0:
                if self._hasher.hexdigest() != self._piece.digest:
                    self.wrong.append(self._piece)
                self._next()


def unsound(fd: int, pieces: Sequence[Piece], pool: ThreadPoolExecutor) -> list[Piece]:
    """Those of a file's pieces that are not what they should be."""
    sound = pool.map(lambda piece: _hash(fd, piece) == piece.digest, pieces)
    return [piece for piece, is_sound in zip(pieces, sound, strict=True) if not is_sound]


def _hash(fd: int, piece: Piece) -> str:
    hasher, at = blake3(), piece.start
    buffer = memoryview(bytearray(min(RANGE, piece.end - piece.start)))
    while at < piece.end:
        count = os.preadv(fd, [buffer[: piece.end - at]], at)
        if count == 0:
            return ""
        hasher.update(buffer[:count])
        at += count
    return str(hasher.hexdigest())


@contextmanager
def opened(path: str, size: int, uncommit: Callable[[], None]) -> Iterator[tuple[int, bool]]:
    """The file at its full size, and whether it is new. One of another size is unlinked, not truncated: it may be
    mapped. Links are not followed. `uncommit` is called before anything changes."""
    place = Path(path)
    with posix.sentences(path, size):
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.is_symlink() or not place.exists() or place.stat().st_size != size
        if fresh:
            uncommit()
            place.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        if fresh:
            with posix.sentences(path, size):
                posix.allocate(fd, size)
        yield fd, fresh
    finally:
        os.close(fd)
