"""Every failure that a user can meet, and the exit status it ends in.

    Mtx2vllmError          1   our failure, a full disk, a failed job
    ├── UsageError         2   options that contradict each other
    ├── InputError         3   bad or unsupported input; carries every problem found, not the first only
    │   ├── NotCommitted       a version without a manifest, or a checkpoint step without its commit marker
    │   ├── LostRace           another writer published first, or holds the lease
    │   └── StorageError       a permanent refusal of the store (403, 404, a bucket that does not exist)
    │       └── StoreUnavailable   transient faults that outlasted every retry; a later run may succeed
    └── DifferenceError    4   verification, validation or --strict found a difference

Each message is one clear sentence that names the thing, the likely cause and the remedy.
"""

from collections.abc import Iterable, Sequence


class Mtx2vllmError(Exception):
    """A failure with a sentence for the user. `exit_status` is what the command line ends in."""

    exit_status = 1


class UsageError(Mtx2vllmError):
    """Options that cannot be meant together."""

    exit_status = 2


class InputError(Mtx2vllmError):
    """The input is bad or unsupported. `problems` holds all that was found."""

    exit_status = 3

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: Sequence[str] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class NotCommitted(InputError):
    """There is something, but nobody has declared it complete."""


class LostRace(InputError):
    """Another writer was first; nothing of ours is visible."""


class StorageError(InputError):
    """The store refused for good; trying again will not help."""


class StoreUnavailable(StorageError):
    """The store failed again and again until the deadline; nothing says that it always will."""


class DifferenceError(Mtx2vllmError):
    """What was written is not what it should be."""

    exit_status = 4


def from_os_error(error: OSError) -> Mtx2vllmError:
    """A sentence for what the operating system refused; every message says what was asked of it."""
    import errno

    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return Mtx2vllmError(
            f"{where}the disk is full; nothing was published. Free space or choose another place, then run again"
        )
    if error.errno == errno.EDQUOT:
        return Mtx2vllmError(f"{where}the disk quota is used up; nothing was published. Free space, then run again")
    if error.errno == errno.EROFS:
        return InputError(f"{where}the file system is read-only; give a place on another, or mount it writable")
    if isinstance(error, FileNotFoundError):
        return InputError(f"{where}no such file or directory; check the path")
    if isinstance(error, PermissionError):
        return InputError(f"{where}permission denied; check who owns it, or run as a user who may")
    if isinstance(error, NotADirectoryError | IsADirectoryError | FileExistsError):
        return InputError(f"{where}{error.strerror}; check the path")
    return Mtx2vllmError(f"{where}{error.strerror or error}; the system refused the operation")
