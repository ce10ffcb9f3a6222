"""A version, or only its config, copied to a local directory and proven against its manifest.

Every byte of a shard belongs to its header or to one tensor, and the manifest holds a digest of each: these pieces are
the units of trust. A copy that was interrupted goes on with the pieces that are sound, whatever wrote them; bytes that
arrive wrong are asked for again. The manifest is written last, as by every writer.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mtx2vllm.converter.errors import DifferenceError, InputError
from mtx2vllm.converter.storage import Store, join, normal, store_for
from mtx2vllm.converter.storage.rangefile import Window
from mtx2vllm.converter.version import claim, fetch_shard
from mtx2vllm.converter.version.fetch_shard import THREADS, pieces_of
from mtx2vllm.converter.version.verify import load_manifest
from mtx2vllm.schemas.manifest import NAME, FileEntry, Manifest, digest

ATTEMPTS = 3  # at bytes that arrive, but are not the manifest's
_INDEX = ".safetensors.index.json"  # names weights that a copy of the config alone does not have

Progress = Callable[[int, int], None]  # bytes done, of how many


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a copy took. `kept` bytes were there already, and sound."""

    version: str
    directory: str
    files: int
    fetched: int
    kept: int
    seconds: float

    def sentence(self) -> str:
        """For the person who asked."""
        return (
            f"{self.directory} holds {self.files} files of {self.version}: {self.fetched:,} bytes fetched, "
            f"{self.kept:,} were there, in {self.seconds:.1f} s; every digest is the manifest's."
        )


def fetch_version(
    version: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    config_only: bool = False,
    progress: Progress | None = None,
) -> Fetched:
    """Copy the version at `version` into the local `directory`; with `config_only` its side files alone, and no
    manifest.

    Raises:
        NotCommitted: there is no version.
        InputError: `directory` is not local, or holds something else; files of the version are missing or truncated.
        DifferenceError: bytes are not the manifest's, however often they are read.
        StorageError, Mtx2vllmError: the store refuses; the disk is full.
    """
    version, directory = os.fspath(version), os.fspath(directory)
    begun, source, into = time.monotonic(), store_for(version), store_for(directory)
    if into.local(directory) is None:
        raise InputError(f"{directory} is not a local directory, to which fetch copies.")
    version, directory = normal(version), normal(directory)
    manifest, known = load_manifest(version, source)
    names = [name for name, entry in manifest.files.items() if not config_only or _is_side(name, entry)]
    _require_room_for(manifest, directory, known)
    _require_present(source, version, manifest, names)
    copy = _Copy(version, directory, source, into, manifest, sum(manifest.files[n].size for n in names), progress)
    with claim.Claim(directory), ThreadPoolExecutor(THREADS, thread_name_prefix="mtx2vllm-fetch") as pool:
        for name in names:
            copy.shard(name, pool) if manifest.files[name].shard else copy.side_file(name)
        if not config_only:
            into.replace(join(directory, NAME), manifest_bytes(source, version, known))
    return Fetched(version, directory, len(names), copy.fetched, copy.kept, time.monotonic() - begun)


def manifest_bytes(source: Store, version: str, known: str) -> bytes:
    """The manifest as it was when the copy began.

    Raises:
        InputError: the version was overwritten meanwhile.
    """
    data = source.read(join(version, NAME))
    if digest(data) != known:
        raise InputError(f"{version} was overwritten while it was copied; fetch it again.")
    return data


def _is_side(name: str, entry: FileEntry) -> bool:
    return not entry.shard and not name.endswith(_INDEX)


def _require_room_for(manifest: Manifest, directory: str, known: str) -> None:
    problems = [
        f"{name}: no file of a version may have this name." for name in (NAME, claim.NAME) if name in manifest.files
    ]
    inside = Path(directory).resolve()
    for name in manifest.files:
        if not (inside / name).parent.resolve().is_relative_to(inside):
            problems.append(f"{directory}/{name} would lie outside {directory}, through a link; remove the link.")
    if problems:
        raise InputError(problems)
    store = store_for(directory)
    if store.stat(join(directory, NAME)) and digest(store.read(join(directory, NAME))) != known:
        raise InputError(f"{directory} holds another version; give an empty or new directory.")
    claim.refuse_foreign(store, directory, {NAME, *manifest.files})


def _require_present(source: Store, version: str, manifest: Manifest, names: Sequence[str]) -> None:
    def problem(name: str) -> str | None:
        path, size = join(version, name), manifest.files[name].size
        stat = source.stat(path)
        if stat is None:
            return f"{path} is missing, though the manifest lists it: deleted, or never copied whole."
        if stat.size != size:
            return f"{path} has {stat.size} bytes, the manifest says {size}: truncated, or changed after publication."
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        problems = [text for text in pool.map(problem, names) if text]
    if problems:
        raise InputError(problems)


class _Copy:
    """One copy under way: where from, where to, and how far it is."""

    def __init__(
        self,
        version: str,
        directory: str,
        source: Store,
        into: Store,
        manifest: Manifest,
        total: int,
        progress: Progress | None,
    ) -> None:
        self._version, self._directory, self._source, self._into = version, directory, source, into
        self._manifest, self._total, self._progress = manifest, total, progress
        self._threads = fetch_shard.THREADS if source.local(version) is None else fetch_shard.LOCAL_THREADS
        self._lock = threading.Lock()
        self.fetched = self.kept = 0

    def _uncommit(self) -> None:
        """Bytes are about to change: until all are sound again, this is no version."""
        self._into.delete(join(self._directory, NAME))

    def _count(self, fetched: int = 0, kept: int = 0) -> None:
        with self._lock:
            self.fetched += fetched
            self.kept += kept
            done = min(self.fetched + self.kept, self._total)
        if self._progress:
            self._progress(done, self._total)

    def side_file(self, name: str) -> None:
        """Copy a small file whole."""
        entry, path = self._manifest.files[name], join(self._directory, name)
        if self._into.stat(path) and digest(self._into.read(path)) == entry.digest:
            self._count(kept=entry.size)
            return
        self._uncommit()
        for _ in range(ATTEMPTS):
            data = self._source.read(join(self._version, name))
            self._count(fetched=len(data))
            if digest(data) == entry.digest:
                self._into.replace(path, data)
                return
        raise self._damaged(name, [f"the file (blake3 {entry.digest[:16]}...)"])

    def shard(self, name: str, pool: ThreadPoolExecutor) -> None:
        """Copy a shard: what is sound stays, the rest comes in parallel ranges."""
        size, path = self._manifest.files[name].size, join(self._directory, name)
        wanted = pieces_of(self._manifest, name)

        def read(start: int, out: memoryview) -> None:
            self._source.read_into(join(self._version, name), start, out)
            self._count(fetched=len(out))

        with fetch_shard.opened(path, size, self._uncommit) as (fd, fresh):
            if not fresh:
                wanted = fetch_shard.unsound(fd, wanted, pool)
                if wanted:
                    self._uncommit()
            self._count(kept=size - sum(piece.end - piece.start for piece in wanted))
            into = Window(fd, Path(path), size)
            for _ in range(ATTEMPTS):
                wanted = fetch_shard.copy(read, into, wanted, pool, self._threads)
            if wanted:
                raise self._damaged(name, [piece.what for piece in wanted])
            into.sync()

    def _damaged(self, name: str, what: Sequence[str]) -> DifferenceError:
        listed = ", ".join(what[:3]) + (f" and {len(what) - 3} more" if len(what) > 3 else "")
        return DifferenceError(
            f"{join(self._version, name)}: {listed}: other bytes than the manifest says, {ATTEMPTS} times; the version "
            "is damaged. Publish it again; what was sound is kept for another fetch."
        )
