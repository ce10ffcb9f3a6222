"""A live run as a follower sees it: its steps, which are committed, and whether one has changed or is going away."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtx2vllm.converter.hf_files import CONFIG
from mtx2vllm.converter.locate import COMMIT, METADATA
from mtx2vllm.converter.storage import Store, join, parent, store_for

_MAX_NAME = 18  # digits; longer names are no step numbers


@dataclass(frozen=True)
class StepDir:
    """A directory that is named by a step's number (zeros in front are Orbax's business)."""

    step: int
    location: str


@dataclass(frozen=True)
class Mark:
    """What a conversion depended on: the step's files and sizes, the generations of its metadata and of the config, and
    what lay in the place of the version."""

    files: Mapping[str, int]
    generations: tuple[int, ...]
    target: tuple[str, ...]

    def deleted(self, later: "Mark") -> bool:
        """Whether files have gone since, and none have come: a step that is being copied has both."""
        return self.files.keys() > later.files.keys()

    def replaced(self, later: "Mark") -> bool:
        """Whether other metadata are there since."""
        return later.generations[:1] not in ((), (0,), self.generations[:1])


def find_steps(run: str) -> list[StepDir]:
    """The numbered directories of a run (or of its `checkpoints/`), newest first, committed or not; [] where the run
    does not exist yet."""
    store = store_for(run)
    entries = store.listdir(run)
    if any(e.is_dir and e.name == "checkpoints" for e in entries):
        run = join(run, "checkpoints")
        entries = store.listdir(run)
    numbers = [e.name for e in entries if e.is_dir and e.name.isascii() and e.name.isdigit()]
    found = {int(name): StepDir(int(name), join(run, name)) for name in numbers if len(name) <= _MAX_NAME}
    return [found[step] for step in sorted(found, reverse=True)]


def is_committed(location: str, allow_uncommitted: bool = False) -> bool:
    """Whether the trainer has finished a step: on a disk it renames the directory when all is in it, in a bucket it
    writes a marker last. The metadata must be there in any case."""
    store = store_for(location)
    if not store.stat(join(location, "items", METADATA)):
        return False
    return allow_uncommitted or store.local(location) is not None or bool(store.stat(join(location, COMMIT)))


def exists(location: str) -> bool:
    """Whether anything of a step is left."""
    return bool(store_for(location).listdir(location))


def has_returned(location: str, before: Mark) -> bool:
    """Whether a step that went away is there again, itself or another one, and not only its rest."""
    stat = store_for(location).stat(join(location, "items", METADATA))
    if stat is None:
        return False
    if stat.generation != before.generations[0]:
        return True
    return before.files.keys() <= _files(store_for(location), location).keys()


def mark(location: str, out: str, hf_config: str | None) -> Mark:
    """What a conversion of a step into `out` depends on now. `hf_config` is what was given."""
    store = store_for(location)
    above = parent(location)
    configs = [join(where, CONFIG) for where in (location, above, parent(above))]
    if hf_config is not None:
        configs += [hf_config, join(hf_config, CONFIG)]
    stats = [store.stat(join(location, "items", METADATA)), *(store_for(path).stat(path) for path in configs)]
    return Mark(
        _files(store, location), tuple(s.generation if s else 0 for s in stats), tuple(store_for(out).walk(out))
    )


def _files(store: Store, location: str) -> dict[str, int]:
    found: dict[str, int] = {}
    waiting = [""]
    while waiting:
        base = waiting.pop()
        for entry in store.listdir(join(location, base)):
            name = f"{base}/{entry.name}" if base else entry.name
            if entry.is_dir:
                waiting.append(name)
            else:
                found[name] = entry.size
    return found


def overtaken(found: Sequence[StepDir], chosen: int, settled: frozenset[int]) -> list[int]:
    """The steps that a newer one makes superfluous: older than `chosen`, newer than the newest one that is settled."""
    floor = max((s.step for s in found if s.step in settled and s.step < chosen), default=-1)
    return sorted(s.step for s in found if floor < s.step < chosen)
