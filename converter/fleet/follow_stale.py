"""Steps that are written anew after their version was published: a published version is not replaced, so it is told."""

import logging
from collections.abc import Sequence

from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.fleet.follow_steps import StepDir
from mtx2vllm.converter.locate import METADATA
from mtx2vllm.converter.storage import Stat, join, store_for

log = logging.getLogger(__name__)

_SKEW_S = 5.0  # of the clocks of a run's and a root's store
_LOOKED_AT = 4  # published steps a turn, beside the newest one


class Rewritten:
    """Remembers which writing of each step was published. Each rewriting is told once."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[int, float] = {}
        self._turn = 0

    def reading(self, step: StepDir) -> None:
        """A conversion begins: what is there now is what will be published."""
        written = _written(step)
        if written is not None:
            self._known[step.step] = _identity(step, written)

    def look(self, published: Sequence[StepDir]) -> None:
        """Look at the newest published step of the run, and at a few of the others in turn."""
        others = published[1:]
        first = self._turn % len(others) if others else 0
        self._turn = first + _LOOKED_AT
        for step in (*published[:1], *others[first : first + _LOOKED_AT]):
            self.compare(step)

    def compare(self, step: StepDir, published: Stat | None = None) -> None:
        """Whether a step is still the one that was published; `published` is its manifest's, if that is known."""
        written = _written(step)
        if written is None:
            return
        number, now = step.step, _identity(step, written)
        before = self._known.get(number)
        self._known[number] = now
        if before is None:  # published by a predecessor
            published = published or store_for(self._root).stat(roots.manifest_path(self._root, number))
            stale = published is not None and written.modified > published.modified + _SKEW_S
        else:
            stale = now != before
        if stale:
            log.warning(
                "step %d was written after version %d was published, and a published version is not replaced: give a "
                "run that was started anew a root of its own", number, number,
                extra={"event": "stale", "step": number},
            )  # fmt: skip


def _written(step: StepDir) -> Stat | None:
    return store_for(step.location).stat(join(step.location, "items", METADATA))


def _identity(step: StepDir, written: Stat) -> float:
    """Some mounts give a file another inode now and then, so that on a disk the time alone counts."""
    return written.generation if store_for(step.location).local(step.location) is None else written.modified
