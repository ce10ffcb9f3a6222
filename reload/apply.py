"""One version into one engine: match, verify and stage, secure the way back, swap. All or nothing."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mtx2vllm.converter.errors import InputError, Mtx2vllmError
from mtx2vllm.reload.engine import Change, Engine, EngineBroken, Requests, SwapFailed, SwapMode, SwapTimings, Weights
from mtx2vllm.reload.match import Target, changed, fit
from mtx2vllm.reload.stage import Stager, mappable
from mtx2vllm.reload.staged import Staged, StageFailed, Version

log = logging.getLogger(__name__)


class LoadFailed(Mtx2vllmError):
    """A version was not loaded; what the engine served before it serves still. `reason` is one word for the metrics,
    `problems` are whole sentences."""

    def __init__(self, version: int, reason: str, problems: list[str]) -> None:
        self.version, self.reason, self.problems = version, reason, problems
        super().__init__(f"version {version} was not loaded ({reason}):\n" + "\n".join(problems))


@dataclass(frozen=True, slots=True)
class Loaded:
    """The version that an engine serves: how each tensor of it is made, and what was cached of it."""

    version: Version
    targets: Mapping[str, Target]
    cached: frozenset[str] = frozenset()

    @property
    def keys(self) -> dict[str, str]:
        """Name to content."""
        return {name: target.key for name, target in self.targets.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """A reload in numbers: seconds by phase, bytes and tensors brought in."""

    version: int
    mode: str
    seconds: Mapping[str, float]
    nbytes: int
    tensors: int
    unchanged: int
    ignored: tuple[str, ...] = ()
    details: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        return f"version {self.version}: {self.tensors} tensors, {self.nbytes} bytes ({self.unchanged} unchanged), {phases}"


@dataclass(frozen=True, slots=True)
class Way:
    """How to swap, and what may stop it: `cancelled` is asked while staging, `still_wanted` right before the swap."""

    swap: SwapMode = "auto"
    requests: Requests = "preempt"
    cancelled: Callable[[], bool] = lambda: False
    still_wanted: Callable[[], bool] = lambda: True


def adopt(engine: Engine, version: Version) -> Loaded:
    """Count a version as loaded: the engine was started from it.

    Raises:
        InputError: it does not fit the engine, so the engine cannot have been started from it.
    """
    return Loaded(version, fit(version.manifest, engine.specs(), engine.untouched()).targets)


def load(engine: Engine, stager: Stager, version: Version, loaded: Loaded | None, way: Way) -> tuple[Loaded, Report]:
    """Bring a version in.

    Raises:
        LoadFailed: the engine has not noticed anything, or has its previous weights back.
        EngineBroken: neither version is whole in the engine.
    """
    begun = time.monotonic()
    try:
        fits = fit(version.manifest, engine.specs(), engine.untouched())
        targets = changed(fits.targets, loaded.keys if loaded else {})
        matched = time.monotonic()
        staged = stager.stage(version, targets, way.cancelled, loaded.cached if loaded else ())
        mode = way.swap if way.swap != "auto" else engine.mode_for(staged.nbytes)
        undo = _undo(stager, loaded, targets, way) if mode == "inplace" else None
        staged.check()
        if way.cancelled() or not way.still_wanted():
            raise StageFailed("cancelled", ["it is not wanted any more."])
        ready = time.monotonic()
        timings = engine.swap(Change(version.step, staged.weights, undo, mode, way.requests))
    except InputError as error:
        raise LoadFailed(version.step, "misfit", list(error.problems)) from None
    except StageFailed as error:
        raise LoadFailed(version.step, error.reason, error.problems) from None
    except SwapFailed as error:
        raise LoadFailed(version.step, "swap", [str(error)]) from error
    except (EngineBroken, LoadFailed):
        raise
    except Exception as error:  # whatever it is, the engine goes on
        log.exception("loading version %d failed", version.step)
        raise LoadFailed(version.step, "internal", [f"{type(error).__name__}: {error}"]) from error
    seconds = _phases(staged, timings, matched - begun, ready - matched)
    unchanged = len(fits.targets) - len(targets)
    report = Report(
        version.step, timings.mode, seconds, staged.nbytes, len(targets), unchanged, fits.ignored, dict(timings.details)
    )
    kept = (loaded.cached & set(fits.keys.values())) if loaded else frozenset()
    return Loaded(version, fits.targets, staged.keys | kept), report


def _phases(staged: Staged, timings: SwapTimings, matching: float, staging: float) -> dict[str, float]:
    verify = matching + staged.verify_s
    seconds = {"verify": verify, "stage": max(staging - staged.verify_s, 0.0), "prepare": timings.prepare}
    resume = timings.details.get("resume")
    return seconds | {"pause": timings.pause} | ({} if resume is None else {"resume": resume})


def _undo(stager: Stager, loaded: Loaded | None, targets: Mapping[str, Target], way: Way) -> Weights | None:
    """The loaded version's own files, read again and verified, as the way back. None: the engine keeps a copy of what
    it overwrites, which costs host memory but no more than assembling it here would."""
    if loaded is None:
        return None
    wanted = {name: loaded.targets[name] for name in targets if name in loaded.targets}
    mapped = mappable(loaded.version.location) and all(target.as_stored for target in wanted.values())
    cached = all(target.key in loaded.cached for target in wanted.values())
    if not wanted or len(wanted) < len(targets) or not (mapped or cached):
        return None
    try:
        return stager.stage(loaded.version, wanted, way.cancelled).weights
    except StageFailed as error:
        if error.reason == "cancelled":
            raise
        log.info("version %d cannot serve as the way back (%s); the engine keeps a copy", loaded.version.step, error)
        return None
