"""An engine that keeps arrays in a dictionary, notes the order of calls, and fails where it is told to."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from mtx2vllm.reload.engine import Change, EngineBroken, SwapFailed, SwapTimings, TensorSpec


class FakeEngine:
    """Keeps the contract of `reload.engine.Engine`, in-place swaps tensor by tensor included."""

    def __init__(self, like: Mapping[str, np.ndarray], mode: str = "double", suffix: str = "") -> None:
        self.state = {name: np.zeros_like(value) for name, value in like.items()}
        self.replica_suffix = suffix
        self.mode = mode
        self.dummy = False
        self.version: int | None = None
        self.ready = True
        self.refusing: str | None = None
        self.running = True
        self.calls: list[str] = []
        self.changes: list[Change] = []
        self.fail_at: int | None = None
        self.fail_undo = False
        self.before_swap: Callable[[], None] = lambda: None
        self.others: dict[str, TensorSpec] = {}
        self.lock = threading.Lock()

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(value.shape, value.dtype) for name, value in self.state.items()}

    def untouched(self) -> dict[str, TensorSpec]:
        return self.others

    def mode_for(self, nbytes: int) -> str:
        self.calls.append(f"mode_for {nbytes}")
        return self.mode

    def swap(self, change: Change) -> SwapTimings:
        self.before_swap()
        self.calls.append(f"swap {change.version} {change.mode}")
        assert all(name in self.state for name in change.weights)
        fresh = {name: np.array(value) for name, value in change.weights.items()}  # an engine copies
        begun = time.monotonic()
        with self.lock:
            if change.mode == "double":
                if self.fail_at is not None:
                    raise SwapFailed("injected")
                self.state |= fresh
            else:
                self._in_place(change, fresh)
            self.version = change.version
        self.changes.append(change)
        return SwapTimings(0.0, time.monotonic() - begun, change.mode, {"resume": 0.0})

    def _in_place(self, change: Change, fresh: dict[str, np.ndarray]) -> None:
        undo = change.undo or {name: self.state[name].copy() for name in fresh}
        for k, (name, value) in enumerate(fresh.items()):
            if k == self.fail_at:
                if self.fail_undo:
                    raise EngineBroken("injected, and the way back failed")
                for old in fresh:
                    self.state[old] = np.array(undo[old])
                raise SwapFailed(f"injected at tensor {k}")
            self.state[name] = value

    def set_ready(self, ready: bool) -> None:
        self.calls.append(f"ready {ready}")
        self.ready = ready

    def refuse(self, why: str | None) -> None:
        self.refusing = why

    def alive(self) -> bool:
        return self.running

    def hash(self) -> str:
        """Of everything that the engine holds."""
        with self.lock:
            total = hashlib.sha256()
            for name, value in sorted(self.state.items()):
                total.update(name.encode() + value.tobytes())
            return total.hexdigest()

    def holds(self, tensors: Mapping[str, np.ndarray]) -> bool:
        """Whether the state is exactly these bits."""
        with self.lock:
            return self.state.keys() == tensors.keys() and all(
                self.state[name].tobytes() == np.asarray(value).tobytes() for name, value in tensors.items()
            )


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that another thread does; the limit only says when to give up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)
