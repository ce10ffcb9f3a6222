"""What `mtx2vllm doctor ROOT` says of the root: what it is, whether it can be written and watched, and who lives in it."""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtx2vllm.converter.errors import InputError, LostRace
from mtx2vllm.converter.fleet import committed
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.fleet.places import refuse_trainers, require_root
from mtx2vllm.converter.storage import LEFTOVER, Entry, Store, join, store_for

_EVENT_WAIT_S = 2.0
_SKEW_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One line: `level` is ok, note or problem."""

    level: str
    topic: str
    text: str


def examine_root(root: str) -> list[Finding]:
    """Everything about a root; where it is none, only that."""
    try:
        store = store_for(root)
        local = store.local(root)
        if local is not None and not Path(local).exists():
            return [Finding("note", "root", f"{root} does not exist yet; agents wait for it, follow creates it")]
        if local is not None or store.listdir(root):  # a prefix without objects is a root that nobody has written yet
            require_root(root)
        found = _versions(store, root, store.listdir(root))
    except InputError as error:
        return [Finding("problem", "root", problem.rstrip(".")) for problem in error.problems]
    except OSError as error:
        return [Finding("problem", "root", f"{root} cannot be read: {error.strerror or error}")]
    found += _writing(store, root)
    if store.local(root) is not None:
        found.append(_events(root))
    else:
        found.append(Finding("ok", "events", "an object store raises none; it is listed at every poll"))
    return found + _fleet(root)


def _versions(store: Store, root: str, entries: list[Entry]) -> list[Finding]:
    """How many, and the newest that can be served; each newer one that cannot be is a problem.

    Raises:
        InputError: it is a trainer's directory.
    """
    broken: list[Finding] = []
    whole: list[int] = []
    for step in roots.steps_in(entries):
        try:
            found = committed.look(store, root, step)
        except OSError as error:
            found = committed.Committed(0.0, None, f"{join(root, str(step))} cannot be read: {error.strerror or error}")
        if found is None:
            continue
        if found.whole:
            whole.append(step)
        elif not whole:  # of older ones `mtx2vllm versions` tells
            broken.append(Finding("problem", "version", f"{step} is refused by every agent: {found.problem}"))
    if not whole and not broken:
        refuse_trainers(root)
    if whole:
        many = "1 version" if len(whole) == 1 else f"{len(whole)} versions"
        return [Finding("ok", "root", f"{root} can be read: {many}, newest {whole[0]}"), *broken]
    strangers = sorted(e.name for e in entries if not e.name.startswith(".") and roots.step_of(e.name) is None)
    if strangers and not broken:
        return [
            Finding(
                "note", "root", f"{root} holds no version but other things ({strangers[0]}): is it the right directory?"
            )
        ]
    said = "no version that can be served" if broken else "no committed version yet"
    return [Finding("note", "root", f"{root} can be read: {said}"), *broken]


def _writing(store: Store, root: str) -> list[Finding]:
    """Write a small file, compare the store's clock with ours, take it away."""
    probe = join(root, f"{LEFTOVER}doctor-{secrets.token_hex(4)}")
    try:
        before = time.time()
        stat = store.create(probe, b"{}")
        after = time.time()
        store.delete(probe)
    except (InputError, OSError) as error:
        return [
            Finding(
                "note",
                "writing",
                f"{root} cannot be written ({error}): agents work, but their leases protect nothing from prune",
            )
        ]
    skew = stat.modified - (before + after) / 2
    text = f"the store's clock differs from this machine's by {_tenths(skew):+.1f} s"
    level = "ok" if abs(skew) < _SKEW_S + (after - before) else "problem"
    hint = "" if level == "ok" else "; leases are told alive or dead by it: set the clocks (NTP)"
    return [Finding("ok", "writing", f"{root} can be written"), Finding(level, "clock", text + hint)]


def _tenths(seconds: float) -> float:
    return round(seconds, 1) + 0.0  # no -0.0


def _events(root: str) -> Finding:
    from watchdog.events import FileSystemEvent, FileSystemEventHandler

    from mtx2vllm.reload.watch import inotify_observer

    seen = threading.Event()

    class Handler(FileSystemEventHandler):
        """Any event will do."""

        def on_any_event(self, event: FileSystemEvent) -> None:
            if LEFTOVER in str(event.src_path):
                seen.set()

    observer = inotify_observer()
    try:
        observer.schedule(Handler(), root, recursive=False)
        observer.start()
    except OSError as error:
        return Finding(
            "note",
            "events",
            f"inotify refused ({error.strerror}); {root} will be polled. Raise fs.inotify limits to change that",
        )
    try:
        _poke(root)
        raised = seen.wait(_EVENT_WAIT_S)
    finally:
        observer.stop()
        observer.join()
    if raised:
        return Finding("ok", "events", f"{root} raises events for changes made on this machine")
    return Finding(
        "note", "events", f"{root} raised no event (a network or FUSE mount, or read-only); it is polled instead"
    )


def _poke(root: str, store: Callable[[str], Store] = store_for) -> None:
    with contextlib.suppress(OSError, InputError, LostRace):
        path = join(root, f"{LEFTOVER}doctor-{secrets.token_hex(4)}")
        store(root).create(path, b"{}")
        store(root).delete(path)


def _replica(seen: roots.Seen[roots.Lease]) -> Finding:
    lease, expired = seen.lease, "" if seen.alive else " (expired)"
    text = f"{lease.replica} serves {lease.loaded}, {lease.state}, seen {seen.age:.0f} s ago{expired}"
    level = "ok" if seen.alive and not lease.error else "note"
    return Finding(level, "replica", text + (f": {lease.error}" if lease.error else ""))


def _fleet(root: str) -> list[Finding]:
    now = time.time()
    found = []
    follower = roots.read_follower(root, now)
    if follower is None:
        found.append(Finding("note", "follower", "none has written here"))
    else:
        lease = follower.lease
        text = f"{lease.holder} lives" if follower.alive else f"{lease.holder} is dead for {follower.age:.0f} s"
        if lease.ttl_s <= 0:  # given back
            text = "none is running (the last one stopped cleanly)"
        alive = follower.alive and lease.ttl_s > 0
        found.append(Finding("ok" if alive else "note", "follower", text))
    found += [_replica(seen) for seen in roots.read_agents(root, now)]
    try:
        pin = roots.read_pin(root)
    except InputError as error:
        return [*found, Finding("problem", "pin", str(error).rstrip("."))]
    return (
        found
        if pin is None
        else [*found, Finding("note", "pin", f"the whole fleet is held at step {pin}; mtx2vllm unpin {root}")]
    )
