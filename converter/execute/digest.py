"""What is known of a tensor once its bytes have passed: blake3, and how many values are not finite."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mtx2vllm.converter.execute.screen import screen
from mtx2vllm.converter.execute.slabs import Part
from mtx2vllm.converter.plans import Plan


@dataclass(frozen=True, slots=True)
class TensorResult:
    """Of a tensor that is written: blake3 of its bytes (hex), and how many values are not finite."""

    digest: str
    nans: int
    infs: int


@dataclass(slots=True)
class _Open:
    hasher: Any = field(default_factory=blake3)
    done: int = 0
    nans: int = 0
    infs: int = 0


class Digests:
    """Takes parts, each tensor's in ascending order, from one thread. `partial` tensors are counted, not hashed."""

    def __init__(self, plan: Plan, partial: frozenset[int] = frozenset()) -> None:
        self.results: dict[int, TensorResult] = {}
        self._plan, self._partial = plan, partial
        self._open: dict[int, _Open] = {}

    def add(self, part: Part, data: NDArray[np.uint8]) -> None:
        """Take the bytes of a part."""
        tensor = self._plan.tensors[part.tensor]
        state = self._open.setdefault(part.tensor, _Open())
        nans, infs = screen(data, tensor.dtype)
        state.nans, state.infs = state.nans + nans, state.infs + infs
        if part.tensor in self._partial:
            return
        if state.done != part.start:
            raise RuntimeError(
                f"{tensor.name}: byte {part.start} came after {state.done}; this is a fault of the schedule"
            )
        state.hasher.update(memoryview(data))
        state.done += part.nbytes
        if state.done == tensor.nbytes:
            del self._open[part.tensor]
            self.results[part.tensor] = TensorResult(state.hasher.hexdigest(), state.nans, state.infs)

    @property
    def counts(self) -> dict[int, tuple[int, int]]:
        """(NaN, infinite) values in what was seen of the partial tensors."""
        return {number: (state.nans, state.infs) for number, state in self._open.items()}
