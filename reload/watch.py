"""When to look at a root again. Events only wake the loop; what is wanted is decided by looking.

Local disks raise inotify events: for the root, and for the newest directories in it that are not committed yet (a
manifest appears inside one). Object stores, and mounts that raise no events, get a watchdog emitter that lists the
root. A slow poll stands behind both: `Watcher.interval` is how long the loop may sleep at most.
"""

import contextlib
import errno
import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from watchdog.events import (
    DirModifiedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.api import BaseObserver, EventEmitter, EventQueue, ObservedWatch

from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.storage import basename, join, store_for
from mtx2vllm.schemas import manifest

log = logging.getLogger(__name__)

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "glusterfs", "lustre", "ceph", "gpfs", "beegfs", "afs"}
_SILENT = _NETWORK | {"9p", "virtiofs"}
_ATTENDED = 4  # directories being written at once that are watched from inside; the slow poll sees the others
_BACKOFF_S = 60.0
_SLOW = 10  # polls of the emitter for each look of the loop behind it
_LIMITS = {errno.ENOSPC, errno.EMFILE, errno.ENFILE}

Snapshot = Callable[[], object]
Fallback = Callable[[str], None]  # told a reason, for the metric


class Signals(Protocol):
    """What the watcher uses of a watchdog observer."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def schedule(self, event_handler: FileSystemEventHandler, path: str, *, recursive: bool = False) -> Any: ...
    def unschedule(self, watch: Any) -> None: ...


class ListingEmitter(EventEmitter):
    """A watchdog emitter that takes a snapshot every `poll` seconds, with jitter so that a fleet does not list in
    step, and doubles the pause up to a minute while the store fails."""

    def __init__(
        self,
        event_queue: EventQueue,
        watch: ObservedWatch,
        *,
        snapshot: Snapshot,
        poll: float,
        timeout: float = 1.0,
        event_filter: list[type[FileSystemEvent]] | None = None,
    ) -> None:
        super().__init__(event_queue, watch, timeout=timeout, event_filter=event_filter)
        self._snapshot, self._poll = snapshot, poll
        self._last: object = None
        self._failures = 0

    def delay(self) -> float:
        """Seconds until the next listing."""
        pause: float = min(self._poll * 2.0**self._failures, max(self._poll, _BACKOFF_S))
        return pause * random.uniform(0.8, 1.0)  # noqa: S311  (jitter)

    def queue_events(self, timeout: float) -> None:  # noqa: ARG002  (watchdog's signature)
        """Wait, look, and queue one event if anything is new (or the store answers again)."""
        if self.stopped_event.wait(self.delay()):
            return
        try:
            seen = self._snapshot()
        except Exception as error:  # a thread that dies here would end the watching
            self._failures = min(self._failures + 1, 10)
            log.debug("listing failed (%d times in a row): %s", self._failures, error)
            return
        if seen != self._last or self._failures:
            self.queue_event(DirModifiedEvent(self.watch.path))
        self._last, self._failures = seen, 0


class RootSnapshot:
    """The facts of a root that can make another version wanted, for one listing and a few small requests: names, the
    generations of the pin and of the manifest of the newest version, and which of the newer ones are committed."""

    def __init__(self, root: str) -> None:
        self._root, self._store = root, store_for(root)

    def __call__(self) -> object:
        entries = self._store.listdir(self._root)
        steps = roots.steps_in(entries)
        facts: list[object] = [tuple(steps)]
        if any(entry.name == roots.PIN for entry in entries):
            facts.append(self._store.stat(join(self._root, roots.PIN)))
        for step in steps[:_ATTENDED]:
            stat = self._store.stat(roots.manifest_path(self._root, step))
            facts.append((step, stat and stat.generation))
            if stat is not None:
                break
        return facts


class _Wake(FileSystemEventHandler):
    """Our own reading raises events too (opened, closed without writing): those must not wake us."""

    def __init__(self, root: str, wake: Callable[[], None]) -> None:
        self._root, self._wake = basename(root), wake

    def dispatch(self, event: FileSystemEvent) -> None:
        if event.event_type in {"opened", "closed_no_write"}:
            return
        names = {basename(str(path)) for path in (event.src_path, event.dest_path) if path}
        if any(name in {manifest.NAME, roots.PIN, self._root} or roots.step_of(name) is not None for name in names):
            self._wake()


def _no_stopping(record: logging.LogRecord) -> bool:
    return not record.getMessage().endswith("called when the thread is inactive")


def inotify_observer() -> BaseObserver:
    """watchdog's observer for this machine's local disks.

    It stops its emitters while they may be handing on an event, and calls that an error: nothing is lost, for nobody
    listens any more, and no order of stopping avoids it.
    """
    from watchdog.observers import Observer  # chosen for the platform when imported

    logging.getLogger("watchdog.observers.inotify").addFilter(_no_stopping)
    observer = Observer(timeout=1.0)
    observer.daemon = True
    return observer


def listing_observer(root: str, poll: float) -> Signals:
    """An observer whose emitter lists the root."""
    emitter: Any = partial(ListingEmitter, snapshot=RootSnapshot(root), poll=poll)
    return BaseObserver(emitter, timeout=1.0)


class Watcher:
    """Calls `wake` when the root may have changed.

    `attend` is called by the loop after every look: it (re)arms what is watched, and says whether the loop must look
    once more, because something may have happened between its look and the new watch.
    """

    def __init__(
        self,
        root: str,
        poll: float,
        wake: Callable[[], None],
        on_fallback: Fallback | None = None,
        observer: Callable[[], Signals] = inotify_observer,
    ) -> None:
        self._root, self._poll, self._wake, self._on_fallback = root, poll, wake, on_fallback
        self._local = store_for(root).local(root)
        self._make = observer
        self._observer: Signals | None = None
        self._watches: dict[str, tuple[tuple[int, int], Any]] = {}  # path -> identity of the directory, watch
        self._listing = self._local is None or is_silent(self._local)
        self._said: set[str] = set()

    @property
    def kind(self) -> str:
        """`inotify` or `listing`."""
        return "listing" if self._listing else "inotify"

    @property
    def interval(self) -> float:
        """How many seconds the loop may sleep without an event."""
        return self._poll * _SLOW if self._listing else self._poll

    def start(self) -> None:
        """Begin to watch. Never fails: what cannot be watched is polled."""
        try:
            self._observer = listing_observer(self._root, self._poll) if self._listing else self._make()
            self._observer.start()
            if self._listing:
                self._observer.schedule(_Wake(self._root, self._wake), self._root)
        except Exception as error:
            if self._listing:  # no thread to be had; the slow poll remains
                log.warning("%s is only looked at every %g s: %s", self._root, self.interval, error)
            else:
                self._fall_back(error)

    def stop(self) -> None:
        """Stop the threads, without waiting for a listing in flight."""
        observer, self._observer = self._observer, None
        if observer is not None:
            with contextlib.suppress(Exception):
                observer.stop()

    def attend(self, uncommitted: Iterable[int] = ()) -> bool:
        """Watch the root and its newest uncommitted versions, and nothing else. True: look once more, now."""
        if self._listing or self._observer is None or self._local is None:
            return False
        steps = sorted(uncommitted, reverse=True)[:_ATTENDED]
        wanted = {path: _identity(path) for path in [self._local, *(join(self._local, str(step)) for step in steps)]}
        for path, (identity, watch) in list(self._watches.items()):
            if wanted.get(path) != identity:
                del self._watches[path]
                with contextlib.suppress(Exception):  # the directory may be gone, and its watch with it
                    self._observer.unschedule(watch)
        try:
            armed = [self._arm(path, identity) for path, identity in wanted.items() if identity is not None]
            return any(armed)
        except Exception as error:
            self._fall_back(error)
            return True

    def _arm(self, path: str, identity: tuple[int, int]) -> bool:
        if path in self._watches or self._observer is None:
            return False
        try:
            # inotify does not follow a link; non-recursive, for versions may hold any number of files.
            watch = self._observer.schedule(_Wake(self._root, self._wake), str(Path(path).resolve()), recursive=False)
        except FileNotFoundError:
            return False
        self._watches[path] = (identity, watch)
        return True

    def _fall_back(self, error: Exception) -> None:
        """Events are not to be had: list instead, and say so once."""
        reason = "inotify_limit" if getattr(error, "errno", None) in _LIMITS else "inotify_unavailable"
        if reason not in self._said:
            self._said.add(reason)
            log.warning(
                "%s cannot be watched by inotify (%s), so it is listed every %g s; where a limit is the cause, raise "
                "fs.inotify.max_user_instances and max_user_watches.", self._root, error, self._poll,
            )  # fmt: skip
        if self._on_fallback is not None:
            self._on_fallback(reason)
        self.stop()
        self._watches.clear()
        self._listing = True
        self.start()


def _identity(path: str) -> tuple[int, int] | None:
    """(device, inode) of a directory: another one under the same name needs another watch."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino)


def is_silent(path: str, mounts: str | None = None) -> bool:
    """Whether `path` lies on a mount that shows no events of other machines (network, FUSE). `mounts` is the text of
    /proc/self/mounts."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="replace")
        except OSError:
            return False
    target, best, kind = Path(path).absolute(), -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].encode().decode("unicode_escape"))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind in _SILENT or kind.startswith("fuse")
