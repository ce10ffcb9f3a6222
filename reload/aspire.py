"""Which version a replica should serve, decided by what stands in the root and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.storage import Stat, basename, join, normal, store_for
from mtx2vllm.converter.version.verify import load_manifest
from mtx2vllm.reload.settings import Policy
from mtx2vllm.reload.staged import Version
from mtx2vllm.schemas.manifest import Manifest

_PASSING = {"vanished", "storage", "changed"}  # may be better a moment later
_FIRST_S, _SLOWEST_S = {True: 1.0, False: 5.0}, {True: 60.0, False: 600.0}


@dataclass(frozen=True, slots=True)
class Look:
    """What a root holds. `steps`: newest first, committed or not."""

    steps: tuple[int, ...] = ()
    pin: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What the engine serves, as far as choosing goes."""

    step: int
    generation: int  # of the manifest
    created: str


@dataclass(frozen=True, slots=True)
class Choice:
    """`step` is to be considered now (None: nothing to do), `wanted` is what policy and pin ask for, `uncommitted` are
    versions being written that would be wanted; `why` says what stands in the way."""

    step: int | None = None
    stat: Stat | None = None
    wanted: int | None = None
    uncommitted: tuple[int, ...] = ()
    why: str | None = None


@dataclass
class Quarantine:
    """Versions that failed. One is tried again when its manifest changes, or when a pause ends that doubles each time:
    from 1 s to a minute for what may pass, from 5 s to ten minutes for what is wrong with the version."""

    _failed: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # step -> generation, count, until

    def add(self, step: int, generation: int, reason: str, now: float) -> float:
        """Note a failure; seconds until the next try."""
        passing = reason in _PASSING
        count = self._failed[step][1] + 1 if self._same(step, generation) else 1
        pause: float = min(_FIRST_S[passing] * 2.0 ** (count - 1), _SLOWEST_S[passing])
        self._failed[step] = (generation, count, now + pause)
        return pause

    def holds(self, step: int, generation: int, now: float) -> bool:
        """Whether a version must not be tried now."""
        return self._same(step, generation) and now < self._failed[step][2]

    def clear(self, step: int) -> None:
        """It was loaded."""
        self._failed.pop(step, None)

    def keep_only(self, steps: Sequence[int]) -> None:
        """Forget versions that are gone."""
        for step in self._failed.keys() - set(steps):
            del self._failed[step]

    @property
    def steps(self) -> tuple[int, ...]:
        """What is in quarantine."""
        return tuple(sorted(self._failed))

    def next_try(self, now: float) -> float | None:
        """When the next pause ends. One that is over and has led to nothing (the version is not wanted any more) is no
        reason to look."""
        return min((until for _, _, until in self._failed.values() if until > now), default=None)

    def _same(self, step: int, generation: int) -> bool:
        return step in self._failed and self._failed[step][0] == generation


def look(root: str) -> Look:
    """One listing, and the pin where there is one.

    Raises:
        InputError: the pin cannot be read; StorageError, OSError: the root cannot.
    """
    store = store_for(root)
    entries = store.listdir(root)
    pinned = any(entry.name == roots.PIN for entry in entries)
    return Look(tuple(roots.steps_in(entries)), roots.read_pin(root, store) if pinned else None)


def committed(root: str, step: int) -> Stat | None:
    """The manifest's facts, None where a version is not committed."""
    return store_for(root).stat(roots.manifest_path(root, step))


def choose(
    seen: Look,
    policy: Policy,
    held: Held | None,
    facts: tuple[Callable[[int], Stat | None], Callable[[int, int], bool], Callable[[int], str]],
) -> Choice:
    """The version to load next.

    The newest committed version that is not in quarantine, but never an older one than is served, unless the served
    one is gone from the root and the other was made later (a run that was started again counts from zero).

    Args:
        facts: the manifest's Stat of a step, whether (step, generation) is in quarantine, when a version was made.
    """
    stat_of, blocked, created = facts
    asked = policy.step if seen.pin is None else seen.pin
    if asked is not None:
        return _exactly(asked, seen, held, (stat_of, blocked))
    uncommitted: list[int] = []
    wanted: int | None = None
    for step in seen.steps:
        stat = stat_of(step)
        if stat is None:
            uncommitted.append(step)
            continue
        wanted = step if wanted is None else wanted
        if held is not None and step == held.step:
            same = stat.generation == held.generation or blocked(step, stat.generation)
            return Choice(None if same else step, stat, wanted, tuple(uncommitted))
        if held is not None and step < held.step and (held.step in seen.steps or created(step) <= held.created):
            return Choice(None, None, wanted, tuple(uncommitted))
        if not blocked(step, stat.generation):
            return Choice(step, stat, wanted, tuple(uncommitted))
    return Choice(None, None, wanted, tuple(uncommitted))


def _exactly(
    step: int, seen: Look, held: Held | None, facts: tuple[Callable[[int], Stat | None], Callable[[int, int], bool]]
) -> Choice:
    stat_of, blocked = facts
    stat = stat_of(step)
    if stat is None:
        by = "pinned" if seen.pin is not None else "asked for by the policy"
        gone = held is not None and held.step == step
        why = None if gone else f"version {step} is {by}, but it is not there or not completely written."
        return Choice(None, None, step, (step,) if step in seen.steps else (), why)
    served = held is not None and held.step == step and held.generation == stat.generation
    return Choice(None if served or blocked(step, stat.generation) else step, stat, step)


def number_of(location: str, manifest: Manifest) -> int:
    """The number that an engine carries for a version outside of any root: its directory's, else its source's step."""
    step = roots.step_of(basename(normal(location)))
    return next((n for n in (step, manifest.source.step) if n is not None), 0)


def open_version(location: str, step: int | None = None, stat: Stat | None = None) -> Version:
    """A committed version as its manifest says; without `step`, see `number_of`.

    Raises:
        NotCommitted: there is none any more; InputError: its manifest is not valid.
    """
    manifest, digest = load_manifest(location)
    number = number_of(location, manifest) if step is None else step
    return Version(number, location, digest, manifest, stat.modified if stat else 0.0)


def version_at(root: str, step: int, stat: Stat | None = None) -> Version:
    """A version of a root."""
    return open_version(join(root, str(step)), step, stat)


def created_of(root: str, step: int) -> str:
    """When a version was made; empty where that cannot be read."""
    try:
        return version_at(root, step).manifest.created
    except (InputError, OSError):
        return ""
