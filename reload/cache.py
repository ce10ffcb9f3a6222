"""Tensors kept on a local disk, by content, for roots whose files cannot be mapped.

    CACHE_DIR/<key>-<blake3>     a tensor's bytes as the engine gets them; `key` says what it is, blake3 what it must be
    CACHE_DIR/<key>.part         one being fetched; what it holds is a prefix, with which an interrupted fetch goes on

Equal tensors of different versions are one file. A hit is hashed, not trusted. Files are replaced and unlinked, never
truncated: the engine may have them mapped. Several ranks of one host may share a directory; a tensor is fetched once.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from mtx2vllm.converter.errors import InputError

_NAME = re.compile(r"^([0-9a-f]{64})(?:-([0-9a-f]{64})|\.part)$")
_CHUNK = 8 << 20

Put = Callable[[memoryview], None]
Fill = Callable[[int, Put], None]  # from which byte on, and where the bytes go, in order


class Cache:
    """One directory of at most `size` bytes."""

    def __init__(self, directory: str, size: int) -> None:
        self._directory, self._size = Path(directory), size
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def make_room(self, sizes: Mapping[str, int], keep: Iterable[str] = ()) -> None:
        """Remove the least recently used files until `sizes` (key to bytes) fit. What `keep` names goes last.

        Raises:
            InputError: the version is larger than the cache.
        """
        total = sum(sizes.values())
        if total > self._size:
            raise InputError(
                f"{total} bytes must be staged, but MTX2VLLM_CACHE_SIZE is {self._size}: raise it, or unset "
                "MTX2VLLM_CACHE_DIR to stage in memory."
            )
        kept, others = set(keep), []
        used = 0
        for path, key in self._files():
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # another rank removed it
            if key not in sizes:
                used += stat.st_size
                others.append((key in kept, stat.st_mtime, path, stat.st_size))
        for _, _, path, size in sorted(others, key=lambda item: item[:2]):
            if used + total <= self._size:
                return
            path.unlink(missing_ok=True)
            used -= size

    def get(self, key: str, nbytes: int, fill: Fill, resumable: bool = False) -> tuple[str, str]:
        """The path and blake3 of a tensor, fetched by `fill` if need be. Only a `resumable` one may begin in the
        middle."""
        part = self._directory / f"{key}.part"
        with self._locked(part) as fd:
            found = self._find(key, nbytes)
            if found is None:
                found = self._fetch(part, fd, nbytes, fill, resumable)
                final = self._directory / f"{key}-{found}"
                part.rename(final)
            else:
                part.unlink(missing_ok=True)
                final = self._directory / f"{key}-{found}"
                os.utime(final)
        return str(final), found

    def drop(self, path: str) -> None:
        """Remove a file whose bytes are wrong."""
        Path(path).unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[Path, str]]:
        for path in self._directory.iterdir():
            match = _NAME.match(path.name)
            if match is not None:
                yield path, match[1]

    def _find(self, key: str, nbytes: int) -> str | None:
        """The blake3 of a sound file; others of that key are removed."""
        for path in self._directory.glob(f"{key}-*"):
            match = _NAME.match(path.name)
            with contextlib.suppress(FileNotFoundError):
                if match and match[2] and path.stat().st_size == nbytes and _hash(path).hexdigest() == match[2]:
                    return match[2]
                path.unlink()
        return None

    def _fetch(self, part: Path, fd: int, nbytes: int, fill: Fill, resumable: bool) -> str:
        start = os.fstat(fd).st_size if resumable else 0
        if start > nbytes or not resumable:
            start = 0
        os.ftruncate(fd, start)  # nobody maps a part
        hasher = _hash(part)
        os.lseek(fd, start, os.SEEK_SET)

        def put(data: memoryview) -> None:
            hasher.update(data)
            while len(data):
                data = data[os.write(fd, data) :]

        fill(start, put)
        return str(hasher.hexdigest())

    @contextlib.contextmanager
    def _locked(self, part: Path) -> Iterator[int]:
        """The part, open and ours alone. It is opened again where another process has finished or removed it."""
        while True:
            fd = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                ours, named = os.fstat(fd), _stat(part)
                if named is not None and (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino):
                    yield fd
                    return
            finally:
                os.close(fd)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _hash(path: Path) -> Any:
    hasher, buffer = blake3(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher
