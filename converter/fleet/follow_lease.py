"""The one writer of a root holds `ROOT/.follower.json`, and renews it while it lives.

Every write names the generation that it replaces, so of two followers exactly one gets the lease, and one that was away
for longer than the lease lives finds out at its next heartbeat. A lease counts until `ttl_s` after its last sign of life;
on the holder's own host its process is asked, so that a killed follower is replaced at once.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from mtx2vllm.converter.errors import LostRace, Mtx2vllmError
from mtx2vllm.converter.fleet.root import FOLLOWER, HEARTBEAT_S, TTL_S, FollowerLease, Seen, dumps, read_follower
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.converter.version import process


class RootLease:
    """The lease of a root, held or not. Use `take`, `tell`, `give_back`; `held` says whether it still counts."""

    def __init__(
        self, root: str, now: Callable[[], float] = time.time, heartbeat_s: float = HEARTBEAT_S, ttl_s: float = TTL_S
    ) -> None:
        self._root, self._store, self._path = root, store_for(root), join(root, FOLLOWER)
        self._now, self._heartbeat_s, self._ttl_s = now, heartbeat_s, ttl_s
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._generation = 0
        self._written = float("-inf")
        self._writing: int | None = None
        self._settled: tuple[int, ...] = ()
        self._lost = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def settled(self) -> tuple[int, ...]:
        """Steps that need no more work: the predecessor's word right after `take`."""
        return self._settled

    def take(self) -> str | None:
        """Become the writer. None on success, else who is it, in words.

        Raises:
            StorageError: the root cannot be written.
        """
        stat = self._store.stat(self._path)
        seen = read_follower(self._root, self._now()) if stat else None
        if stat and seen is None and self._now() - stat.modified <= self._ttl_s:
            return f"somebody whose lease {self._path} cannot be read (yet)"
        if seen is not None and is_held(seen):
            return f"process {seen.lease.pid} on {seen.lease.host}, last heard of {seen.age:.0f} s ago"
        self._settled = seen.lease.settled if seen else ()
        try:
            self._put(stat.generation if stat else 0)
        except LostRace:
            return "another follower that took it just now"
        self._lost = False
        self._stop.clear()
        self._thread = threading.Thread(target=self._renew, name="mtx2vllm-follower", daemon=True)
        self._thread.start()
        return None

    def held(self) -> bool:
        """Whether the lease is ours beyond doubt: not taken by another, and renewed recently enough."""
        return not self._lost and self._now() - self._written < self._ttl_s

    def tell(self, writing: int | None, settled: tuple[int, ...]) -> None:
        """Say what is written now, and what is settled; a store that fails learns it by a later heartbeat."""
        with self._lock:
            if (writing, settled) != (self._writing, self._settled):
                self._writing, self._settled = writing, settled
                self._try()

    def give_back(self) -> None:
        """Stop renewing and let the next one in at once. What is settled stays written."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock, contextlib.suppress(OSError, Mtx2vllmError):
            if not self._lost and self._generation:
                self._writing = None
                self._put(self._generation, ttl_s=0.0)
                self._written = float("-inf")

    def beat(self) -> None:
        """One heartbeat."""
        with self._lock:
            self._try()

    def _renew(self) -> None:
        while not self._stop.wait(self._heartbeat_s) and not self._lost:
            self.beat()

    def _try(self) -> None:
        try:
            self._put(self._generation)
        except LostRace:
            self._lost = not self._recognise()
        except (OSError, Mtx2vllmError):
            return  # `held` turns false when it lasts

    def _recognise(self) -> bool:
        """A write whose answer was lost and that was tried again finds itself in the way."""
        try:
            seen = read_follower(self._root, self._now())
        except (OSError, Mtx2vllmError):
            return True  # not known; the next heartbeat asks again
        if seen is None or seen.lease.holder != self._holder:
            return False
        self._generation = seen.generation
        return True

    def _put(self, generation: int, ttl_s: float | None = None) -> None:
        now, pid = self._now(), os.getpid()
        lease = FollowerLease(
            holder=self._holder, heartbeat=now, ttl_s=self._ttl_s if ttl_s is None else ttl_s, host=socket.gethostname(), pid=pid,
            started=process.started(pid), namespace=process.namespace(), writing=self._writing, settled=self._settled,
        )  # fmt: skip
        self._generation = self._store.replace(self._path, dumps(lease), generation).generation
        self._written = now


def is_held(seen: Seen[FollowerLease]) -> bool:
    """Whether a lease still keeps others out."""
    lease = seen.lease
    if lease.ttl_s <= 0 or not seen.alive:
        return False
    return process.lives(lease.host, lease.pid, lease.started, lease.namespace) is not False
