"""The agent in a sampler: it follows a root, and keeps the engine on the version that is wanted.

    WATCH -> the wanted version is not the loaded one -> VERIFY, STAGE (see `apply`) -> SWAP -> REPORT

The loop is level-triggered: an event only makes it look. Nothing that goes wrong here reaches the engine's thread; what
the engine serves changes by one call, `Engine.swap`, or not at all.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mtx2vllm.converter.errors import InputError, NotCommitted, UsageError
from mtx2vllm.converter.fleet.endpoint import Endpoint
from mtx2vllm.reload import aspire
from mtx2vllm.reload.apply import Report, Way, load
from mtx2vllm.reload.engine import Engine, Requests, SwapMode
from mtx2vllm.reload.lease import LeaseKeeper, Served, free_name
from mtx2vllm.reload.metrics import pages
from mtx2vllm.reload.replica import Replica
from mtx2vllm.reload.settings import Policy, Settings, settings_for
from mtx2vllm.reload.stage import Options, Stager
from mtx2vllm.reload.status import Status
from mtx2vllm.reload.watch import Watcher

log = logging.getLogger(__name__)

_TICK_S = 0.25  # how soon the end of the engine, or of the agent, is noticed
_LOOK_BACKOFF_S = 60.0


class ReloadAgent:
    """Follows `root` with an engine (`reload.engine.Engine`) or a `vllm.LLM` of this process.

    `start` begins a thread and returns at once; `load` brings one version in and waits for it; both may be used
    together. With `hold`, requests are held back until a first version is in (the engine holds random weights).

    Args:
        engine_or_llm: what to load into.
        root: the directory of versions, local or gs://.
        settings: what the environment would say; keyword arguments stand for single settings (`policy="step:100"`).
        loaded: the version that the engine was started from, if it was.
        hold: None asks the engine (`Engine.dummy`).
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        engine_or_llm: Any,
        root: str | os.PathLike[str],
        settings: Settings | None = None,
        *,
        loaded: str | None = None,
        hold: bool | None = None,
        clock: Callable[[], float] = time.time,
        **options: Any,
    ) -> None:
        self.settings = settings or settings_for(os.fspath(root), **options)
        self.root = self.settings.watch
        self.engine = engine_of(engine_or_llm)
        held = self.engine.dummy if hold is None else hold
        self._replica = Replica(
            self.engine, self.settings, hold=held, clock=clock, told=self._tell_lease, given_up=self._given_up
        )
        self.metrics = self._replica.metrics
        self._clock = clock
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._watcher = Watcher(self.root, self.settings.poll, self._wake.set, self._count_fallback)
        self._lease: LeaseKeeper | None = None
        self._endpoint: Endpoint | None = None
        self._thread: threading.Thread | None = None
        self._started_from = loaded
        self._look_failures = 0

    # --- for the caller ---

    def start(self) -> "ReloadAgent":
        """Begin to follow. Returns at once."""
        if self._thread is not None:
            raise UsageError("this agent was started already.")
        self._replica.prepare(self._started_from)
        self._thread = threading.Thread(target=self._run, name="mtx2vllm-agent", daemon=True)
        self._thread.start()
        return self

    def load(self, step: int | None = None) -> Status:
        """Bring a version in now, and stay on it; without `step` the one that policy and pin want, and follow again.

        Raises:
            NotCommitted: it is not there. LoadFailed: it was refused; the engine serves what it served.
            UsageError: the root is pinned to another version. EngineBroken: the engine must not serve any more.
        """
        self._replica.prepare(self._started_from)
        seen = aspire.look(self.root)
        if step is not None and seen.pin not in {None, step}:
            raise UsageError(f"{self.root} is pinned to {seen.pin}; `mtx2vllm unpin` it before loading {step}.")
        self._replica.policy = self.settings.policy if step is None else Policy(step)
        with self._replica.work:
            choice = self._replica.choose(seen, patient=False)
            if choice.stat is None or choice.wanted is None:
                where = f"version {step}" if step is not None else "a committed version"
                raise NotCommitted(choice.why or f"{self.root} does not hold {where} (yet).")
            if choice.step is not None:
                self._replica.bring(aspire.version_at(self.root, choice.step, choice.stat), choice.stat.generation)
        return self.status()

    def status(self) -> Status:
        """How things are now."""
        return replace(self._replica.status, watching=self._watcher.kind, quarantined=self._replica.quarantine.steps)

    def stop(self, timeout: float = 5.0) -> None:
        """Stop following, and give the lease back. A swap under way is finished, a staging is given up."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
        else:
            self._close()

    def is_live(self) -> bool:
        """Whether engine and agent run and the engine may serve."""
        running = self._thread is None or self._thread.is_alive()
        return running and self._engine_alive() and self._replica.status.state != "broken"

    # --- the loop ---

    def _run(self) -> None:
        try:
            self._open()
            while not self._stopping.is_set() and self._engine_alive():
                self._wake.clear()
                self._sleep(self._turn())
        except Exception:
            log.exception("the agent of %s ended; the engine goes on with what it serves", self.root)
        finally:
            self._close()

    def _open(self) -> None:
        with contextlib.suppress(Exception):
            name = free_name(self.root, self._replica.status.replica, self._clock())
            self._replica.tell(replica=name)
        self._lease = LeaseKeeper(self.root, self._replica.status.replica, clock=self._clock)
        self._lease.on_write = self.metrics.lease_writes.inc
        self._replica.tell()
        self._lease.start()
        self._serve_pages()
        self._watcher.start()

    def _serve_pages(self) -> None:
        port, suffix = self.settings.metrics_port, self.engine.replica_suffix
        if port is None:
            return
        rank = int(suffix.removeprefix("-dp")) if suffix.startswith("-dp") else 0
        facts = lambda: self.status().to_json()  # noqa: E731
        try:
            self._endpoint = Endpoint(
                self.settings.metrics_host, port + rank if port else 0,
                pages(self.metrics, self.is_live, lambda: self._replica.status.ready, facts),
            )  # fmt: skip
            self._endpoint.start()
            log.info("metrics and health on %s:%d", self.settings.metrics_host, self._endpoint.port)
        except InputError as error:
            log.warning("no metrics are served: %s", error)

    def _close(self) -> None:
        self._watcher.stop()
        self._replica.stager.close()
        if self._endpoint is not None:
            self._endpoint.stop()
        if self._lease is not None:
            self._lease.stop()
        self._replica.tell(state="stopped")

    def _turn(self) -> float:
        """Look, and load what is wanted; seconds until the next look at the latest."""
        try:
            seen = aspire.look(self.root)
            with self._replica.work:
                choice = self._replica.choose(seen)
                if choice.step is not None and choice.stat is not None:
                    self._replica.attempt(choice.step, choice.stat)
            if self._watcher.attend(choice.uncommitted):
                self._wake.set()
            self._look_failures = 0
        except Exception as error:
            return self._look_failed(error)
        return self._pause()

    def _pause(self) -> float:
        now = self._clock()
        retry = self._replica.quarantine.next_try(now)
        return min(self._watcher.interval, float("inf") if retry is None else max(retry - now, 0.05))

    def _look_failed(self, error: Exception) -> float:
        self.metrics.look_failures.inc()
        self._look_failures += 1
        self._replica.note(f"{self.root} cannot be read: {error}")
        return float(
            min(self.settings.poll * 2.0 ** min(self._look_failures, 10), max(_LOOK_BACKOFF_S, self.settings.poll))
        )

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._wake.is_set() and not self._stopping.is_set() and self._engine_alive():
            left = until - time.monotonic()
            if left <= 0 or self._wake.wait(min(left, _TICK_S)):
                return

    def _engine_alive(self) -> bool:
        try:
            return self.engine.alive()
        except Exception:
            return False

    def _given_up(self) -> bool:
        return self._stopping.is_set() or not self._engine_alive()

    def _count_fallback(self, reason: str) -> None:
        self.metrics.fallbacks.labels(reason).inc()

    def _tell_lease(self, status: Status) -> None:
        if self._lease is not None:
            self._lease.tell(Served(status.loaded, status.manifest_digest, status.state, status.error))


def engine_of(engine_or_llm: Any) -> Engine:
    """An `Engine` as it is, or the one of a `vllm.LLM`, an `LLMEngine`, or a sampler that holds either.

    Tunix's VllmSampler keeps its LLM in `llm`, and in server mode an `LLMEngine` in `_driver`
    (tunix/generate/vllm_sampler.py).

    Raises:
        UsageError: it is none of these.
    """
    if hasattr(engine_or_llm, "swap") and hasattr(engine_or_llm, "specs"):
        engine: Engine = engine_or_llm
        return engine
    holders = [engine_or_llm, *(getattr(engine_or_llm, name, None) for name in ("llm", "_driver"))]
    llm_engine = next((found for h in holders if (found := getattr(h, "llm_engine", None)) is not None), engine_or_llm)
    if not hasattr(llm_engine, "engine_core"):
        raise UsageError(
            f"{type(engine_or_llm).__name__} is neither a vllm.LLM (or a sampler that holds one) nor an engine "
            "(reload.engine.Engine); give the LLM of this process. An engine that `vllm serve` runs follows "
            "MTX2VLLM_WATCH by itself."
        )
    from mtx2vllm.reload.engines.tpu_inference import of_llm_engine

    return of_llm_engine(llm_engine)


def load_version(
    engine_or_llm: Any,
    location: str | os.PathLike[str],
    *,
    swap: SwapMode = "auto",
    requests: Requests = "preempt",
    screen: bool = False,
) -> Report:
    """Bring one version (a directory, local or gs://) into an engine and return when it serves it. No thread remains.

    Raises:
        NotCommitted, InputError: it is no version. LoadFailed: it was refused; the engine serves what it served.
        EngineBroken: the engine must not serve any more.
    """
    engine = engine_of(engine_or_llm)
    version = aspire.open_version(os.fspath(location))
    stager = Stager(Options(screen=screen))
    try:
        return load(engine, stager, version, None, Way(swap, requests))[1]
    finally:
        stager.close()
