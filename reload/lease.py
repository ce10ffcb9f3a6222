"""The lease by which a fleet knows this replica: `ROOT/.agents/<replica>.json`, a heartbeat every 30 seconds.

A thread of its own writes it, so that a slow store never holds up a swap, and a long staging never looks like death.
One write a heartbeat, one more after each change of what is served, at most one a second.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mtx2vllm.converter.fleet.root import AGENTS, HEARTBEAT_S, Lease, dumps, read_lease
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.reload.settings import host_name

log = logging.getLogger(__name__)

_SPACING_S = 1.0  # object stores refuse more than about one write a second to the same name


@dataclass(frozen=True, slots=True)
class Served:
    """What a lease tells of a replica."""

    loaded: int | None = None
    manifest_digest: str | None = None
    state: str = "starting"
    error: str | None = None


def free_name(root: str, replica: str, now: float) -> str:
    """`replica`, or `replica-<pid>` where another live process on this host holds that lease already: two leases in
    one file would leave one of the two unprotected. A lease of a dead process is taken over."""
    seen = read_lease(store_for(root), _path(root, replica), Lease, now)
    if seen is None or not seen.alive or seen.lease.host != host_name() or not _running(seen.lease.pid):
        return replica
    log.warning(
        "replica name %r is in use by process %d on this host; this one is %r. Set MTX2VLLM_REPLICA to choose names.",
        replica, seen.lease.pid, f"{replica}-{os.getpid()}",
    )  # fmt: skip
    return f"{replica}-{os.getpid()}"


def _path(root: str, replica: str) -> str:
    return join(root, AGENTS, f"{replica}.json")


def _running(pid: int) -> bool:
    return pid > 0 and pid != os.getpid() and Path(f"/proc/{pid}").exists()


@dataclass
class LeaseKeeper:
    """Writes the lease until `stop`. `tell` changes what it says; nothing here raises."""

    root: str
    replica: str
    heartbeat_s: float = HEARTBEAT_S
    clock: Callable[[], float] = time.time
    served: Served = field(default_factory=Served)
    on_write: Callable[[], None] = lambda: None
    _warned: bool = False
    _due: threading.Event = field(default_factory=threading.Event)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin the heartbeat."""
        self._thread = threading.Thread(target=self._run, name="mtx2vllm-lease", daemon=True)
        self._thread.start()

    def tell(self, served: Served) -> None:
        """Say something else from now on; the same again waits for the next heartbeat."""
        if served != self.served:
            self.served = served
            self._due.set()

    def stop(self, timeout: float = 0.5) -> None:
        """End the heartbeat and take the lease back; a store that does not answer in time lets it expire instead."""
        self._stopping.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def write(self) -> bool:
        """One heartbeat. False where the root cannot be written, which is said once: such a replica works, but
        nothing protects its version from `prune`."""
        try:
            lease = Lease(
                replica=self.replica, heartbeat=self.clock(), host=host_name(), pid=os.getpid(),
                loaded=self.served.loaded, manifest_digest=self.served.manifest_digest,
                state=self.served.state, error=self.served.error,
            )  # fmt: skip
            store_for(self.root).replace(_path(self.root, self.replica), dumps(lease))
        except Exception as error:  # a lease is a courtesy: the engine must not care
            if not self._warned:
                self._warned = True
                log.warning(
                    "no lease can be written below %s (%s): `mtx2vllm prune` does not know that this replica serves "
                    "a version of it, and may remove that.", self.root, error,
                )  # fmt: skip
            return False
        self.on_write()
        return True

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._due.clear()
            local = store_for(self.root).local(self.root)
            if local is None or Path(local).is_dir():  # a directory that does not exist yet is not ours to make
                self.write()
            if self._stopping.wait(_SPACING_S):
                break
            self._due.wait(max(self.heartbeat_s - _SPACING_S, 0.0))
        with contextlib.suppress(Exception):
            store_for(self.root).delete(_path(self.root, self.replica))
