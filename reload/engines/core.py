"""Between two steps of a vLLM engine core: run something there, drain what is in flight, hold requests back.

Two kinds of core exist. In the caller's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) whoever calls `LLM.generate`
steps it, so a turn-taking lock makes a gap. In a process of its own the core's busy loop reads a queue between steps, so
a job travels through that queue and runs on the loop's thread.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mtx2vllm.reload.engine import Requests, SwapFailed

_ATTACHED = "_mtx2vllm_steps"
# What other threads may call on a core in their own process while a swap wants it.
_GUARDED = ("add_request", "abort_requests", "reset_prefix_cache", "pause_scheduler", "resume_scheduler")


class Steps(Protocol):
    """A running core seen from the agent's thread."""

    core: Any

    def run[T](self, job: Callable[[], T]) -> T:
        """`job` between two steps, its result or exception here. Raises SwapFailed when the engine stops first."""

    def emit(self, outputs: Any) -> None:
        """Hand a step's outputs on to the clients (from inside a job)."""

    def alive(self) -> bool:
        """Whether the core will step again."""


class _Job:
    """A job on its way to the engine's thread. It never raises there: the exception belongs to the caller."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # handed over, and re-raised where it belongs
            self.error = error
        finally:
            self.done.set()


class ProcessSteps:
    """A core with a busy loop of its own (`EngineCoreProc`)."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self._thread = threading.current_thread()  # the loop's: it is about to begin
        dispatch = core._handle_client_request

        def handle(kind: Any, request: Any) -> None:
            if isinstance(request, _Job):
                request.run()
            else:
                dispatch(kind, request)

        core._handle_client_request = handle

    def run[T](self, job: Callable[[], T]) -> T:
        from vllm.v1.engine import EngineCoreRequestType

        if threading.current_thread() is self._thread:
            return job()
        item = _Job(job)
        self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, item))
        while not item.done.wait(0.2):
            if not self.alive():
                raise SwapFailed("the engine is shutting down")
        if item.error is not None:
            raise item.error
        return item.result  # type: ignore[no-any-return]

    def emit(self, outputs: Any) -> None:
        for item in (outputs or {}).items():
            self.core.output_queue.put_nowait(item)

    def alive(self) -> bool:
        return bool(self.core.is_running())


class LocalSteps:
    """A core in the caller's process, stepped by whoever waits for outputs."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self._lock = threading.RLock()
        self._free = threading.Event()
        self._free.set()
        self._drained: list[Any] = []
        self._alive = True
        self._step = core.step_fn
        core.step_fn = self._guarded_step
        for name in _GUARDED:
            setattr(core, name, self._guard(getattr(core, name)))
        shutdown = core.shutdown

        def stop(*args: Any, **kwargs: Any) -> Any:
            self._alive = False
            return shutdown(*args, **kwargs)

        core.shutdown = stop

    def _guard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return call(*args, **kwargs)

        return guarded

    def _guarded_step(self) -> tuple[Any, bool]:
        self._free.wait()  # a lock is not fair: without this a busy stepper would never let a swap in
        with self._lock:
            if self._drained:
                return self._drained.pop(0), False
            outputs = self._step()
        if not outputs[0] and is_paused(self.core):
            time.sleep(0.005)  # the caller asks again at once; nothing will come while requests are held back
        return outputs  # type: ignore[no-any-return]

    def run[T](self, job: Callable[[], T]) -> T:
        self._free.clear()
        try:
            with self._lock:
                if not self._alive:
                    raise SwapFailed("the engine is shutting down")
                return job()
        finally:
            self._free.set()

    def emit(self, outputs: Any) -> None:
        if outputs:
            self._drained.append(outputs)

    def alive(self) -> bool:
        return self._alive


def attach(core: Any) -> Steps:
    """The way to this core: the same one, however often it is asked for."""
    steps: Steps | None = vars(core).get(_ATTACHED)
    if steps is None:
        steps = ProcessSteps(core) if hasattr(core, "input_queue") else LocalSteps(core)
        setattr(core, _ATTACHED, steps)
    return steps


def is_paused(core: Any) -> bool:
    return bool(core.is_scheduler_paused())


def is_busy(core: Any) -> bool:
    """Whether requests are running, as seen from another thread. Schedulers in other processes cannot be asked from
    there (their pipes belong to the engine's thread): they count as busy."""
    return bool(getattr(core.scheduler, "running", True))


def drain(steps: Steps) -> None:
    """Finish what is in flight without scheduling more, so that its tokens are counted to the version that made them.

    With asynchronous scheduling the core labels outputs when it takes a step from its queue, not when the step ran.
    """
    core = steps.core
    while core.batch_queue:
        future, scheduled, executed = core.batch_queue.pop()
        output = future.result()
        if output is None:
            executed.result()  # raises what made the step fail
        core._process_aborts_queue()
        outputs = core.scheduler.update_from_output(scheduled, output)
        core._attach_weight_version(outputs)
        steps.emit(outputs)
    core.model_executor.collective_rpc("synchronize_device")


def finish_running(steps: Steps) -> None:
    """Step until no request is running; new ones wait. Their answers stay those of the version they began with."""
    from vllm.v1.core.sched.interface import PauseState

    core = steps.core
    before = core.scheduler.pause_state
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    step = core.step_fn if isinstance(steps, ProcessSteps) else steps._step  # type: ignore[attr-defined]
    try:
        while (core.scheduler.has_unfinished_requests() or core.batch_queue) and steps.alive():
            outputs, executed = step()
            steps.emit(outputs)
            core.post_step(executed)
    finally:
        core.scheduler.set_pause_state(before)


def forget(core: Any, requests: Requests) -> None:
    """Drop what was computed with the old weights: prefix cache, encoder outputs and, but for `keep`, running KV."""
    if requests != "keep":
        core._reset_caches(reset_running_requests=True)
        return
    manager = getattr(core.scheduler, "kv_cache_manager", None)
    if manager is None:
        raise SwapFailed("requests=keep needs the scheduler in the engine's process; use preempt or drain")
    core.reset_mm_cache()
    core.model_executor.reset_encoder_cache()
    if not core.scheduler.reset_prefix_cache():
        _unhash(manager.block_pool)


def _unhash(pool: Any) -> None:
    """No block may be found by its tokens any more, those of running requests included, which keep theirs."""
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()


def hold(core: Any, held: bool) -> None:
    """Queue new and running requests without serving any (True), or let them through."""
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL if held else PauseState.UNPAUSED)


def refuse(core: Any, why: str | None) -> None:
    """Let every new request fail with `why`, or (None) take requests again."""
    vars(core).pop("preprocess_add_request", None)
    if why is None:
        return

    def no(*_: Any) -> Any:
        raise ValueError(why)

    core.preprocess_add_request = no
