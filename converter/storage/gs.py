"""The store of gs:// objects. Every verb retries what may pass and says in one sentence what will not.

A write carries a token in its metadata: when an answer is lost, the retry meets our own object, and only the token
tells that from another writer's. Ranges cannot be checked by CRC-32C (the store knows that of whole objects): whole
reads are, and ranges of a version are checked against its manifest by whoever asked for them.
"""

import contextlib
import io
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.api_core import exceptions as api

from mtx2vllm.converter.errors import LostRace, StorageError
from mtx2vllm.converter.storage import GS, LEFTOVER, Entry, Stat, Ticket, crc32c, gs_http, gs_read, join, split_gs
from mtx2vllm.converter.storage.gs_http import TIMEOUT, Connection, faults
from mtx2vllm.converter.storage.gs_upload import GsRangeWriter, Uploads
from mtx2vllm.converter.storage.retry import Policy, Transient, Unreachable, retrying

TOKEN = "mtx2vllm-write"  # key in an object's metadata
SIMPLE = 8 << 20  # bytes; Google's client sends larger ones by resumable uploads
_THREADS = 8  # requests at a time, uploads and deletions
_LISTING = "items(name,size,generation,updated),prefixes,nextPageToken"


class GsStore:
    """Objects of Google Cloud Storage, or of the emulator at `emulator`. See `Store` for the verbs."""

    def __init__(self, emulator: str | None = None, policy: Policy | None = None) -> None:
        self._emulator, self._policy = emulator, policy or Policy()
        self._seen: set[str] = set()  # buckets known to exist
        self._reached = False
        self._lock = threading.Lock()
        self._made: Connection | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="mtx2vllm-gs")
        self._uploads = Uploads(self._pool)

    @property
    def _connection(self) -> Connection:
        with self._lock, faults(GS):
            if self._made is None:
                self._made = Connection(self._emulator)
            return self._made

    def _try[T](self, path: str, call: Callable[[], T]) -> T:
        def guarded() -> T:
            try:
                with faults(path, self._connection.anonymous):
                    found = call()
            except Unreachable as fault:
                if self._reached:
                    raise Transient(str(fault)) from fault
                raise
            except Exception:
                self._reached = True  # a refusal or a broken answer is one, too
                raise
            self._reached = True
            return found

        return retrying(guarded, path, self._policy)

    def _blob(self, path: str) -> Any:
        bucket, key = split_gs(path)
        if not key:
            raise StorageError(f"{path} is a bucket, not an object.")
        return self._connection.client.bucket(bucket).blob(key)

    def stat(self, path: str) -> Stat | None:
        """See `Store.stat`."""
        if not split_gs(path)[1]:
            return None
        found = self._found(path)
        return None if found is None else stat_of(found)

    def _found(self, path: str) -> Any:
        blob = self._blob(path)
        try:
            self._try(path, lambda: blob.reload(timeout=TIMEOUT, retry=None))
        except api.NotFound:
            self._require_bucket(path)
            return None
        return blob

    def _require_bucket(self, path: str) -> None:
        """A missing object and a missing bucket look the same; one listing a bucket tells them apart."""
        bucket = split_gs(path)[0]
        if bucket not in self._seen:
            self._list(bucket, "", max_results=1)

    def _list(self, bucket: str, prefix: str, **options: Any) -> tuple[list[Any], list[str]]:
        """Objects whose keys start with `prefix`; with a delimiter, also the prefixes below it."""

        def listing() -> tuple[list[Any], list[str]]:
            found = self._connection.client.list_blobs(
                bucket, prefix=prefix, fields=_LISTING, timeout=TIMEOUT, retry=None, **options
            )
            return list(found), sorted(found.prefixes)

        path = f"{GS}{bucket}/{prefix}"
        try:
            listed = self._try(path, listing)
        except api.NotFound as error:
            raise StorageError(
                f"{path}: the bucket {bucket!r} does not exist, or these credentials may not see it; check its name."
            ) from error
        self._seen.add(bucket)
        return listed

    def listdir(self, path: str) -> list[Entry]:
        """See `Store.listdir`."""
        bucket, prefix = _prefix(path)
        blobs, prefixes = self._list(bucket, prefix, delimiter="/")
        entries = [Entry(name, False, blob.size or 0) for blob in blobs if (name := blob.name[len(prefix) :])]
        entries += [Entry(name, True, 0) for found in prefixes if (name := found[len(prefix) : -1])]
        return sorted(entries, key=lambda entry: (entry.name, entry.is_dir))

    def walk(self, path: str) -> Iterator[str]:
        """See `Store.walk`. Placeholders of empty directories (names that end in '/') are no files."""
        bucket, prefix = _prefix(path)
        blobs, _ = self._list(bucket, prefix)
        yield from (blob.name[len(prefix) :] for blob in blobs if not blob.name.endswith("/"))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See `Store.read`."""
        if length is not None:
            out = bytearray(length)
            self.read_into(path, start, memoryview(out))
            return bytes(out)
        return self._reading(path, lambda: gs_read.whole(self._connection, path, start))

    def read_into(self, path: str, start: int, out: memoryview) -> None:
        """See `Store.read_into`. A transfer that breaks goes on where it broke, unless the object was replaced."""
        if len(out):
            self._reading(path, gs_read.Transfer(self._connection, path, start, out.cast("B")).go_on)
        elif self.stat(path) is None:
            raise FileNotFoundError(path)

    def _reading[T](self, path: str, call: Callable[[], T]) -> T:
        try:
            return self._try(path, call)
        except api.NotFound:
            self._require_bucket(path)
            raise FileNotFoundError(path) from None

    def create(self, path: str, data: bytes) -> Stat:
        """See `Store.create`."""
        return self.put(path, data, 0)

    def replace(self, path: str, data: bytes, generation: int | None = None) -> Stat:
        """See `Store.replace`."""
        return self.put(path, data, generation)

    def put(self, path: str, data: bytes, generation: int | None) -> Stat:
        """Write an object: by one request up to 8 MiB, beyond that by a resumable upload."""
        expected = gs_http.checksum(data)
        if len(data) > SIMPLE:
            self._require(path, generation)

        def upload(blob: Any, over: int | None) -> None:
            blob.upload_from_file(
                io.BytesIO(data),
                size=len(data),
                content_type="application/json" if path.endswith(".json") else "application/octet-stream",
                if_generation_match=over,
                checksum="crc32c",
                timeout=TIMEOUT,
                retry=None,
            )

        return self._written(path, upload, expected, generation)

    def compose(self, path: str, parts: list[str], expected: int, generation: int | None) -> Stat:
        """Make one object of at most 32 others of the same bucket, whose CRC-32C together is `expected`.

        Raises:
            LostRace: `generation` does not match, or a part is gone.
        """
        self._require(path, generation)
        sources = [self._blob(part) for part in parts]

        def join(blob: Any, over: int | None) -> None:
            try:
                blob.compose(sources, if_generation_match=over, timeout=TIMEOUT, retry=None)
            except api.InternalServerError:
                # The emulator says so where the store itself answers 404.
                if any(self.stat(part) is None for part in parts):
                    raise api.NotFound("a part is gone") from None
                raise

        return self._written(path, join, expected, generation)

    def _require(self, path: str, generation: int | None) -> None:
        """Look before writing as well: the emulator ignores preconditions of all but simple uploads."""
        if generation is not None and (found := self.stat(path)) and found.generation != generation:
            raise lost(path)

    def _written(
        self, path: str, write: Callable[[Any, int | None], None], expected: int, generation: int | None
    ) -> Stat:
        token, over = secrets.token_hex(8), generation

        def attempt() -> Stat:
            nonlocal over
            blob = self._blob(path)
            blob.metadata = {TOKEN: token}
            try:
                write(blob, over)
            except api.PreconditionFailed:
                blob = self._found(path)
                if blob is None or (blob.metadata or {}).get(TOKEN) != token:
                    raise lost(path) from None
            if blob.crc32c is not None and crc32c.decoded(blob.crc32c) != expected:
                over = None if generation is None else int(blob.generation)
                raise Transient("the store holds other bytes than were sent (by their crc32c)")
            return stat_of(blob)

        try:
            return self._try(path, attempt)
        except api.NotFound:
            self._require_bucket(path)
            raise LostRace(f"{path}: its parts are gone; another run into the same directory has cleaned up.") from None

    def delete(self, path: str, generation: int | None = None) -> None:
        """See `Store.delete`."""
        blob = self._blob(path)
        self._require(path, generation)
        try:
            self._try(path, lambda: blob.delete(if_generation_match=generation, timeout=TIMEOUT, retry=None))
        except api.NotFound:
            self._require_bucket(path)
        except api.PreconditionFailed:
            raise lost(path) from None

    def delete_all(self, path: str) -> int:
        """See `Store.delete_all`."""
        bucket, prefix = _prefix(path)
        blobs, _ = self._list(bucket, prefix)
        return self._delete_many(blobs)

    def clean_leftovers(self, path: str, folders: Sequence[str] = ("",)) -> int:
        """See `Store.clean_leftovers`."""
        bucket, prefix = _prefix(path)
        found = [self._list(bucket, f"{prefix}{folder}{'/' if folder else ''}{LEFTOVER}")[0] for folder in folders]
        return self._delete_many([blob for blobs in found for blob in blobs])

    def _delete_many(self, blobs: list[Any]) -> int:
        def delete(blob: Any) -> None:
            with contextlib.suppress(api.NotFound):
                path = f"{GS}{blob.bucket.name}/{blob.name}"
                self._try(path, lambda: blob.delete(timeout=TIMEOUT, retry=None))

        return len(list(self._pool.map(delete, blobs)))

    def writer(self, path: str, size: int) -> GsRangeWriter:
        """See `Store.writer`. Parts go up while they are written; they are composed at the end."""
        return GsRangeWriter(self, self._uploads, path, size, before=self.generation(path))

    def generation(self, path: str) -> int:
        """The generation of an object, 0 where there is none, as preconditions want it."""
        found = self.stat(path)
        return 0 if found is None else found.generation

    def guest(self, ticket: Ticket) -> GsRangeWriter:
        """See `Store.guest`."""
        directory = join(ticket.hidden, secrets.token_hex(8))
        return GsRangeWriter(self, self._uploads, ticket.path, ticket.size, directory)

    def kvstore(self, path: str) -> dict[str, Any]:
        """See `Store.kvstore`."""
        gs_http.point_tensorstore_at(self._emulator)
        bucket, prefix = _prefix(path)
        return {"driver": "gcs", "bucket": bucket, "path": prefix}

    def local(self, path: str) -> str | None:  # noqa: ARG002
        """See `Store.local`."""
        return None


def stat_of(blob: Any) -> Stat:
    """What the store says of an object."""
    return Stat(blob.size or 0, int(blob.generation), blob.updated.timestamp() if blob.updated else 0.0)


def lost(path: str) -> LostRace:
    """The refusal of a precondition."""
    return LostRace(f"{path} exists already or was changed meanwhile: another writer was first; ours was not written.")


def _prefix(path: str) -> tuple[str, str]:
    bucket, key = split_gs(path)
    return bucket, f"{key}/" if key else ""
