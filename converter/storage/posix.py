"""What the operating system is asked for beyond Python's own: early write-back, allocation, and errors as sentences."""

import contextlib
import ctypes
import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from mtx2vllm.converter.errors import Mtx2vllmError, StorageError
from mtx2vllm.converter.storage import Stat

_START_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER
_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def stat_of(found: os.stat_result) -> Stat:
    """The generation of a file: its inode and the time of its last change."""
    return Stat(found.st_size, found.st_mtime_ns << 32 | found.st_ino & 0xFFFFFFFF, found.st_mtime)


@contextlib.contextmanager
def sentences(path: str, writing: int | None = None) -> Iterator[None]:
    """Turn an OSError about `path` into the error and the sentence that a user is told. `writing`: how many bytes
    are to be written, None when reading.

    Raises:
        Mtx2vllmError: the disk is full, or fails (exit status 1).
        StorageError: a permanent refusal, e.g. missing permission.
        FileNotFoundError: when reading only; each verb knows what it means.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        if writing is None:
            raise FileNotFoundError(error.errno, error.strerror, path) from None
        raise StorageError(f"{path} cannot be written: {error.strerror} ({error.filename}).") from error
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise Mtx2vllmError(_full(path, writing or 0, error)) from error
        if error.errno == errno.EROFS:
            raise StorageError(
                f"{path} cannot be written: its file system is read-only; give a place on another, or mount it writable."
            ) from error
        if error.errno in {errno.EACCES, errno.EPERM}:
            raise StorageError(f"{path}: {error.strerror}; check the owner and the mode of its directory.") from error
        if error.errno == errno.EISDIR:
            raise StorageError(f"{path} is a directory; a file is wanted here.") from error
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST}:
            raise StorageError(f"{path}: {error.strerror}.") from error
        raise Mtx2vllmError(f"{path}: {error.strerror or error} (the disk or the mount fails).") from error


def _full(path: str, needed: int, error: OSError) -> str:
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = f"{shutil.disk_usage(place).free:,} bytes are free"
    except OSError:
        free = "nothing is known of the free space"
    why = "the quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
    asked = f" ({needed:,} bytes asked for, {free})" if needed else f" ({free})"
    return f"{path} cannot be written: {why}{asked}. Free some space or choose another directory, then run again."


def sync_directory(path: str | Path) -> None:
    """Make the names of a directory durable. Mounts that cannot are left alone."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def allocate(fd: int, size: int) -> None:
    """Reserve `size` bytes now, so that a full disk is met before the work; only the length where that is unknown."""
    if size == 0:
        return
    fallocate = _libc("fallocate")
    # Not os.posix_fallocate: where the file system cannot, the C library writes every block instead.
    if fallocate is not None and fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    if fallocate is not None and (code := ctypes.get_errno()) not in _NO_ALLOCATION:
        raise OSError(code, os.strerror(code))
    os.ftruncate(fd, size)


def start_write_back(fd: int, start: int, length: int) -> None:
    """Begin to write dirty pages of a range to the disk; does not wait."""
    if (sync := _libc("sync_file_range")) is not None:
        sync(fd, ctypes.c_int64(start), ctypes.c_int64(length), _START_WRITE)


def finish_write_back(fd: int, start: int, length: int) -> None:
    """Wait until a range is on the disk and give its pages back."""
    if (sync := _libc("sync_file_range")) is not None:
        sync(fd, ctypes.c_int64(start), ctypes.c_int64(length), _WAIT)
    drop_pages(fd, start, length)


def drop_pages(fd: int, start: int, length: int) -> None:
    """Tell the kernel that a range will not be read again soon."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


@functools.cache
def _libc(name: str) -> "Callable[..., int] | None":
    """A function of the C library, None where there is no such one. Errors of write-back reach fsync."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
