"""The local store: files written by offset, small files that appear whole.

A shard is written under a temporary name and gets its own when it is whole; only the manifest makes it count, so that
nothing depends on a rename being seen by others in time. Small files (manifest, leases, pin) are written under a
temporary name and linked (`create`) or renamed (`replace`) into place, so that a reader sees all of them or nothing.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from mtx2vllm.converter.errors import LostRace
from mtx2vllm.converter.storage import LEFTOVER, Entry, Stat, Ticket, join
from mtx2vllm.converter.storage.posix import sentences, stat_of, sync_directory
from mtx2vllm.converter.storage.rangefile import FileGuest, FileRangeWriter

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}


class FileStore:
    """Files of this machine or of a mount. See `Store` for the verbs."""

    def stat(self, path: str) -> Stat | None:
        """See `Store.stat`."""
        try:
            with sentences(path):
                found = Path(path).stat()
        except FileNotFoundError:
            return None
        return None if S_ISDIR(found.st_mode) else stat_of(found)

    def listdir(self, path: str) -> list[Entry]:
        """See `Store.listdir`."""
        entries = []
        try:
            with sentences(path), os.scandir(path) as found:
                for item in found:
                    with contextlib.suppress(FileNotFoundError):  # deleted between the listing and the look
                        is_dir = item.is_dir()
                        entries.append(Entry(item.name, is_dir, 0 if is_dir else item.stat().st_size))
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def walk(self, path: str) -> Iterator[str]:
        """See `Store.walk`."""
        found = [(Path(top) / name).relative_to(path).as_posix() for top, _, names in os.walk(path) for name in names]
        yield from sorted(found)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See `Store.read`."""
        with sentences(path), Path(path).open("rb", buffering=0) as file:
            if length is None:
                length = max(os.fstat(file.fileno()).st_size - start, 0)
            out = bytearray(length)
            _fill(file.fileno(), path, start, memoryview(out))
        return bytes(out)

    def read_into(self, path: str, start: int, out: memoryview) -> None:
        """See `Store.read_into`."""
        with sentences(path), Path(path).open("rb", buffering=0) as file:
            _fill(file.fileno(), path, start, out.cast("B"))

    def create(self, path: str, data: bytes) -> Stat:
        """See `Store.create`."""
        with sentences(path, len(data)), _temporary(path, data) as temporary:
            try:
                Path(path).hardlink_to(temporary)
            except FileExistsError:
                raise _exists(path) from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _create_in_place(path, data)
            sync_directory(Path(path).parent)
            return stat_of(Path(path).stat())

    def replace(self, path: str, data: bytes, generation: int | None = None) -> Stat:
        """See `Store.replace`."""
        if generation == 0:
            return self.create(path, data)
        with sentences(path, len(data)), _temporary(path, data) as temporary, _locked(path):
            self._require(path, generation)
            temporary.replace(path)
            sync_directory(Path(path).parent)
            return stat_of(Path(path).stat())

    def delete(self, path: str, generation: int | None = None) -> None:
        """See `Store.delete`."""
        with contextlib.suppress(FileNotFoundError), sentences(path), _locked(path):
            self._require(path, generation)
            Path(path).unlink()

    def _require(self, path: str, generation: int | None) -> None:
        found = self.stat(path)
        if generation is not None and (found is None or found.generation != generation):
            raise LostRace(f"{path} was changed by another process in the meantime; ours was not written.")

    def delete_all(self, path: str) -> int:
        """See `Store.delete_all`."""
        count = 0
        with sentences(path):
            for top, dirs, files in Path(path).walk(top_down=False):
                links = [name for name in dirs if (top / name).is_symlink()]
                for name in [*files, *links]:
                    (top / name).unlink(missing_ok=True)
                    count += 1
                with contextlib.suppress(FileNotFoundError):
                    top.rmdir()
        return count

    def clean_leftovers(self, path: str, folders: Sequence[str] = ("",)) -> int:
        """See `Store.clean_leftovers`."""
        count = 0
        for folder in folders:
            place = join(path, folder) if folder else path
            for entry in self.listdir(place):
                if entry.name.startswith(LEFTOVER) and entry.is_dir:
                    count += self.delete_all(join(place, entry.name))
                elif entry.name.startswith(LEFTOVER):
                    self.delete(join(place, entry.name))
                    count += 1
        return count

    def writer(self, path: str, size: int) -> FileRangeWriter:
        """See `Store.writer`."""
        with sentences(path, size):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            return FileRangeWriter(path, size)

    def guest(self, ticket: Ticket) -> FileGuest:
        """See `Store.guest`."""
        with sentences(ticket.path):
            return FileGuest(ticket)

    def kvstore(self, path: str) -> dict[str, Any]:
        """See `Store.kvstore`."""
        return {"driver": "file", "path": f"{Path(path).resolve()}/"}  # TensorStore refuses `..`

    def local(self, path: str) -> str | None:
        """See `Store.local`."""
        return path


def _fill(fd: int, path: str, start: int, out: memoryview) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], start + done)
        if count == 0:
            raise EOFError(f"{path} ends at byte {start + done}, {len(out) - done} bytes too early")
        done += count


@contextlib.contextmanager
def _temporary(path: str, data: bytes) -> Iterator[Path]:
    """A durable file with `data` beside `path`, gone afterwards."""
    directory = Path(path).parent
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"{LEFTOVER}{secrets.token_hex(8)}"
    try:
        _create_in_place(str(temporary), data)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _create_in_place(path: str, data: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise _exists(path) from None
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def _exists(path: str) -> LostRace:
    return LostRace(f"{path} exists already: another writer was first.")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Compare and swap has no system call: writers of a directory take turns by a lock on the directory itself.
    Mounts without locks go without; there the last of two writers in the same instant wins."""
    fd = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
