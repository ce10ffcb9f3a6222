"""The versions of a root as a fleet sees them: which there are, who serves what, what may go.

Retention never removes a version that is newest, pinned, leased by a live replica, or being written, and no file that
mtx2vllm did not write. A lease whose heartbeat is older than its `ttl_s` protects nothing. Only whole versions count (see
committed.py): one that nobody could load is neither newest, nor one of those to keep, nor can it be pinned.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtx2vllm.converter.errors import InputError, LostRace, UsageError
from mtx2vllm.converter.fleet import contents, root
from mtx2vllm.converter.fleet.committed import Committed, look
from mtx2vllm.converter.fleet.contents import Contents
from mtx2vllm.converter.fleet.places import refuse_trainers, require_root, require_versions
from mtx2vllm.converter.storage import Store, join, store_for

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version. `complete`: its manifest and, by a listing, all of its shards are there. `age` is in seconds since
    the manifest was written, `bytes` by it; None where there is none (that can be read). `problem` says why a version
    that has a manifest is not complete; `foreign` are files of other programs in a directory that is no version."""

    step: int
    complete: bool
    bytes: int | None
    age: float | None
    newest: bool
    pinned: bool
    writing: bool
    served_by: tuple[str, ...]
    problem: str | None = None
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica. `behind` counts the complete versions newer than what it serves (than the pinned one: 0 or 1 when
    it serves another), `lag` is the difference in steps; None where it serves nothing."""

    replica: str
    alive: bool
    loaded: int | None
    behind: int | None
    lag: int | None
    state: str
    error: str | None
    heartbeat_age: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that stands in a root. `writer` is the follower's holder, if one lives."""

    root: str
    versions: tuple[VersionRow, ...]
    replicas: tuple[ReplicaRow, ...]
    pin: int | None
    writer: str | None

    def to_json(self) -> dict[str, Any]:
        """The object that `versions --json` prints."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Pruned:
    """`removed` and `kept`, with the reason for each that stays; `freed` bytes of complete versions. `left` are the files
    of others for which the directory of a removed version stays."""

    root: str
    dry_run: bool
    removed: tuple[int, ...]
    kept: Mapping[int, str]
    freed: int
    left: Mapping[int, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """The object that `prune --json` prints."""
        return asdict(self)


def list_versions(location: str, clock: Clock = time.time) -> Fleet:
    """Every version of a root, newest first, and every replica.

    Raises:
        InputError: the pin cannot be read, or the root cannot; it is no root, but a trainer's directory.
    """
    require_root(location)
    store, now = store_for(location), clock()
    steps = root.steps_in(store.listdir(location))
    looks = {step: look(store, location, step) for step in steps}
    complete = [step for step, found in looks.items() if found is not None and found.whole]
    if not any(looks.values()):
        refuse_trainers(location)
    pin = root.read_pin(location, store)
    agents, follower = root.read_agents(location, now), root.read_follower(location, now)
    serving = _serving(agents)
    rows = []
    for step in steps:
        found = looks[step]
        inside = None if found else contents.unfinished(store, location, step, now)
        rows.append(
            VersionRow(
                step, step in complete, found.bytes if found else None, max(now - found.modified, 0.0) if found else None,
                newest=bool(complete) and step == complete[0], pinned=step == pin,
                writing=inside is not None and inside.writing,
                served_by=tuple(serving.get(step, ())), problem=found.problem if found else None,
                foreign=inside.foreign if inside else (),
            )
        )  # fmt: skip
    replicas = tuple(_replica(seen, complete, pin) for seen in agents)
    writer = follower.lease.holder if follower and follower.alive else None
    return Fleet(location, tuple(rows), replicas, pin, writer)


def pin(location: str, step: int) -> None:
    """Make every replica of the root serve `step`, whatever its policy.

    Raises:
        InputError: the root holds no such version, or not whole; it is no root.
    """
    require_root(location)
    store = store_for(location)
    found = look(store, location, step)
    if found is None:
        looks = ((number, look(store, location, number)) for number in root.steps_in(store.listdir(location)))
        whole = (str(number) for number, other in looks if other is not None and other.whole)
        there = list(itertools.islice(whole, 11))
        listed = f"it holds {', '.join(there[:10])}{', ...' if len(there) > 10 else ''}" if there else "it holds none"
        raise InputError(f"{location} holds no complete version {step}; {listed}.")
    if found.problem is not None:
        raise InputError(f"version {step} of {location} is not pinned, for no replica could load it: {found.problem}.")
    store.replace(join(location, root.PIN), root.dumps(root.Pin(step=step)))


def unpin(location: str) -> int | None:
    """Let every replica follow its policy again. The step that was pinned; None where nothing was, or nothing that can
    be read.

    Raises:
        InputError: it is no root.
    """
    require_root(location)
    try:
        step = root.read_pin(location)
    except InputError:
        step = None
    store_for(location).delete(join(location, root.PIN))
    return step


def prune(location: str, keep: int, dry_run: bool = False, clock: Clock = time.time) -> Pruned:
    """Remove all but the newest `keep` whole versions, and what killed writers have left.

    Raises:
        UsageError: `keep` is less than 1.
        InputError: the pin cannot be read, so that nothing is safe to remove; it is no root, or holds no version.
    """
    if keep < 1:
        raise UsageError("--keep must be at least 1: the newest version is never removed.")
    require_root(location)
    require_versions(location)
    store = store_for(location)
    removed: list[int] = []
    kept: dict[int, str] = {}
    left: dict[int, tuple[str, ...]] = {}
    freed, complete = 0, 0
    for step in root.steps_in(store.listdir(location)):
        found = look(store, location, step)
        complete += found is not None and found.whole
        reason = _reason(store, location, step, found, (complete, keep), clock()) if found else None
        if reason is not None:
            kept[step] = reason
            continue
        inside = _inside(store, location, step, found is not None, clock())
        reason = inside.stays or (None if dry_run else _remove(store, location, step, inside))
        if reason is not None:
            kept[step] = reason
            continue
        freed += (found.bytes or 0) if found else 0
        removed.append(step)
        if inside.foreign:
            left[step] = inside.foreign
    return Pruned(location, dry_run, tuple(removed), kept, freed, left)


def _reason(store: Store, location: str, step: int, found: Committed, rank: tuple[int, int], now: float) -> str | None:
    """Why a version stays, None where nothing speaks for it. Pin and leases are read for each version anew: they may
    have changed while the one before was being deleted. What is not whole stays until `keep` newer ones are: it may be
    being copied, or mended."""
    complete, keep = rank
    if complete == 1 and found.whole:
        return "newest"
    if step == root.read_pin(location, store):
        return "pinned"
    serving = _serving(root.read_agents(location, now)).get(step)
    if serving:
        return f"served by {', '.join(serving[:3])}{' and others' if len(serving) > 3 else ''}"
    if found.whole:
        return f"one of the newest {keep}" if complete <= keep else None
    if found.bytes is None:
        return None  # nobody knows which of the files are ours: `contents` says so
    return f"{found.problem}; not counted" if complete < keep else None


def _inside(store: Store, location: str, step: int, committed: bool, now: float) -> Contents:
    if committed:
        return contents.published(store, join(location, str(step)))
    return contents.unfinished(store, location, step, now)


def _remove(store: Store, location: str, step: int, inside: Contents) -> str | None:
    """Remove what is ours; why it stays where another writer came first."""
    try:
        contents.remove(store, join(location, str(step)), inside.ours)
    except LostRace:
        return "being written by somebody who came just now"
    return None


def _serving(agents: Sequence[root.Seen[root.Lease]]) -> dict[int, list[str]]:
    serving: dict[int, list[str]] = {}
    for seen in agents:
        if seen.alive and seen.lease.loaded is not None:
            serving.setdefault(seen.lease.loaded, []).append(seen.lease.replica)
    return serving


def _replica(seen: root.Seen[root.Lease], complete: Sequence[int], pinned: int | None) -> ReplicaRow:
    lease = seen.lease
    wanted = pinned if pinned is not None else (complete[0] if complete else None)
    behind = lag = None
    if lease.loaded is not None and wanted is not None:
        lag = wanted - lease.loaded
        newer = sum(lease.loaded < step <= wanted for step in complete)
        behind = newer if pinned is None else int(lease.loaded != pinned)
    return ReplicaRow(lease.replica, seen.alive, lease.loaded, behind, lag, lease.state, lease.error, seen.age)
