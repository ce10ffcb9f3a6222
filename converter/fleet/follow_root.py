"""A root as its writer sees it: the newest version, the one to compare with, and what killed writers have left."""

import contextlib
import logging

from mtx2vllm.converter.errors import InputError, LostRace, Mtx2vllmError
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.storage import LEFTOVER, join, store_for
from mtx2vllm.converter.version import claim as claims
from mtx2vllm.converter.version.verify import load_manifest
from mtx2vllm.schemas.manifest import Manifest

log = logging.getLogger(__name__)

_LOOKED_BACK = 3  # versions that are tried as the one to compare with


def newest_version(root: str) -> int | None:
    """The largest committed number, None where there is none."""
    store = store_for(root)
    steps = roots.steps_in(store.listdir(root))
    return next((step for step in steps if store.stat(roots.manifest_path(root, step))), None)


def version_before(root: str, step: int, layout: str) -> tuple[int, Manifest] | None:
    """The committed version before a step, if it has this layout: to count what has not changed."""
    older = [number for number in roots.steps_in(store_for(root).listdir(root)) if number < step]
    for number in older[:_LOOKED_BACK]:
        try:
            found, _ = load_manifest(join(root, str(number)))
        except InputError:
            continue
        return (number, found) if found.layout == layout else None
    return None


def clean(root: str, now: float) -> None:
    """Remove what killed writers have left: half a version, a claim beside a whole one, the beginning of a small file.
    Whatever a live process may still be writing stays."""
    store = store_for(root)
    for place in (root, join(root, roots.AGENTS)):
        for entry in store.listdir(place):
            stat = store.stat(join(place, entry.name)) if entry.name.startswith(LEFTOVER) else None
            if stat is not None and now - stat.modified > roots.TTL_S:  # a small file takes no time
                store.delete(join(place, entry.name))
    for step in roots.steps_in(store.listdir(root)):
        _clean_version(root, step, now)


def _clean_version(root: str, step: int, now: float) -> None:
    store, out = store_for(root), join(root, str(step))
    stat, record = store.stat(join(out, claims.NAME)), claims.read(store, out)
    if stat is None or record is None or claims.is_live(record, stat.modified, now):
        return
    with contextlib.suppress(LostRace):  # to a live writer: whoever it is, the version is theirs
        if store.stat(roots.manifest_path(root, step)):  # killed right after publishing
            store.delete(join(out, claims.NAME), stat.generation)
            return
        with claims.Claim(out):  # taking a dead claim removes the files that it names
            pass
        log.info("removed what a dead writer left of %d", step, extra={"event": "cleaned", "step": step})
        remove_if_empty(out)


def remove_if_empty(out: str) -> None:
    """Leave no directories of a version that was given up."""
    store = store_for(out)
    with contextlib.suppress(OSError, Mtx2vllmError):
        if next(store.walk(out), None) is None:
            store.delete_all(out)
