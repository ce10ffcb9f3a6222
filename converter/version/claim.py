"""Who writes into a version directory, and what a killed writer left there.

`OUT/.mtx2vllm.claim.json` is created before anything else (of two writers exactly one succeeds), names every file that
the run will write, is renewed while it runs, and goes after the manifest is there. A directory with a claim and no
manifest is a run in progress or a killed one: the claim's age, or its process on this host, tells which. With a
manifest, the files that it names are a version's, and cleaning leaves them alone.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mtx2vllm.converter.errors import InputError, LostRace, Mtx2vllmError, StorageError
from mtx2vllm.converter.storage import Stat, Store, is_leftover, join, parent, store_for
from mtx2vllm.converter.version import process
from mtx2vllm.schemas import manifest

NAME = ".mtx2vllm.claim.json"
HEARTBEAT_S = 30.0
TTL_S = 120.0


class Record(BaseModel):
    """A claim as it lies in the directory; `started` and `namespace` as in process.py."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    host: str
    pid: int
    started: int = 0
    namespace: str = ""
    heartbeat: float
    ttl_s: float = TTL_S
    files: tuple[str, ...] = ()


class Claim:
    """A version directory that is ours to write. Use as a context manager; `release` on success."""

    def __init__(self, out: str, now: Callable[[], float] = time.time) -> None:
        self.out, self.store, self._now = out, store_for(out), now
        self._path = join(out, NAME)
        self._files: tuple[str, ...] = ()
        self._generation = 0
        self._lost = False
        local = self.store.local(out)
        self._made = local is not None and not Path(local).exists()  # an OUT of ours goes again when the run fails
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Claim":
        _refuse_file(self.store, self.out)
        _refuse_inside(self.store, self.out)
        self._generation = _take(self.store, self.out, self._record().model_dump_json().encode(), self._now())
        self._thread = threading.Thread(target=self._renew, name="mtx2vllm-claim", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
        if kind is None:
            self._release()
            return
        with contextlib.suppress(OSError, Mtx2vllmError):  # the first error is the one to be told
            self.require()
            remove(self.store, self.out, self._files)
            self._release()
            if self._made:
                _remove_empty(self.store, self.out)

    def _release(self) -> None:
        with contextlib.suppress(LostRace):  # whoever has taken it over keeps it
            self.store.delete(self._path, self._generation)

    def require(self) -> None:
        """Make sure that the directory is still ours.

        Raises:
            LostRace: another writer has taken it over, since this one was silent for too long.
        """
        with self._lock:
            stat = self.store.stat(self._path)
            if self._lost or stat is None or stat.generation != self._generation:
                raise LostRace(
                    f"{self.out} was taken over by another writer{_whose(self.store, self.out)}, since this one did not renew "
                    "its claim in time (was it suspended?); nothing was published"
                )

    def announce(self, files: Sequence[str]) -> None:
        """Say which files will be written, before the first is."""
        with self._lock:
            self._files = tuple(files)
            self._write()

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with self._lock:
                try:
                    self._write()
                except LostRace:
                    self._lost = True
                    return
                except (OSError, Mtx2vllmError):
                    continue  # the next beat may pass

    def _write(self) -> None:
        stat = self.store.replace(self._path, self._record().model_dump_json().encode(), self._generation)
        self._generation = stat.generation

    def _record(self) -> Record:
        pid = os.getpid()
        return Record(
            host=socket.gethostname(),
            pid=pid,
            started=process.started(pid),
            namespace=process.namespace(),
            heartbeat=self._now(),
            files=self._files,
        )


def read(store: Store, out: str) -> Record | None:
    """The claim of a directory, None where there is none or it does not parse."""
    try:
        return Record.model_validate_json(store.read(join(out, NAME)))
    except (FileNotFoundError, EOFError, ValidationError):
        return None


def is_live(record: Record, modified: float, now: float) -> bool:
    """Whether the writer of a claim still runs. On this host its process is asked, elsewhere the heartbeat."""
    alive = process.lives(record.host, record.pid, record.started, record.namespace)
    return alive if alive is not None else now - max(record.heartbeat, modified) <= record.ttl_s


def _take(store: Store, out: str, data: bytes, now: float) -> int:
    path = join(out, NAME)
    try:
        taken = store.create(path, data)
    except (LostRace, StorageError) as error:  # or another writer has just cleaned up, our half-made claim included
        if store.stat(path) is None:
            # The claim's name says nothing to whoever gave OUT.
            raise type(error)([problem.replace(path, out) for problem in error.problems]) from error
    else:
        store.clean_leftovers(out, manifest.FOLDERS)
        return taken.generation
    stat, record = store.stat(path), read(store, out)
    if stat is None:
        raise LostRace(f"{out} was released by another writer just now; run again")
    _refuse_live(store, out, record, stat, now)
    try:
        taken = store.replace(path, data, stat.generation)
    except LostRace:
        raise LostRace(f"{out} was taken over from a dead run by another writer just now{_whose(store, out)}") from None
    remove(store, out, record.files if record else ())
    return taken.generation


def _refuse_live(store: Store, out: str, record: Record | None, stat: Stat, now: float) -> None:
    alive = now - stat.modified <= TTL_S if record is None else is_live(record, stat.modified, now)
    if alive:
        raise LostRace(
            f"{out} is being written{_whose(store, out)}; wait for it, or give another OUT. If that run is dead, its claim "
            f"expires {TTL_S:.0f} s after its last heartbeat"
        )


def refuse_taken(store: Store, out: str, now: float) -> tuple[str, ...]:
    """Refuse a place that nobody could claim now: a file, or another writer's. Nothing is touched.

    Returns:
        The files that a killed run has announced there, which whoever takes the place removes.

    Raises:
        InputError: a file is where a directory is meant, or a version.
        LostRace: a live writer's claim.
    """
    _refuse_file(store, out)
    _refuse_inside(store, out)
    stat, record = store.stat(join(out, NAME)), read(store, out)
    if stat is not None:
        _refuse_live(store, out, record, stat, now)
    return record.files if record else ()


def _refuse_file(store: Store, out: str) -> None:
    """A file where a directory is meant, OUT itself or one above it."""
    local = store.local(out)
    if local is None:
        return
    for place in (Path(local), *Path(local).parents):
        if place.is_dir():
            return
        if place.exists():
            inside = "" if place == Path(local) else f", so {out} cannot be made"
            raise InputError(f"{place} is a file{inside}; OUT must be a directory, new or empty")


def _refuse_inside(store: Store, out: str) -> None:
    """A version is whole when its manifest is there: nothing is written into it any more."""
    above = parent(out)
    if above != out and store.stat(join(above, manifest.NAME)):
        raise InputError(f"{above} is a version itself, and nothing is written into one; give an OUT beside it")


def _whose(store: Store, out: str) -> str:
    record = read(store, out)
    return f" by process {record.pid} on {record.host}" if record else ""


def remove(store: Store, out: str, files: Iterable[str]) -> None:
    """Delete what a run has written, and what its killed uploads left. Nothing else is touched, and the files of a
    published version stay."""
    if store.stat(join(out, manifest.NAME)) is None:
        delete(store, out, files)
    store.clean_leftovers(out, manifest.FOLDERS)
    _remove_folders(store, out, files)


def delete(store: Store, out: str, files: Iterable[str]) -> None:
    """Delete files of a version, and the folders that are empty then."""
    inside = [name for name in files if manifest.is_inside(name)]
    for name in inside:
        store.delete(join(out, name))
    _remove_folders(store, out, inside)


def _remove_folders(store: Store, out: str, files: Iterable[str]) -> None:
    for folder in {name.partition("/")[0] for name in files if "/" in name}:
        _remove_empty(store, join(out, folder))


def _remove_empty(store: Store, directory: str) -> None:
    """Remove a local directory that holds nothing; object stores have none."""
    local = store.local(directory)
    if local is not None:
        with contextlib.suppress(OSError):
            Path(local).rmdir()


def refuse_foreign(store: Store, out: str, ours: Iterable[str]) -> None:
    """A directory that holds anything but `ours` is not for us to write into.

    Raises:
        InputError: names the first foreign files.
    """
    known = {*ours, NAME}
    foreign = [name for name in store.walk(out) if name not in known and not is_leftover(name)]
    if foreign:
        raise InputError(
            f"{out} holds files that mtx2vllm did not write ({', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}); "
            "give an empty or new directory"
        )
