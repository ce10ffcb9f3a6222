"""Getting between two steps of a core, without an engine: a stand-in that has what vLLM's cores have."""

import queue
import threading
import time
from typing import Any

import pytest

from mtx2vllm.reload.engine import SwapFailed
from mtx2vllm.reload.engines import core as cores

pytestmark = pytest.mark.engine  # vLLM's own request types are imported


class LoopingCore:
    """A core with a busy loop: it takes requests from a queue, one between two steps."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.handled: list[Any] = []
        self.running = True

    def _handle_client_request(self, kind: Any, request: Any) -> None:
        self.handled.append(request)

    def is_running(self) -> bool:
        return self.running

    def loop(self) -> None:
        while self.running:
            try:
                self._handle_client_request(*self.input_queue.get(timeout=0.02))
            except queue.Empty:
                continue


@pytest.fixture
def looping() -> Any:
    core = LoopingCore()
    steps: list[Any] = []

    def run() -> None:
        steps.append(cores.attach(core))  # on the loop's own thread, as the plugin does
        ready.set()
        core.loop()

    ready = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(10)
    yield core, steps[0], thread
    core.running = False
    thread.join(10)


def test_a_job_runs_on_the_loops_thread(looping: Any) -> None:
    core, steps, thread = looping
    assert steps.run(threading.current_thread) is thread
    core.input_queue.put(("kind", "request"))
    steps.run(lambda: None)
    assert core.handled == ["request"]  # others still get what is theirs


def test_a_jobs_exception_is_the_callers_and_the_loop_goes_on(looping: Any) -> None:
    _, steps, thread = looping

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        steps.run(fail)
    assert steps.run(lambda: 7) == 7
    assert thread.is_alive()


def test_a_job_does_not_wait_for_an_engine_that_stops(looping: Any) -> None:
    core, steps, thread = looping
    core.running = False
    thread.join(10)
    begun = time.monotonic()
    with pytest.raises(SwapFailed, match="shutting down"):
        steps.run(lambda: None)
    assert time.monotonic() - begun < 5
    assert not steps.alive()


def test_outputs_reach_the_clients(looping: Any) -> None:
    core, steps, _ = looping
    steps.emit({0: "tokens"})
    steps.emit(None)
    assert core.output_queue.get_nowait() == (0, "tokens")
    assert core.output_queue.empty()


class SteppedCore:
    """A core that its caller steps."""

    def __init__(self) -> None:
        self.inside = 0
        self.overlapped = False
        self.steps = 0

    def step_fn(self) -> tuple[dict[int, str], bool]:
        self.enter()
        self.steps += 1
        return {0: f"step {self.steps}"}, True

    def enter(self) -> None:
        self.inside += 1
        self.overlapped |= self.inside > 1
        time.sleep(0.0005)
        self.inside -= 1

    def is_scheduler_paused(self) -> bool:
        return False

    def _nothing(self) -> None:
        self.enter()

    add_request = abort_requests = reset_prefix_cache = pause_scheduler = resume_scheduler = shutdown = _nothing


def test_a_busy_stepper_lets_jobs_in_and_never_overlaps_them() -> None:
    core = SteppedCore()
    steps = cores.attach(core)
    done = threading.Event()

    def step() -> None:
        while not done.is_set():
            core.step_fn()
            core.add_request()

    thread = threading.Thread(target=step)
    thread.start()
    try:
        for i in range(20):
            assert steps.run(lambda i=i: (core.enter(), i)[1]) == i
    finally:
        done.set()
        thread.join(10)
    assert core.steps > 3
    assert not core.overlapped


def test_what_was_in_flight_comes_out_first() -> None:
    core = SteppedCore()
    steps = cores.attach(core)
    steps.emit({0: "drained"})
    assert core.step_fn() == ({0: "drained"}, False)
    assert core.step_fn() == ({0: "step 1"}, True)


def test_attaching_twice_is_attaching_once() -> None:
    core = SteppedCore()
    assert cores.attach(core) is cores.attach(core)


def test_a_stopped_core_takes_no_jobs() -> None:
    core = SteppedCore()
    steps = cores.attach(core)
    core.shutdown()
    with pytest.raises(SwapFailed, match="shutting down"):
        steps.run(lambda: None)
