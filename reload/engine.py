"""What the agent needs of an engine. Implementations lie in `engines/`; nothing here knows vLLM.

Canonical names, shapes and dtypes (TP=1) are the only language between the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Requests = Literal["preempt", "keep", "drain"]
SwapMode = Literal["auto", "double", "inplace"]
Weights = Mapping[str, NDArray[Any]]  # canonical name -> host array (may be a memory map), row-major


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the engine's model holds it on one device at TP=1, before any layout processing."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One swap. `weights` holds only what changed; `undo` the loaded version's values of the same names (in-place
    swaps only: None where no version is loaded yet)."""

    version: int
    weights: Weights
    undo: Weights | None = None
    mode: Literal["double", "inplace"] = "double"
    requests: Requests = "preempt"


@dataclass(frozen=True, slots=True)
class SwapTimings:
    """Seconds, each until the device has the data. `pause` is what requests can notice."""

    prepare: float
    pause: float
    mode: str
    details: dict[str, float] = field(default_factory=dict)


class SwapFailed(Exception):
    """The swap did not happen; the previous version is in place, bit for bit."""


class EngineBroken(Exception):
    """The swap failed and the previous version could not be put back: the engine must not serve."""


class Engine(Protocol):
    """A running engine. Every method may be called from the agent's thread."""

    replica_suffix: str  # "" or "-dp<rank>"

    @property
    def dummy(self) -> bool:
        """Whether the engine was started with random weights, so that nothing may be served before a first version."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor that a version must bring, by canonical name (loaded buffers included)."""

    def untouched(self) -> Mapping[str, TensorSpec]:
        """What the engine holds and no text version brings (a vision tower), for the report."""

    def mode_for(self, nbytes: int) -> Literal["double", "inplace"]:
        """Which way `auto` takes for a change of so many bytes, by the device's free memory."""

    def swap(self, change: Change) -> SwapTimings:
        """Bring `change` in between two engine steps, all or nothing.

        Raises:
            SwapFailed: nothing changed.
            EngineBroken: the previous version could not be restored.
        """

    def set_ready(self, ready: bool) -> None:
        """Hold requests back (False) until a first version is in, or let them through."""

    def refuse(self, why: str | None) -> None:
        """Fail new requests with this sentence instead of holding them back; None: take them again."""

    def alive(self) -> bool:
        """Whether the engine still runs; the agent stops within a second of False."""
