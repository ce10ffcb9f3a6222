"""Put a version into its directory so that nobody ever sees half of it: claim, shards, side files, manifest, release."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtx2vllm.converter import base as bases
from mtx2vllm.converter.errors import InputError, LostRace
from mtx2vllm.converter.execute.run import Progress, TensorResult, run
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.job import Job
from mtx2vllm.converter.shards import ShardFile
from mtx2vllm.converter.source import open_leaf
from mtx2vllm.converter.storage import SharedWriter, Stat, Ticket, basename, join, parent, store_for
from mtx2vllm.converter.version import claim as claims
from mtx2vllm.converter.version.record import Previous, file_names, manifest_of, side_files
from mtx2vllm.schemas import manifest as manifests
from mtx2vllm.schemas.manifest import Manifest

REMOTE_WRITERS = 4  # uploads at a time: each waits for the network


class Publisher:
    """A version directory while it is written. Leaving with an exception removes what was written, and what stood there
    before stays: an old version goes when all of the new one's bytes are on the disk, not earlier."""

    def __init__(self, out: str, *, overwrite: bool) -> None:
        self.out, self.overwrite = out, overwrite
        self.store = store_for(out)
        self._claim = claims.Claim(out)
        self._copied: dict[int, TensorResult] = {}
        # Generation of a manifest that will be replaced, and what it says.
        self._old: tuple[int, Manifest] | None = None
        self._shards: list[_Deferred] = []

    def check(self) -> None:
        """Refuse what entering would refuse, and touch nothing.

        Raises:
            InputError: a finished version, foreign files, a file where a directory is meant.
            LostRace: a live writer's claim.
        """
        if not self.overwrite:
            self._refuse_committed()
        self._look(claims.refuse_taken(self.store, self.out, time.time()))

    def __enter__(self) -> "Publisher":
        if not self.overwrite:
            self._refuse_committed()
        self._claim.__enter__()
        try:
            self._look()
        except BaseException as error:
            self._claim.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for shard in self._shards:
            shard.abort()
        self._claim.__exit__(kind, error, trace)

    def run(self, job: Job, progress: Callable[[int, int], None] | None) -> dict[int, TensorResult]:
        """Write the shards' bytes."""
        self._claim.announce(file_names(job))
        total, done = sum(s.size for s in (*job.shards, *job.copy_shards)), 0

        def count(n: int) -> None:
            nonlocal done
            done += n
            if progress:
                progress(done, total)

        def sink(shard: ShardFile) -> _Deferred:
            self._shards.append(_Deferred(self.store.writer(join(self.out, shard.name), shard.size)))
            return self._shards[-1]

        results = (
            self._over_cluster(job, sink, count) if job.options.executor == "ray" else self._here(job, sink, count)
        )
        self._copied = bases.copy(job.copies, job.copy_shards, sink, count)
        return results

    def _here(self, job: Job, sink: "Sink", count: Progress) -> dict[int, TensorResult]:
        local = self.store.local(self.out) is not None
        return run(
            job.plan,
            job.shards,
            lambda leaf: open_leaf(job.checkpoint, leaf),
            sink,
            made=job.schedule(self.out),
            workers=job.options.workers or os.cpu_count() or 1,
            writers=1 if local else REMOTE_WRITERS,
            scratch=self.out if local else None,
            progress=count,
        )

    def _over_cluster(self, job: Job, sink: "Sink", count: Progress) -> dict[int, TensorResult]:
        from mtx2vllm.converter.execute import ray_executor

        local = self.store.local(self.out) is not None
        job.schedule(self.out)  # refuses a budget that is too small before any machine works
        return ray_executor.run(
            job.plan,
            job.shards,
            job.checkpoint,
            sink,
            budget=job.options.memory_budget,
            workers=job.options.workers,
            writers=1 if local else REMOTE_WRITERS,
            scratch=str(Path(self.out).absolute()) if local else None,
            remote_source=store_for(job.checkpoint.items).local(job.checkpoint.items) is None,
            progress=count,
            address=job.options.ray_address,
        )

    def publish(
        self, job: Job, checkpoint: str, results: Mapping[int, TensorResult], previous: Previous | None = None
    ) -> Manifest:
        """Let an old version go, then put shards, side files and manifest in its place. Tensors equal to those of
        `previous` are counted.

        Raises:
            LostRace: another writer has published meanwhile.
        """
        side = side_files(job)
        made = manifest_of(job, checkpoint, (results, self._copied), side, previous)
        said = made.dumps()
        self._claim.require()
        self._let_go(job)
        for shard in self._shards:
            shard.writer.commit()
        for name, data in side.items():
            self.store.replace(join(self.out, name), data)
        self._claim.require()
        try:
            self.store.create(join(self.out, manifests.NAME), said)
        except LostRace:
            raise LostRace(
                f"{self.out} was published by another writer meanwhile ({_who(self.out)}); nothing was changed"
            ) from None
        return made

    def _refuse_committed(self) -> None:
        if self.store.stat(join(self.out, manifests.NAME)):
            raise InputError(
                f"{self.out} is a finished version already ({_who(self.out)}); pass --overwrite to replace it"
            )

    def _look(self, rest: Sequence[str] = ()) -> None:
        """What is there: nothing (or the `rest` of a killed run), an old version of ours, or foreign files, which stop
        us."""
        path = join(self.out, manifests.NAME)
        stat = self.store.stat(path)
        if stat is None:
            claims.refuse_foreign(self.store, self.out, rest)
            return
        if not self.overwrite:
            self._refuse_committed()
        self._refuse_served()
        try:
            old = Manifest.parse(self.store.read(path))
        except ValueError as error:
            raise InputError(
                f"{self.out} cannot be overwritten, since nobody can tell which files are its: {error}. Remove the directory, "
                "or give another OUT"
            ) from None
        if old.source.kind == "hf":
            raise InputError(
                f"{self.out} is an adopted Hugging Face directory, whose files mtx2vllm did not write; give another OUT"
            )
        claims.refuse_foreign(self.store, self.out, {manifests.NAME, *old.files})
        self._old = stat.generation, old

    def _let_go(self, job: Job) -> None:
        """Delete the version that is overwritten, its manifest first."""
        if self._old is None:
            return
        self._refuse_served()
        generation, old = self._old
        self._claim.announce(sorted({*file_names(job), *old.files}))
        self.store.delete(join(self.out, manifests.NAME), generation)
        claims.delete(self.store, self.out, old.files)

    def _refuse_served(self) -> None:
        step = roots.step_of(basename(self.out))
        if step is None:
            return
        holders = [
            s.lease.replica
            for s in roots.read_agents(parent(self.out), time.time())
            if s.alive and s.lease.loaded == step
        ]
        if holders:
            raise InputError(
                f"{self.out} is being served by {', '.join(holders[:3])}; a version in use is not overwritten. Publish under "
                "another step, or stop them"
            )


@dataclass(frozen=True)
class _Deferred:
    """A shard that gets its name when the whole version does: `commit` says only that its bytes are all written."""

    writer: SharedWriter

    def write(self, offset: int, data: memoryview) -> None:
        """See `RangeWriter.write`."""
        self.writer.write(offset, data)

    def commit(self) -> Stat:
        """See above; the size is all that is known yet."""
        return Stat(0, 0, 0.0)

    def abort(self) -> None:
        """See `RangeWriter.abort`."""
        self.writer.abort()

    def ticket(self) -> Ticket:
        """See `SharedWriter.ticket`."""
        return self.writer.ticket()

    def accept(self, receipt: Any) -> None:
        """See `SharedWriter.accept`."""
        self.writer.accept(receipt)

    def extents(self, offset: int, length: int) -> list[tuple[str, int, int]]:
        """See `SharedWriter.extents`."""
        return self.writer.extents(offset, length)


Sink = Callable[[ShardFile], _Deferred]


def _who(out: str) -> str:
    try:
        found = Manifest.parse(store_for(out).read(join(out, manifests.NAME)))
    except (ValueError, FileNotFoundError, EOFError):
        return "its manifest cannot be read"
    return f"{found.layout} of {found.source.uri}, written {found.created}"
