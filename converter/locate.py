"""Which step of which run a user means, and whether the trainer has finished it.

On a disk Orbax renames a step's directory when it is whole, so that its name is the commit; in a bucket a file is.
"""

import re

from mtx2vllm.converter.errors import InputError, NotCommitted
from mtx2vllm.converter.storage import Store, basename, join, parent, store_for
from mtx2vllm.schemas import manifest

METADATA = "_METADATA"
COMMIT = "commit_success.txt"
_TEMPORARY = ".orbax-checkpoint-tmp"
_SHOWN = 8  # steps in a message


def locate(checkpoint: str, step: int | None = None, allow_uncommitted: bool = False) -> tuple[str, int | None]:
    """The `items/` directory that a user means by a run, a `checkpoints/`, a step or an `items/` directory.

    Returns:
        Its location, and the step's number where a directory is named by it.

    Raises:
        InputError: nothing there, no checkpoint, no such step.
        NotCommitted: the step has no commit marker.
    """
    store = store_for(checkpoint)
    for items in (checkpoint, join(checkpoint, "items")):
        if store.stat(join(items, METADATA)):
            return _committed(store, items, allow_uncommitted)
    names = {e.name for e in store.listdir(checkpoint) if e.is_dir}
    if "checkpoints" in names:
        return locate(join(checkpoint, "checkpoints"), step, allow_uncommitted)
    return _choose(store, checkpoint, _step_dirs(store, checkpoint, allow_uncommitted), step)


def steps(run: str, allow_uncommitted: bool = False) -> list[int]:
    """The committed steps of a `checkpoints/` directory, ascending, compared as numbers.

    Locally a step's name is its commit (Orbax renames); on object stores its commit file is.
    """
    return sorted(_step_dirs(store_for(run), run, allow_uncommitted))


def _step_dirs(store: Store, run: str, allow_uncommitted: bool) -> dict[int, str]:
    """Step -> name of its directory. One that is still being written counts only where nothing better has its number."""
    remote = store.local(run) is None
    found: dict[int, str] = {}
    for entry in store.listdir(run):
        number = _step_in(entry.name)
        if not entry.is_dir or number is None:
            continue
        if _TEMPORARY in entry.name:
            if allow_uncommitted:
                found.setdefault(number, entry.name)
        elif allow_uncommitted or not remote or store.stat(join(run, entry.name, COMMIT)):
            found[number] = entry.name
    return found


def _step_in(name: str) -> int | None:
    """The step that a directory's name says, also while Orbax is still writing it."""
    digits = name.partition(_TEMPORARY)[0]
    return int(digits) if re.fullmatch(r"[0-9]{1,18}", digits) else None


def _choose(store: Store, run: str, known: dict[int, str], step: int | None) -> tuple[str, int | None]:
    if not known:
        raise InputError(_nothing(store, run))
    if step is not None and step not in known:
        shown = ", ".join(map(str, sorted(known)[-_SHOWN:]))
        which = "newest" if len(known) > _SHOWN else "steps"
        raise InputError(f"{run} has no committed step {step}; its {which} are {shown}")
    chosen = max(known) if step is None else step
    where = join(run, known[chosen])
    for items in (join(where, "items"), where):
        if store.stat(join(items, METADATA)):
            return items, chosen
    if store.stat(join(where, manifest.NAME)):
        raise InputError(
            f"{run} is a root of versions, converted already: `mtx2vllm versions {run}` lists them, `mtx2vllm verify {where}` "
            "checks the newest; give a MaxText run here"
        )
    others = [str(n) for n in sorted(known) if n != chosen]
    raise InputError(
        f"step {chosen} in {run} has no items/{METADATA}: it is half copied, or not a checkpoint that MaxText wrote; copy it "
        f"again{f', or choose another with --step ({", ".join(others[-5:])})' if others else ''}"
    )


def _nothing(store: Store, where: str) -> str:
    entries = store.listdir(where)
    if store.stat(where):
        return f"{where} is a file; give the directory of a run, a checkpoints/ directory, a step, or its items/"
    waiting = [e.name for e in entries if e.is_dir and _step_in(e.name) is not None]
    if waiting and all(_TEMPORARY in name for name in waiting):
        return (
            f"{where} holds only checkpoints that are still being written ({_TEMPORARY}); wait until one is committed, or "
            "pass --allow-uncommitted if the trainer has died and one is whole"
        )
    if waiting:
        return (
            f"{where} has no committed step: {', '.join(waiting[:5])} lack {COMMIT}. If they were copied from elsewhere and "
            "are whole, pass --allow-uncommitted"
        )
    names = {e.name for e in entries if not e.is_dir}
    if manifest.NAME in names:
        return (
            f"{where} is a version, converted already: `mtx2vllm verify {where}` checks it, `mtx2vllm validate {where}` tries "
            "it in vLLM; give a MaxText checkpoint here"
        )
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return (
            f"{where} is a Hugging Face model, not a MaxText checkpoint: `mtx2vllm adopt` makes a version of it; as "
            "--hf-config it gives a conversion its config"
        )
    if entries:
        return (
            f"{where} is no MaxText checkpoint: neither items/{METADATA} nor numbered steps are in it; check the path"
        )
    return f"{where} does not exist or is empty; give a run, a checkpoints/ directory, a step, or its items/"


def _committed(store: Store, items: str, allow: bool) -> tuple[str, int | None]:
    step_dir = items if _step_in(basename(items)) is not None else parent(items)
    if not allow:
        if _TEMPORARY in basename(step_dir) or _TEMPORARY in basename(items):
            raise NotCommitted(
                f"{step_dir} is still being written ({_TEMPORARY} in its name); wait, or pass --allow-uncommitted"
            )
        marked = store.stat(join(step_dir, COMMIT)) or store.stat(join(items, COMMIT))
        if store.local(items) is None and not marked:
            raise NotCommitted(
                f"{step_dir} lacks {COMMIT}: the trainer has not finished it, or a copy left the marker behind. If it is "
                "whole, pass --allow-uncommitted"
            )
    return items, _step_in(basename(step_dir))
