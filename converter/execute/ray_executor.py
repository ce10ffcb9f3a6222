"""Spread a conversion over a Ray cluster: one process a machine converts units, the driver plans, tracks and publishes.

A unit is a Ray task. It writes its ranges as a guest of the files that the driver has begun (a directory that all
machines see, or gs://), and only its receipt makes them count. A task whose worker dies is run again by Ray, elsewhere
if need be: it writes the same bytes to the same places, or, on gs://, parts of its own beside the dead one's, which
nobody will compose.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from pathlib import Path
from typing import Any

from blake3 import blake3

from mtx2vllm.converter.errors import InputError, Mtx2vllmError
from mtx2vllm.converter.execute.digest import TensorResult
from mtx2vllm.converter.execute.memory import keep_freed_memory
from mtx2vllm.converter.execute.run import carry_out
from mtx2vllm.converter.execute.schedule import RUNS, of_slabs
from mtx2vllm.converter.execute.steps import Progress, Steps
from mtx2vllm.converter.execute.units import Unit, hashing, units
from mtx2vllm.converter.plans import Plan
from mtx2vllm.converter.shards import ShardFile
from mtx2vllm.converter.source import Checkpoint, open_leaf
from mtx2vllm.converter.storage import GuestWriter, RangeWriter, SharedWriter, Ticket, store_for

RETRIES = 4  # of a task whose worker died
AHEAD = 2  # tasks a machine that wait in Ray's queue, so that none is idle while the driver sleeps
BLOCK = 8 << 20  # bytes a read while a digest is taken afterwards

Extents = Sequence[tuple[str, int, int]]
Task = tuple[Callable[..., Any], Any]  # function(work, item)


@dataclass(frozen=True)
class Work:
    """What every task needs, sent to each machine once."""

    plan: Plan
    checkpoint: Checkpoint
    shards: tuple[ShardFile, ...]
    tickets: tuple[Ticket, ...]
    budget: int
    workers: int | None  # threads a machine; None: its cores
    writers: int
    scratch: str | None
    remote_source: bool


@dataclass(frozen=True)
class Done:
    """What a unit hands back."""

    nbytes: int
    results: Mapping[int, TensorResult]
    counts: Mapping[int, tuple[int, int]]  # (NaN, infinite) in its rows of partial tensors
    receipts: Mapping[int, Any]  # by shard


def run(
    plan: Plan,
    shards: Sequence[ShardFile],
    checkpoint: Checkpoint,
    sink: Callable[[ShardFile], SharedWriter],
    *,
    budget: int,
    workers: int | None,
    writers: int,
    scratch: str | None,
    remote_source: bool,
    progress: Progress,
    address: str | None = None,
) -> dict[int, TensorResult]:
    """As `execute.run`, over a cluster. `address` is Ray's; None: the cluster at hand, or a new one on this machine.

    Raises:
        InputError: Ray is not installed or not reachable; as `execute.run`.
        Mtx2vllmError: a task's worker died again and again.
    """
    ray, ours = _connect(address)
    files = [sink(shard) for shard in shards]
    try:
        tickets = tuple(file.ticket() for file in files)
        work = Work(
            plan, _absolute(checkpoint), tuple(shards), tickets, budget, workers, writers, scratch, remote_source
        )
        machines, cores = _machines(ray)
        cluster = _Cluster(ray, ray.put(work), cores, machines * AHEAD)
        results = _Run(cluster, work, files, progress).over(units(plan, machines), machines)
        for shard, file in zip(shards, files, strict=True):
            file.write(0, memoryview(shard.header))
        for file in files:
            file.commit()
        return results
    except BaseException:
        for file in files:
            file.abort()
        raise
    finally:
        if ours:
            ray.shutdown()


# -- in the driver


@dataclass(frozen=True)
class _Cluster:
    """A connected cluster and how it is used."""

    ray: Any
    work: Any  # a reference to the Work
    cores: int  # a task takes, which is a machine's worth
    limit: int  # tasks at a time

    def each(self, tasks: deque[Task]) -> Iterator[Any]:
        """The results of function(work, item), as they come, until `tasks` is empty; it may grow meanwhile. Ray runs a
        task again whose worker died."""
        pending: list[Any] = []
        try:
            while tasks or pending:
                while tasks and len(pending) < self.limit:
                    function, item = tasks.popleft()
                    task = self.ray.remote(function).options(
                        num_cpus=self.cores, max_retries=RETRIES, scheduling_strategy="SPREAD", name=function.__name__
                    )
                    pending.append(task.remote(self.work, item))
                yield self._next(pending)
        finally:
            for reference in pending:
                self.ray.cancel(reference, force=True)

    def _next(self, pending: list[Any]) -> Any:
        [ready], pending[:] = self.ray.wait(pending, num_returns=1)
        try:
            return self.ray.get(ready)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Mtx2vllmError):
                raise error.cause from None
            raise
        except self.ray.exceptions.RayError as error:
            raise Mtx2vllmError(
                f"a worker of the Ray cluster died {RETRIES + 1} times over the same unit ({type(error).__name__}); see Ray's "
                "logs, where too little memory for --memory-budget is the usual cause"
            ) from error


def _connect(address: str | None) -> tuple[Any, bool]:
    """Ray, connected, and whether it is ours to shut down."""
    try:
        import ray
    except ImportError:
        raise InputError("--executor ray needs Ray on this machine: pip install 'mtx2vllm[ray]'") from None
    if ray.is_initialized():
        return ray, False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError as error:
        if address:
            raise InputError(
                f"no Ray cluster answers at {address} ({error}); is it up, and this its address?"
            ) from None
        try:
            ray.init(include_dashboard=False, **quiet)
        except Exception as failure:
            raise Mtx2vllmError(
                f"Ray did not start on this machine ({str(failure)[:200]}); it gives its processes 30 s, which a busy machine "
                "may not manage: start it with `ray start --head`, and try again"
            ) from failure
    return ray, True


def _absolute(checkpoint: Checkpoint) -> Checkpoint:
    """A worker has a working directory of its own."""
    local = store_for(checkpoint.items).local(checkpoint.items)
    return checkpoint if local is None else replace(checkpoint, items=str(Path(local).absolute()))


def _machines(ray: Any) -> tuple[int, int]:
    """How many machines can work, and the cores of the smallest: a task takes so many, so that each has one."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    able = [n for n in cores if n > 0]
    if not able:
        raise InputError("the Ray cluster has no machine with a CPU to spare")
    return len(able), min(able)


class _Run:
    """What the driver knows while the units come back."""

    def __init__(self, cluster: _Cluster, work: Work, files: Sequence[SharedWriter], progress: Progress) -> None:
        self._cluster, self._work, self._files, self._progress = cluster, work, files, progress
        self._places = {n: (f, at) for s, f in zip(work.shards, files, strict=True) for n, at in s.offsets.items()}
        self._results: dict[int, TensorResult] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._missing: dict[int, int] = {}  # units that a partial tensor still waits for

    def over(self, found: Sequence[Unit], machines: int) -> dict[int, TensorResult]:
        """Convert all units, and digest divided tensors as soon as they are whole."""
        for number in (n for unit in found for n in unit.partial):
            self._missing[number] = self._missing.get(number, 0) + 1
        bundles = hashing(self._work.plan, found, machines)
        tasks: deque[Task] = deque((convert_unit, unit) for unit in found)
        for done in self._cluster.each(tasks):
            if isinstance(done, Done):
                self._accept(done)
                whole = [b for b in bundles if not any(self._missing[n] for n in b)]
                bundles = [b for b in bundles if b not in whole]
                tasks.extend((digest_written, {n: self._extents(n) for n in b}) for b in whole)
            else:
                self._results |= {n: TensorResult(digest, *self._counts[n]) for n, digest in done.items()}
        return self._results

    def _accept(self, done: Done) -> None:
        for shard, receipt in done.receipts.items():
            self._files[shard].accept(receipt)
        self._results |= done.results
        for number, (nans, infs) in done.counts.items():
            before = self._counts.get(number, (0, 0))
            self._counts[number] = (before[0] + nans, before[1] + infs)
            self._missing[number] -= 1
        self._progress(done.nbytes)

    def _extents(self, number: int) -> Extents:
        file, at = self._places[number]
        return file.extents(at, self._work.plan.tensors[number].nbytes)


# -- in the workers


def convert_unit(work: Work, unit: Unit) -> Done:
    """Convert one unit."""
    keep_freed_memory()
    guests: dict[int, GuestWriter] = {}
    try:
        places: dict[int, tuple[RangeWriter | GuestWriter, int]] = {}
        for index, (shard, ticket) in enumerate(zip(work.shards, work.tickets, strict=True)):
            mine = unit.tensors & shard.offsets.keys()
            if mine:
                guests[index] = store_for(ticket.path).guest(ticket)
                places |= {number: (guests[index], shard.offsets[number]) for number in mine}
        made = of_slabs(work.plan, unit.slabs, work.budget, runs=1 if work.remote_source else RUNS)
        read = bind(open_leaf, work.checkpoint)
        with Steps(work.plan, read, places, work.scratch, _silent, unit.partial) as steps:
            found = carry_out(made, steps, workers=work.workers or os.cpu_count() or 1, writers=work.writers)
        return Done(unit.nbytes, found.results, found.counts, {i: guest.finish() for i, guest in guests.items()})
    except BaseException:
        for guest in guests.values():
            guest.abort()
        raise


def digest_written(work: Work, tensors: Mapping[int, Extents]) -> dict[int, str]:
    """blake3 (hex) of tensors, from where their bytes lie."""
    del work
    found = {}
    block = memoryview(bytearray(BLOCK))
    for number, extents in tensors.items():
        hasher = blake3()
        for location, start, length in extents:
            store = store_for(location)
            for at in range(0, length, BLOCK):
                part = block[: min(BLOCK, length - at)]
                store.read_into(location, start + at, part)
                hasher.update(part)
        found[number] = hasher.hexdigest()
    return found


def _silent(_: int) -> None:
    """The driver counts units, not ranges."""
