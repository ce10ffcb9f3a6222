"""What a follower is told, what it remembers of a step that waits, and what it tells."""

import time
from dataclasses import dataclass, field

from mtx2vllm.converter.conversion import Options
from mtx2vllm.converter.fleet.follow_steps import Mark
from mtx2vllm.converter.storage import GS

OUTCOMES = ("published", "skipped", "dropped", "refused", "failed", "abandoned")
_TICK_S = 0.1  # how soon a request to stop is noticed


@dataclass(frozen=True)
class Following:
    """What a user chooses. `every` N takes each step that N divides, 1 all; None only what is newest when it is its
    turn. Times in seconds; `grace` is how long a conversion may go on after a request to stop."""

    run: str
    root: str
    options: Options = field(default_factory=Options)
    every: int | None = None
    poll: float | None = None
    wait: bool = True
    grace: float = 20.0

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return self.poll or (5.0 if GS in (self.run[:5], self.root[:5]) else 1.0)


@dataclass
class Status:
    """What metrics and health tell. Counts are since the start."""

    state: str = "starting"
    newest: int | None = None
    published: int | None = None
    writing: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    seconds: float = 0.0
    nbytes: int = 0
    unchanged: int = 0
    error: str | None = None
    beat: float = 0.0


@dataclass(frozen=True)
class Trouble:
    """Why a step waits. With `mark`, it is the step's own fault: it must change first. `gone` is what a step was that
    went away while it was read: what comes in its place is taken at once. `untold` is a fault that copying explains, and
    that becomes an error only if nothing changes any more."""

    attempts: int
    retry_at: float
    mark: Mark | None = None
    gone: Mark | None = None
    untold: str | None = None


class Stop:
    """A request to stop. It takes no lock, so that a signal may make it whatever the thread is in the middle of."""

    def __init__(self) -> None:
        self._asked = False

    def set(self) -> None:
        """Make the request."""
        self._asked = True

    def is_set(self) -> bool:
        """Whether it was made."""
        return self._asked

    def wait(self, seconds: float) -> None:
        """Until it is made, or so long."""
        until = time.monotonic() + seconds
        while not self._asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_S))


class Abandoned(Exception):
    """The conversion under way is given up."""
