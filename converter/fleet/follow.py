"""Follow a live run: each newly committed step becomes a version of a root.

    look (list the run) -> choose (newest first) -> convert (read, write, publish) -> tell (lease, log, metrics) -> wait

Level-triggered: every turn looks at what is there, nothing is remembered that the directories could say. What is
remembered is trouble: a step that cannot be converted is reported once and left alone until it changes, a failure that is
not the step's fault is tried again with a growing pause, and a step that the trainer deletes while it is read is dropped.
"""

import logging
import random
import time
from collections.abc import Callable

from mtx2vllm.converter.conversion import Converted, carry_out, prepare
from mtx2vllm.converter.errors import DifferenceError, InputError, LostRace, NotCommitted, StorageError, UsageError
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.fleet.follow_lease import RootLease
from mtx2vllm.converter.fleet.follow_root import clean, newest_version, remove_if_empty, version_before
from mtx2vllm.converter.fleet.follow_stale import Rewritten
from mtx2vllm.converter.fleet.follow_state import Abandoned, Following, Status, Stop, Trouble
from mtx2vllm.converter.fleet.follow_steps import (
    Mark,
    StepDir,
    exists,
    find_steps,
    has_returned,
    is_committed,
    mark,
    overtaken,
)
from mtx2vllm.converter.hf_files import CONFIG
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.converter.version.verify import load_manifest
from mtx2vllm.schemas.manifest import Manifest

__all__ = ["Follower", "Following", "Status", "Stop"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0  # between two tries of what is not the step's fault
_LONGEST_LOOK_S = 30.0  # between two looks whether a refused step has changed
_GONE_S = 60.0  # how long what is left of a deleted step is not looked at
_REMEMBERED = 256  # notes that are not said twice


class Follower:
    """The loop's memory. `turn` is one look and at most one conversion."""

    def __init__(self, chosen: Following, lease: RootLease, stop: Stop, clock: Callable[[], float] = time.time) -> None:
        self.chosen, self.lease, self.stop, self.clock = chosen, lease, stop, clock
        self.status = Status(beat=clock())
        self.deadline = float("inf")
        self._settled: set[int] = set()
        self._troubles: dict[int, Trouble] = {}
        self._said: dict[str, None] = {}
        self._rewritten = Rewritten(chosen.root)

    def resume(self) -> None:
        """Take up what a predecessor has settled (versions that were pruned since are not converted again), and remove
        what it left half written."""
        clean(self.chosen.root, self.clock())
        newest = newest_version(self.chosen.root)
        self._settled |= {step for step in self.lease.settled if newest is not None and step < newest}
        self.status.published = newest

    def turn(self) -> bool:
        """Look once and convert at most one step. True where another look should follow at once."""
        self.status.beat = self.clock()
        found = find_steps(self.chosen.run)
        if found:  # a run that is not mounted for a moment is not forgotten
            self._forget({s.step for s in found})
            self._rewritten.look([s for s in found if s.step in self._settled])
        else:
            self._once(f"waiting: no checkpoint in {self.chosen.run} yet")
        self.status.newest = found[0].step if found else None
        waiting = False
        for step in found:
            if self.chosen.every and step.step % self.chosen.every:
                continue
            if self._is_settled(step):
                if self.chosen.every is None:
                    break  # what is older than the newest version is not wanted
                continue
            if self._may_try(step) and self._ready(step):
                self._convert(step)
                if self.chosen.every is None and step.step in self._settled:
                    self._skip(overtaken(found, step.step, frozenset(self._settled)))
                return True
            waiting = True
        if found and not waiting and self.status.published is not None and not self.status.counts["published"]:
            self._once(f"up to date at {self.status.published}")
        return False

    def _forget(self, there: set[int]) -> None:
        for step in self._troubles.keys() - there:
            del self._troubles[step]
        self._settled &= there

    def _is_settled(self, step: StepDir) -> bool:
        if step.step in self._settled:
            return True
        store, path = store_for(self.chosen.root), roots.manifest_path(self.chosen.root, step.step)
        published = store.stat(path)
        if published is None:
            return False
        self._settled.add(step.step)
        self._rewritten.compare(step, published)
        return True

    def _ready(self, step: StepDir) -> bool:
        if is_committed(step.location, self.chosen.options.allow_uncommitted):
            return True
        self._once(f"waiting: step {step.step} is there, but the trainer has not committed it yet", step=step.step)
        return False

    def _may_try(self, step: StepDir) -> bool:
        """Whether a step without trouble, or one whose time has come, or one that has changed."""
        trouble = self._troubles.get(step.step)
        if trouble is None:
            return True
        if trouble.gone is not None and has_returned(step.location, trouble.gone):
            del self._troubles[step.step]
            return True
        if self.clock() < trouble.retry_at:
            return False
        if trouble.mark is None:
            return True
        if self._mark_of(step) != trouble.mark:
            del self._troubles[step.step]
            return True
        if trouble.untold is not None:
            self._refused(step.step, trouble.untold)
        later = self._later(trouble.attempts + 1, _LONGEST_LOOK_S)
        self._troubles[step.step] = Trouble(trouble.attempts + 1, later, trouble.mark, trouble.gone)
        return False

    def _later(self, attempts: int, longest: float = _LONGEST_PAUSE_S) -> float:
        pause = min(_FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 16), longest)
        return self.clock() + pause * random.uniform(0.8, 1.0)  # noqa: S311  (jitter)

    def _skip(self, steps: list[int]) -> None:
        new = [step for step in steps if step not in self._troubles]
        if new:
            self.status.counts["skipped"] += len(new)
            shown = ", ".join(map(str, new[:8])) + (f" and {len(new) - 8} more" if len(new) > 8 else "")
            log.info("skipped %s: a newer step is there", shown, extra={"event": "skipped", "steps": new})

    def _convert(self, step: StepDir) -> None:
        out = join(self.chosen.root, str(step.step))
        self.status.writing = step.step
        before: Mark | None = None
        try:
            self._tell(step.step)
            before = self._mark_of(step)
            self._rewritten.reading(step)
            started = time.monotonic()
            job = prepare(step.location, self.chosen.options)
            for note in job.notes:
                self._once(note)
            previous = version_before(self.chosen.root, step.step, job.plan.layout)
            done = carry_out(
                job, step.location, out, say=log.warning, progress=self._progress, started=started, previous=previous
            )
            self._published(step.step, done, previous)
        except UsageError:
            raise  # true for every step
        except Abandoned as why:
            self.status.counts["abandoned"] += 1
            log.warning(
                "abandoned %d: %s; nothing of it is left", step.step, why,
                extra={"event": "abandoned", "step": step.step},
            )  # fmt: skip
        except Exception as error:
            self._failed(step, before, error)
        finally:
            self.status.writing = None
        if step.step not in self._settled:
            remove_if_empty(out)
        self._tell(None)

    def _tell(self, writing: int | None) -> None:
        self.lease.tell(writing, tuple(sorted(self._settled)))

    def _progress(self, done: int, total: int) -> None:
        self.status.beat = self.clock()
        if self.stop.is_set() and done < total:
            if self.clock() >= self.deadline:
                raise Abandoned("asked to stop")
            self._once(f"asked to stop: {self.status.writing} is finished first, if it takes no longer than allowed")
        if not self.lease.held():
            raise Abandoned(f"the lease of {self.chosen.root} is lost to another follower, or could not be renewed")

    def _published(self, step: int, done: Converted, previous: tuple[int, Manifest] | None) -> None:
        self._settled.add(step)
        self._troubles.pop(step, None)
        self.status.counts["published"] += 1
        newest = self.status.published
        if newest is not None and step < newest and self.chosen.every is None:
            text = f"replicas that follow the newest version serve {newest}, which is newer than this run's steps"
            self._once(text, logging.WARNING)
        self.status.published, self.status.error = max(step, newest or 0), None
        self.status.seconds, self.status.nbytes = done.seconds, done.bytes
        text, unchanged = "", 0
        if previous is not None:
            made, _ = load_manifest(done.out)
            unchanged = made.unchanged.tensors if made.unchanged else 0
            text = f", {unchanged} unchanged since {previous[0]}"
        self.status.unchanged = unchanged
        log.info(
            "published %d: %d tensors, %d bytes in %.2f s%s", step, done.tensors, done.bytes, done.seconds, text,
            extra={
                "event": "published", "step": step, "tensors": done.tensors, "bytes": done.bytes,
                "seconds": done.seconds, "unchanged": unchanged, "peak_rss": done.peak_rss,
            },
        )  # fmt: skip

    def _failed(self, step: StepDir, before: Mark | None, error: Exception) -> None:
        """Sort a failure: another's success, the trainer's deletion, the step's own fault, or bad luck."""
        number = step.step
        if isinstance(error, LostRace) and self._is_settled(step):
            log.info("version %d was published by another writer", number, extra={"event": "present", "step": number})
            return
        now = self._mark_after(step)
        if before is not None and (now is None or before.replaced(now) or before.deleted(now)):
            self._troubles[number] = Trouble(1, self.clock() + _GONE_S, now or Mark({}, (), ()), before)
            self.status.counts["dropped"] += 1
            what = "another took its place" if now and before.replaced(now) else "the trainer deleted it"
            log.warning("dropped %d: %s while it was read", number, what, extra={"event": "dropped", "step": number})
            return
        if isinstance(error, NotCommitted):
            self._troubles[number] = Trouble(1, self._later(1))
            return
        self.status.error = str(error)
        own = isinstance(error, (InputError, DifferenceError)) and not isinstance(error, (LostRace, StorageError))
        if own and now and not now.target and _copying_explains(error):
            self._troubles[number] = Trouble(1, self._later(1), before or now, untold=str(error))
            text = f"step {number} cannot be read yet; it may still be being copied, and is looked at again: {error}"
            self._once(text, logging.WARNING, key=f"copied {number}", step=number)
            return
        attempts = 1 if own else getattr(self._troubles.get(number), "attempts", 0) + 1
        retry_at = self._later(attempts)
        self._troubles[number] = Trouble(attempts, retry_at, (before or now) if own else None)
        if own:
            self._refused(number, str(error))
            return
        self.status.counts["failed"] += 1
        log.error(
            "step %d cannot be converted (tried again in %.0f s): %s", number, retry_at - self.clock(),
            str(error) or type(error).__name__, extra={"event": "failed", "step": number, "attempts": attempts},
        )  # fmt: skip

    def _refused(self, number: int, why: str) -> None:
        self.status.counts["refused"] += 1
        log.error(
            "step %d cannot be converted (it is left alone until it changes): %s", number, why,
            extra={"event": "refused", "step": number},
        )  # fmt: skip

    def _mark_of(self, step: StepDir) -> Mark:
        return mark(step.location, join(self.chosen.root, str(step.step)), self.chosen.options.hf_config)

    def _mark_after(self, step: StepDir) -> Mark | None:
        """What is left of a step after a failure, None where nothing is."""
        try:
            return self._mark_of(step) if exists(step.location) else None
        except (OSError, StorageError):
            return Mark({}, (), ()) if exists(step.location) else None

    def _once(self, text: str, level: int = logging.INFO, key: str | None = None, **facts: object) -> None:
        if (key or text) not in self._said:
            self._said[key or text] = None
            if len(self._said) > _REMEMBERED:
                del self._said[next(iter(self._said))]
            log.log(level, "%s", text, extra={"event": "note", **facts})


def _copying_explains(error: Exception) -> bool:
    """Whether a step may be fine once it is copied whole: not where the remedy is another option or config."""
    return isinstance(error, InputError) and "--" not in str(error) and CONFIG not in str(error)
