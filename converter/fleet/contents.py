"""What lies in a version directory, file by file: ours, or somebody else's. Retention deletes nothing but ours.

With a manifest, ours are the files that it names; with a claim and no manifest, those that the claim names. Without
either, temporary names and the `canonical/` tree are ours: anything else could be a trainer's step, or a model that
somebody put here.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.fleet import root
from mtx2vllm.converter.hf_files import CONFIG, SIDE_FILES
from mtx2vllm.converter.storage import Store, is_leftover, join
from mtx2vllm.converter.version import claim
from mtx2vllm.converter.version.verify import load_manifest
from mtx2vllm.schemas import manifest

# A directory without claim and manifest may be a copy in progress that we know nothing of: it is left alone as long
# as anything in it is younger than this.
QUIET_S = 3600.0

_UNREADABLE = "not counted: its manifest cannot be read, so that nobody knows which files are its own"
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_BESIDE = frozenset((CONFIG, *SIDE_FILES))


@dataclass(frozen=True, slots=True)
class Contents:
    """Names of files, sorted. `stays` says in words why the directory is not for us to remove, if it is not;
    `writing` that somebody may be writing it."""

    ours: tuple[str, ...]
    foreign: tuple[str, ...]
    stays: str | None = None
    writing: bool = False


def published(store: Store, directory: str) -> Contents:
    """A directory with a manifest."""
    local = store.local(directory)
    if local is not None and Path(local).is_symlink():
        return Contents((), (), "a link to another place, where others may use it; remove the link by hand")
    try:
        found, _ = load_manifest(directory, store)
    except InputError:
        return Contents((), (), _UNREADABLE)
    contents = _split(store, directory, found.files)
    if found.source.kind == "hf" and _same(store, found.source.uri, directory):
        return Contents((), contents.foreign, "adopted in its place: another program wrote its files")
    return contents


def unfinished(store: Store, location: str, step: int, now: float) -> Contents:
    """A directory without a manifest: being written, left by a killed writer, or no version at all."""
    directory = join(location, str(step))
    follower = root.read_follower(location, now)
    if follower is not None and follower.alive and follower.lease.writing == step:
        return Contents((), (), "being written by the follower", writing=True)
    stat, record = store.stat(join(directory, claim.NAME)), claim.read(store, directory)
    if stat is not None and record is not None:
        if claim.is_live(record, stat.modified, now):
            return Contents((), (), f"being written by process {record.pid} on {record.host}", writing=True)
        contents = _split(store, directory, record.files)
        return _left_alone(contents) if contents.foreign and set(contents.ours) <= {claim.NAME} else contents
    return _unclaimed(store, directory, now)


def _unclaimed(store: Store, directory: str, now: float) -> Contents:
    names = list(store.walk(directory))
    stats = (store.stat(join(directory, name)) for name in names)
    young = max((stat.modified for stat in stats if stat is not None), default=now)
    contents = _split(store, directory, _canonical(names))
    if now - young < QUIET_S and all(_like_ours(name) for name in names):
        return Contents((), (), "not complete, and younger than an hour: somebody may be copying it here", writing=True)
    if contents.foreign:
        return _left_alone(contents)
    if now - young < QUIET_S:
        return Contents((), (), "not complete, and younger than an hour", writing=True)
    return contents


def _split(store: Store, directory: str, known: Iterable[str]) -> Contents:
    own = {name for name in known if manifest.is_inside(name)} | {manifest.NAME, claim.NAME}
    ours: list[str] = []
    foreign: list[str] = []
    for name in store.walk(directory):
        (ours if name in own or _temporary(name) else foreign).append(name)
    return Contents(tuple(ours), tuple(foreign))


def _left_alone(contents: Contents) -> Contents:
    text = f"not a version: it holds files that mtx2vllm did not write ({shown(contents.foreign)})"
    return Contents((), contents.foreign, text)


def shown(names: tuple[str, ...]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _canonical(names: Iterable[str]) -> set[str]:
    """What a writer without a claim may have left: our own tree, and the small files beside it."""
    shards = {name for name in names if name.startswith("canonical/") and _SHARD.fullmatch(name[len("canonical/") :])}
    return shards | _BESIDE if shards else shards


def _like_ours(name: str) -> bool:
    return name in _BESIDE or _temporary(name) or bool(_SHARD.fullmatch(name.removeprefix("canonical/")))


def _temporary(name: str) -> bool:
    return name == claim.NAME or is_leftover(name)


def _same(store: Store, one: str, other: str) -> bool:
    if store.local(other) is None or "://" in one:
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def remove(store: Store, directory: str, ours: Iterable[str]) -> None:
    """Delete a version's own files and the folders that are empty then. The manifest goes first: from then on nobody
    takes the rest for a version. A claim names the files meanwhile, so that a killed run's rest is known for ours.

    Raises:
        LostRace: somebody writes into the directory.
    """
    names = tuple(name for name in ours if name not in (manifest.NAME, claim.NAME))
    with claim.Claim(directory) as held:
        held.announce(names)
        store.delete(join(directory, manifest.NAME))
        claim.delete(store, directory, names)
    _remove_folders(store, directory, names)


def _remove_folders(store: Store, directory: str, names: Iterable[str]) -> None:
    if store.local(directory) is None:
        if next(store.walk(directory), None) is None:
            store.delete_all(directory)  # the placeholders that some tools make for folders
        return
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents} | {"."}
    for folder in sorted(folders, key=lambda name: (name != ".", name.count("/")), reverse=True):
        with contextlib.suppress(OSError):  # not empty, or gone
            Path(directory, folder).rmdir()
