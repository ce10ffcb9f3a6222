"""One engine and the version in it: what is loaded, what was refused, and the telling of both.

No threads and no waiting here; the agent decides when.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mtx2vllm.converter.errors import InputError, Mtx2vllmError, NotCommitted
from mtx2vllm.converter.storage import Stat
from mtx2vllm.reload import aspire
from mtx2vllm.reload.apply import Loaded, LoadFailed, Report, Way, adopt, load
from mtx2vllm.reload.engine import Engine, EngineBroken
from mtx2vllm.reload.metrics import Metrics
from mtx2vllm.reload.settings import Settings
from mtx2vllm.reload.stage import Options, Stager
from mtx2vllm.reload.staged import Version
from mtx2vllm.reload.status import Status

log = logging.getLogger(__name__)


class Replica:
    """An engine that follows a root. `told` is called after each change of the status, `given_up` ends a staging."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        hold: bool,
        clock: Callable[[], float],
        told: Callable[[Status], None],
        given_up: Callable[[], bool],
    ) -> None:
        self.engine, self.settings, self.root = engine, settings, settings.watch
        self.metrics = Metrics()
        self.policy = settings.policy
        self.work = threading.Lock()  # one load at a time
        self.status = Status(settings.replica + engine.replica_suffix, policy=str(self.policy))
        self.quarantine = aspire.Quarantine()
        self.stager = Stager(Options(settings.cache_dir, settings.cache_size, settings.screen != "off"))
        self._hold, self._clock, self._told, self._given_up = hold, clock, told, given_up
        self._loaded: Loaded | None = None
        self._generation = 0  # of the loaded version's manifest
        self._said: str | None = None
        self._lasting: str | None = None  # a trouble that no version can end
        self._holding = False

    def prepare(self, started_from: str | None) -> None:
        """What must be in place before the first version: requests held, the engine's own version counted."""
        if self.status.state != "starting":
            return
        self.tell(state="waiting", untouched=len(self.engine.untouched()))
        if self._hold:
            self._let_through(False)
        if started_from is not None:
            self._count_as_loaded(started_from)
        with contextlib.suppress(Exception):
            self.stager.start()  # a failure shows with the first version

    def _let_through(self, ready: bool) -> None:
        """Hold requests back, or let them through; with unready=fail new ones are refused instead."""
        self._holding = not ready
        fail = self.settings.unready == "fail"
        if fail:
            self.engine.refuse(None if ready else f"no version from {self.root} is loaded yet")
        if ready or not fail:
            self.engine.set_ready(ready)

    def _count_as_loaded(self, location: str) -> None:
        """The engine was started from a version: nothing of it needs loading again."""
        try:
            version = aspire.open_version(location)
            self._loaded = adopt(self.engine, version)
        except (InputError, OSError) as error:
            log.warning("%s does not count as loaded: %s", location, error)
            return
        # The root's own version of that number may be another one: the first look compares their digests.
        self._generation = 0
        self._became_loaded(version)

    def note(self, text: str | None, **changes: Any) -> None:
        """Keep a trouble in the status (None: it is over), with other changes, and say it when it is a new one."""
        if text is not None and text != self._said:
            log.warning("%s", text)
        self._said = text
        self.tell(error=text or self._lasting, **changes)

    def choose(self, seen: aspire.Look, patient: bool = True) -> aspire.Choice:
        """What to load; without patience also what is in quarantine."""
        now = self._clock()
        self.metrics.last_look.set(now)
        held = None
        if self._loaded is not None:
            version = self._loaded.version
            held = aspire.Held(version.step, self._generation, version.manifest.created)
        self.quarantine.keep_only(seen.steps)
        choice = aspire.choose(
            seen, self.policy, held,
            (
                lambda step: aspire.committed(self.root, step),
                lambda step, generation: patient and self.quarantine.holds(step, generation, now),
                lambda step: aspire.created_of(self.root, step),
            ),
        )  # fmt: skip
        self.metrics.wanted.set(-1 if choice.wanted is None else choice.wanted)
        self.status = replace(self.status, wanted=choice.wanted, pinned=seen.pin, policy=str(self.policy))
        if choice.why is not None:
            self.note(choice.why)
        elif choice.step is None and choice.wanted == self.status.loaded:
            self.note(None)
        return choice

    def attempt(self, step: int, stat: Stat) -> None:
        """Load, and put what fails into quarantine."""
        try:
            version = aspire.version_at(self.root, step, stat)
            if self._loaded is not None and (step, version.digest) == self._identity():
                self._generation = stat.generation  # written again with the same content
                return
            self.bring(version, stat.generation)
        except EngineBroken:
            self.quarantine.add(step, stat.generation, "broken", self._clock())
        except LoadFailed as error:
            if error.reason != "cancelled":
                self._quarantined(step, stat.generation, error.reason, error.problems)
        except NotCommitted:
            return  # deleted between two looks
        except (InputError, OSError) as error:
            self.metrics.failures.labels("manifest").inc()
            self._quarantined(step, stat.generation, "manifest", [str(error)])
        except Exception as error:  # the agent goes on, whatever it was
            log.exception("version %d", step)
            self.metrics.failures.labels("internal").inc()
            self._quarantined(step, stat.generation, "internal", [f"{type(error).__name__}: {error}"])

    def _identity(self) -> tuple[int, str] | None:
        return None if self._loaded is None else (self._loaded.version.step, self._loaded.version.digest)

    def _quarantined(self, step: int, generation: int, reason: str, problems: list[str]) -> None:
        pause = self.quarantine.add(step, generation, reason, self._clock())
        self.metrics.quarantined.set(len(self.quarantine.steps))
        text = f"version {step} is refused ({reason}): " + " ".join(problems)
        state = self.status.state if self.status.loaded is not None else "failed"
        self.note(text, state="broken" if self.status.state == "broken" else state)
        log.info("version %d is tried again in %.0f s, or when it changes", step, pause)

    def bring(self, version: Version, generation: int) -> None:
        """Load a version, and say so.

        Raises:
            LoadFailed: it was refused, or the engine could not take it. EngineBroken: the engine must not serve.
        """
        before = self.status.state
        self.status = replace(self.status, state="loading")
        detect = max(self._clock() - version.published, 0.0) if version.published else 0.0
        way = Way(self.settings.swap, self.settings.requests, self._given_up, lambda: self._still_wanted(version))
        try:
            self._loaded, report = load(self.engine, self.stager, version, self._loaded, way)
        except LoadFailed as error:
            self.status = replace(self.status, state=before, failures=self.status.failures + 1)
            self.metrics.failures.labels(error.reason).inc()
            raise
        except EngineBroken as error:
            self._broke(error)
            raise
        self._generation = generation
        self.quarantine.clear(version.step)
        self._measure(report, detect)
        self._became_loaded(version, report)

    def _still_wanted(self, version: Version) -> bool:
        """A pin may have come while we staged. A newer version is no reason to give this one up: with versions that
        come faster than they load, none ever would."""
        try:
            pin = aspire.look(self.root).pin
        except (Mtx2vllmError, OSError):
            return True
        return (self.policy.step if pin is None else pin) in {None, version.step}

    def _broke(self, error: EngineBroken) -> None:
        self._loaded = None
        self.metrics.failures.labels("broken").inc()
        self.metrics.ready.set(0)
        log.error("%s", error)
        with contextlib.suppress(Exception):
            self._let_through(False)
            self.engine.set_ready(False)  # also what is running
        self.tell(state="broken", ready=False, loaded=None, manifest_digest=None, error=str(error))

    def _became_loaded(self, version: Version, report: Report | None = None) -> None:
        random = self.status.untouched if self._hold else 0
        if random:
            self._lasting = (
                f"{random} tensors of the engine (a vision tower?) hold random values that no version brings: start "
                "it from a full model, or with language_model_only."
            )
        elif self._holding:
            self._let_through(True)
        self.note(
            self._lasting, state="failed" if random else "serving", ready=not random, loaded=version.step,
            manifest_digest=version.digest, last=report or self.status.last,
            reloads=self.status.reloads + (report is not None),
        )  # fmt: skip
        self.metrics.loaded.set(version.step)
        self.metrics.ready.set(0 if random else 1)
        self.metrics.quarantined.set(len(self.quarantine.steps))

    def _measure(self, report: Report, detect: float) -> None:
        self.metrics.observe({"detect": detect, **report.seconds})
        self.metrics.reloads.labels(report.mode).inc()
        self.metrics.bytes.inc(report.nbytes)
        self.metrics.tensors.labels("changed").inc(report.tensors)
        self.metrics.tensors.labels("unchanged").inc(report.unchanged)
        log.info("loaded %s; detected after %.3f s, %s", report, detect, report.mode)

    def tell(self, **changes: Any) -> None:
        """Change the status, and let others know."""
        self.status = replace(self.status, **changes)
        self._told(self.status)
