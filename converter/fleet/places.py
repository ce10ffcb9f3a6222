"""Is a path the root that a command wants, or something that it is easily mistaken for?"""

from pathlib import Path

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.locate import COMMIT, METADATA
from mtx2vllm.converter.storage import Store, join, parent, store_for
from mtx2vllm.schemas import manifest

_ORBAX = "_CHECKPOINT_METADATA"


def require_root(location: str) -> None:
    """A root must exist, and be neither a file nor a version.

    Raises:
        InputError: says what it is instead.
    """
    store = store_for(location)
    refuse_file(location, "a root is a directory of versions")
    refuse_version(location)
    local = store.local(location)
    there = Path(local).is_dir() if local is not None else bool(store.listdir(location))
    if not there:
        raise InputError(f"{location} does not exist; check the path of the root")


def refuse_version(location: str) -> None:
    """Raises InputError where a location is a version, not a root of versions."""
    store = store_for(location)
    if store.stat(join(location, manifest.NAME)):
        raise InputError(f"{location} is itself a version, not a root of versions; give {_above(store, location)}")


def refuse_file(location: str, wanted: str) -> None:
    """Raises InputError where a location is a file."""
    if store_for(location).stat(location):
        raise InputError(f"{location} is a file; {wanted}")


def require_versions(location: str) -> None:
    """Where nothing is committed, what lies there is hardly a root: nothing is removed from it.

    Raises:
        InputError: there are things, but no committed version.
    """
    store = store_for(location)
    entries = store.listdir(location)
    steps = roots.steps_in(entries)
    if any(store.stat(roots.manifest_path(location, step)) for step in steps):
        return
    if is_trainers(location):
        raise InputError(_trainers(location, "; nothing was removed"))
    if any(not entry.name.startswith(".") for entry in entries):
        raise InputError(f"{location} holds no committed version, so that it hardly is a root; nothing was removed")


def refuse_trainers(location: str) -> None:
    """Raises InputError where a location is a trainer's directory."""
    if is_trainers(location):
        raise InputError(_trainers(location))


def _trainers(location: str, done: str = "") -> str:
    return (
        f"{location} is a trainer's checkpoint directory, not a root of versions{done}. Give the directory that "
        "`mtx2vllm follow` or `convert` writes into"
    )


def is_trainers(location: str) -> bool:
    """Whether a directory is a MaxText run, its checkpoints, a step or a step's items/."""
    store = store_for(location)
    if any(store.stat(join(location, name)) for name in (METADATA, join("items", METADATA))):
        return True
    names = [entry.name for entry in store.listdir(location) if entry.is_dir]
    if "checkpoints" in names:
        location = join(location, "checkpoints")
        names = [entry.name for entry in store.listdir(location) if entry.is_dir]
    marks = (join("items", METADATA), COMMIT, _ORBAX)
    numbers = sorted((name for name in names if name.isascii() and name.isdigit()), reverse=True)
    return any(store.stat(join(location, name, mark)) for name in numbers[:3] for mark in marks)


def refuse_overlap(run: str, root: str) -> None:
    """A run and its root must lie apart: versions among a trainer's steps would be taken for each other.

    Raises:
        InputError: one is, or lies inside, the other; or one is a file.
    """
    refuse_file(run, "follow wants the directory of a run")
    refuse_file(root, "follow wants a directory to write versions into")
    source, target = _whole(run), _whole(root)
    if source == target:
        raise InputError(f"{run} and {root} are the same directory; give the versions a root of their own")
    if _within(target, source):
        raise InputError(f"the root {root} lies inside the run {run}; give the versions a root of their own")
    if _within(source, target):
        raise InputError(f"the run {run} lies inside the root {root}; give the versions a root of their own")


def _whole(location: str) -> str:
    local = store_for(location).local(location)
    return join(location) if local is None else str(Path(local).resolve())


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _above(store: Store, location: str) -> str:
    local = store.local(location)
    return parent(location) if local is None else str(Path(local).resolve().parent)
