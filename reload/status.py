"""What an agent says of itself: `agent.status()`, the facts on /healthz, and the line in the log."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mtx2vllm.reload.apply import Report

State = Literal["starting", "waiting", "loading", "serving", "failed", "broken", "stopped"]


@dataclass(frozen=True, slots=True)
class Status:
    """A moment of an agent.

    `state`: waiting (no version loaded yet), loading, serving, failed (the first version could not be loaded), broken
    (the engine must not serve), stopped. `ready`: a version is loaded and the engine is sound; it does not change
    during a swap. `error` is about `wanted` and does not mean that what is `loaded` is not well.
    """

    replica: str
    state: State = "starting"
    ready: bool = False
    loaded: int | None = None
    manifest_digest: str | None = None
    wanted: int | None = None
    pinned: int | None = None
    error: str | None = None
    quarantined: tuple[int, ...] = ()
    watching: str = ""  # inotify, listing
    reloads: int = 0
    failures: int = 0
    untouched: int = 0  # tensors of the engine that no version brings
    last: Report | None = None
    policy: str = "latest"

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)
