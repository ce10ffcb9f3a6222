"""Reading a version's tensors, each byte once, and hashing them on the way: what the staging process does."""

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from blake3 import blake3

from mtx2vllm.converter.storage import Store, join
from mtx2vllm.converter.version.pieces import DTYPES, Recipe, as_rows, read_rows, row_blocks
from mtx2vllm.converter.version.verify import CHUNK
from mtx2vllm.reload.cache import Cache, Put
from mtx2vllm.reload.job import Item, Job
from mtx2vllm.schemas.manifest import Manifest

_REMOTE_THREADS = 16  # hides a request's latency; each holds one chunk
_FLOATS = {"F64", "F32", "F16", "BF16"}
_local = threading.local()


class Unsound(Exception):
    """The bytes are not the manifest's, or hold what the screen refuses."""


class Damaged(Unsound):
    """The bytes are not the manifest's. From a store behind a network they are read once more before that counts."""


class Work:
    """Every item of a job, several at a time where a request has latency. `read` counts bytes, `cached` says where
    a key lies."""

    def __init__(
        self,
        job: Job,
        memory: int | None,
        version: tuple[Store, Manifest, Mapping[str, Recipe]],
        say: Callable[..., None],
    ) -> None:
        self._job, self._say = job, say
        self._store, self._manifest, self._recipes = version
        self._memory = mmap.mmap(memory, job.memory_size) if memory is not None else None
        self._cache = Cache(job.cache_dir, job.cache_size) if job.cache_dir else None
        self._lock = threading.Lock()
        self.read = 0
        self.cached: dict[str, str] = {}  # key -> path
        self._told = time.monotonic()

    def all(self) -> None:
        """Stage the items in the order of their bytes."""
        items = sorted(self._job.items, key=self._position)
        if self._cache is not None:
            sizes = {item.key: self._nbytes(item) for item in items if item.where == "cache"}
            self._cache.make_room(sizes, keep=self._job.keep)
        near = self._store.local(self._job.location) is not None
        with ThreadPoolExecutor(1 if near else _REMOTE_THREADS) as pool:
            futures = [pool.submit(self._one if near else self._looked_at_twice, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _position(self, item: Item) -> tuple[str, int]:
        entry = self._manifest.tensors[self._recipes[item.folded].pieces[0].source]
        return (entry.file, entry.offset)

    def _nbytes(self, item: Item) -> int:
        recipe = self._recipes[item.folded]
        return recipe.nbytes // DTYPES[recipe.dtype].itemsize * DTYPES[item.dtype].itemsize

    def _looked_at_twice(self, item: Item) -> None:
        """A range carries no checksum of its own, so that bytes garbled on the way show in the tensor's digest only."""
        try:
            self._one(item)
        except Damaged:
            self._one(item)

    def _one(self, item: Item) -> None:
        recipe = self._recipes[item.folded]
        stored = recipe.identity and recipe.dtype == item.dtype
        if item.where == "cache" and self._cache is not None:
            self._into_cache(item, self._cache, stored)
        elif stored:
            self._in_place(item, recipe.pieces[0].source)
        else:
            into = self._region(item)
            self._assemble(item, lambda offset, part: _copy(into, offset, part))

    def _region(self, item: Item) -> memoryview:
        if self._memory is None:
            raise RuntimeError(f"no memory was given for {item.folded}")
        return memoryview(self._memory)[item.offset : item.offset + self._nbytes(item)]

    def _in_place(self, item: Item, source: str) -> None:
        """A tensor that is taken as it is: read where it is to lie, or only hashed, through one reused buffer."""
        nbytes = self._nbytes(item)
        into = self._region(item) if item.where == "memory" else None
        reader = self._reader()
        for offset in range(0, nbytes, CHUNK):
            size = min(CHUNK, nbytes - offset)
            part = _buffer()[:size] if into is None else into[offset : offset + size]
            reader.read(source, offset, part)
            self._screen(np.frombuffer(part, DTYPES[item.dtype]), item)
        reader.finish()

    def _into_cache(self, item: Item, cache: Cache, stored: bool) -> None:
        source = self._recipes[item.folded].pieces[0].source
        nbytes = self._nbytes(item)

        resumed = False

        def stream(start: int, put: Put) -> None:
            nonlocal resumed
            resumed = start > 0
            entry = self._manifest.tensors[source]
            for offset in range(start, nbytes, CHUNK):
                part = _buffer()[: min(CHUNK, nbytes - offset)]
                self._store.read_into(join(self._job.location, entry.file), entry.offset + offset, part)
                self._seen(len(part))
                put(part)

        def build(_start: int, put: Put) -> None:
            self._assemble(item, lambda _offset, part: put(part))

        path, found = cache.get(item.key, nbytes, stream if stored else build, resumable=stored)
        if stored and resumed and found != item.key:  # the part that was found may be to blame
            cache.drop(path)
            path, found = cache.get(item.key, nbytes, stream, resumable=True)
        if stored and found != item.key:
            cache.drop(path)
            raise Damaged(_wrong(self._job.location, self._manifest, [source]))
        if self._job.screen and nbytes:
            values = np.memmap(path, DTYPES[item.dtype], "r")
            for start in range(0, len(values), CHUNK):
                self._screen(values[start : start + CHUNK], item)
        self.cached[item.key] = path

    def _assemble(self, item: Item, put: Callable[[int, memoryview], None]) -> None:
        """Read the item's sources once, hash them on the way, and `put` the canonical bytes in order."""
        recipe = as_rows(self._recipes[item.folded])
        reader = self._reader()
        offset = 0
        for block in row_blocks(recipe, CHUNK):
            rows = read_rows(recipe, block, self._manifest.tensors, reader.read, item.dtype)
            self._screen(rows, item)
            part = memoryview(rows.reshape(-1).view(np.uint8))
            put(offset, part)
            offset += len(part)
        reader.finish()

    def _reader(self) -> "_HashingReader":
        return _HashingReader(self._store, self._job.location, self._manifest, self._seen)

    def _screen(self, values: Any, item: Item) -> None:
        if not self._job.screen or item.dtype not in _FLOATS:
            return
        if not np.isfinite(values.astype(np.float32, copy=False)).all():
            raise Unsound(
                f"{item.folded} holds NaN or infinity, which MTX2VLLM_SCREEN=nan refuses: has the training diverged?"
            )

    def _seen(self, nbytes: int) -> None:
        with self._lock:
            self.read += nbytes
            now = time.monotonic()
            due = now - self._told > 0.5
            self._told = now if due else self._told
        if due:
            self._say(read=self.read)


def _copy(memory: memoryview, offset: int, part: memoryview) -> None:
    memory[offset : offset + len(part)] = part


def _buffer() -> memoryview:
    """This thread's chunk."""
    if not hasattr(_local, "chunk"):
        _local.chunk = memoryview(bytearray(CHUNK))
    found: memoryview = _local.chunk
    return found


def _wrong(location: str, manifest: Manifest, names: list[str]) -> str:
    where = join(location, manifest.tensors[names[0]].file)
    return f"{where}: the bytes of {', '.join(names[:4])} have another digest than the manifest says: damaged."


class _HashingReader:
    """Reads source tensors front to back and hashes each byte when it is first read."""

    def __init__(self, store: Store, location: str, manifest: Manifest, seen: Callable[[int], None]) -> None:
        self._store, self._location, self._manifest, self._seen = store, location, manifest, seen
        self._hashed: dict[str, tuple[Any, int]] = {}

    def read(self, source: str, offset: int, out: memoryview) -> None:
        """Fill `out` with a source's bytes from `offset` on."""
        entry = self._manifest.tensors[source]
        hasher, done = self._hashed.get(source, (None, 0))
        hasher = hasher or blake3()
        path = join(self._location, entry.file)
        for start in range(0, len(out), CHUNK):
            part = out[start : start + CHUNK]
            self._store.read_into(path, entry.offset + offset + start, part)
            self._seen(len(part))
            if offset + start == done:
                hasher.update(part)
                done += len(part)
        self._hashed[source] = (hasher, done)

    def finish(self) -> None:
        """Compare every digest.

        Raises:
            Damaged: bytes are not what the manifest says.
        """
        wrong = [name for name, state in self._hashed.items() if not self._sound(name, *state)]
        if wrong:
            raise Damaged(_wrong(self._location, self._manifest, wrong))

    def _sound(self, name: str, hasher: Any, done: int) -> bool:
        entry = self._manifest.tensors[name]
        return done == entry.nbytes and hasher.hexdigest() == entry.blake3
