"""A root: versions named by step, and the small files beside them by which a fleet knows of each other.

    ROOT/100/ ROOT/110/ ...          versions; one without a manifest is not committed
    ROOT/.pin.json                   {step}: beats every policy
    ROOT/.follower.json              the one writer's lease
    ROOT/.agents/<replica>.json      a replica's lease: what it serves, and that it lives

Numbers are compared as numbers, other names are ignored. A lease counts for `ttl_s` after its heartbeat or after the
file was last written, whichever is later: two clocks must be wrong before a live replica loses its version.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.storage import Entry, Stat, Store, join, store_for
from mtx2vllm.schemas import manifest

PIN = ".pin.json"
FOLLOWER = ".follower.json"
AGENTS = ".agents"
HEARTBEAT_S = 30.0
TTL_S = 120.0


class _Record(BaseModel):
    # A newer release may write fields that this one does not know; it must still see who lives.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Lease(_Record):
    """`.agents/<replica>.json`. `host` and `pid` tell a restarted replica from a second one of the same name."""

    replica: str
    loaded: int | None = None
    manifest_digest: str | None = None
    state: str = "starting"
    error: str | None = None
    heartbeat: float
    ttl_s: float = TTL_S
    host: str = ""
    pid: int = 0


class FollowerLease(_Record):
    """`.follower.json`: the one writer of a root; `writing` is the version that it writes now, `settled` the steps of
    the run that need no more work (see follow_lease.py). `started` and `namespace` tell a process from a later one of
    the same number. A lease that was given back has `ttl_s` 0."""

    holder: str
    heartbeat: float
    ttl_s: float = TTL_S
    host: str = ""
    pid: int = 0
    started: int = 0
    namespace: str = ""
    writing: int | None = None
    settled: tuple[int, ...] = ()


class Pin(_Record):
    """`.pin.json`."""

    step: int


@dataclass(frozen=True, slots=True)
class Seen[T: (Lease, FollowerLease)]:
    """A lease as found: `alive` by the clock of the one who looked."""

    lease: T
    age: float  # seconds since the last sign of life
    alive: bool
    generation: int


def step_of(name: str) -> int | None:
    """The step that a directory's name says, None for any other name (`007`, `1e3`, `latest`)."""
    if len(name) > 18 or not (name.isascii() and name.isdigit()):
        return None
    return int(name) if str(int(name)) == name else None


def steps_in(entries: Iterable[Entry]) -> list[int]:
    """The steps among the entries of a root, newest first, committed or not."""
    found = (step_of(entry.name) for entry in entries if entry.is_dir)
    return sorted((step for step in found if step is not None), reverse=True)


def manifest_path(root: str, step: int) -> str:
    """Where the manifest of a version lies."""
    return join(root, str(step), manifest.NAME)


def read_pin(root: str, store: Store | None = None) -> int | None:
    """The pinned step, None where nothing is pinned.

    Raises:
        InputError: `.pin.json` is not a pin: nobody can know what was meant, so nothing should move.
    """
    path = join(root, PIN)
    try:
        data = (store or store_for(root)).read(path)
    except FileNotFoundError:
        return None
    try:
        return Pin.model_validate_json(data).step
    except ValidationError:
        raise InputError(
            f'{path} is not a pin ({{"step": N}} was expected): write it with `mtx2vllm pin`, or remove it with '
            "`mtx2vllm unpin`."
        ) from None


def read_agents(root: str, now: float) -> list[Seen[Lease]]:
    """Every replica's lease, by name, dead ones included; what does not parse is half written and left out."""
    store, directory = store_for(root), join(root, AGENTS)
    names = [entry.name for entry in store.listdir(directory) if not entry.is_dir and entry.name.endswith(".json")]
    seen = (read_lease(store, join(directory, name), Lease, now) for name in names if not name.startswith("."))
    return [lease for lease in seen if lease is not None]


def read_follower(root: str, now: float) -> Seen[FollowerLease] | None:
    """The writer's lease, None where nobody writes."""
    return read_lease(store_for(root), join(root, FOLLOWER), FollowerLease, now)


def read_lease[T: (Lease, FollowerLease)](store: Store, path: str, kind: type[T], now: float) -> Seen[T] | None:
    """One lease, None where there is none or it is not whole."""
    stat = store.stat(path)
    if stat is None:
        return None
    try:
        lease = kind.model_validate_json(store.read(path))
    except (FileNotFoundError, EOFError, ValidationError):
        return None
    age = _age(lease.heartbeat, stat, now)
    return Seen(lease, age, age <= lease.ttl_s, stat.generation)


def dumps(record: Lease | FollowerLease | Pin) -> bytes:
    """The bytes of a lease or a pin."""
    return json.dumps(record.model_dump(mode="json"), separators=(",", ":")).encode()


def _age(heartbeat: float, stat: Stat, now: float) -> float:
    return max(now - max(heartbeat, stat.modified), 0.0)
