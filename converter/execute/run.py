"""Carry out a plan on this machine: decode every stored chunk, put its values where they belong, write, digest.

`run` is the whole product between the plan and the published files. What is done in which order was decided by
`schedule`; `steps` says what is done with a slab, and `pipeline` how bytes and threads meet.
"""

from collections.abc import Callable, Sequence

from mtx2vllm.converter.execute.digest import Digests, TensorResult
from mtx2vllm.converter.execute.pipeline import Pipeline
from mtx2vllm.converter.execute.schedule import Schedule, schedule
from mtx2vllm.converter.execute.steps import Open, Places, Progress, Steps
from mtx2vllm.converter.plans import Plan
from mtx2vllm.converter.shards import ShardFile
from mtx2vllm.converter.storage import RangeWriter

Sink = Callable[[ShardFile], RangeWriter]

DEFAULT_BUDGET = 1 << 30


def run(
    plan: Plan,
    shards: Sequence[ShardFile],
    read: Open,
    sink: Sink,
    *,
    budget: int = DEFAULT_BUDGET,
    workers: int = 2,
    writers: int = 1,
    scratch: str | None = None,
    progress: Progress = lambda _: None,
    made: Schedule | None = None,
) -> dict[int, TensorResult]:
    """Convert everything into `shards`, headers included, and commit them. Nothing visible remains on failure.

    Args:
        plan: what to do; its tensors are those of `shards`.
        shards: the files, laid out.
        read: opens a leaf.
        sink: begins a file.
        budget: bytes of memory for chunks and results together.
        workers: threads that rearrange.
        writers: threads that write; more than one pays where a write waits for a network.
        scratch: where a spill file may lie; None: the system's directory for temporary files.
        progress: is told of every written range.
        made: the schedule, where it is known already.

    Raises:
        InputError: a chunk cannot be read, or does not fit into the budget.
    """
    made = made or schedule(plan, budget)
    files = [(shard, sink(shard)) for shard in shards]
    try:
        with Steps(plan, read, _places(files), scratch, progress) as steps:
            found = carry_out(made, steps, workers=workers, writers=writers)
        for _, file in files:
            file.commit()
    except BaseException:
        for _, file in files:
            file.abort()
        raise
    return found.results


def carry_out(made: Schedule, steps: Steps, *, workers: int, writers: int) -> Digests:
    """Do the stages of a schedule; what was found in the tensors."""
    with Pipeline(made.chunk_ring, made.part_ring, max(1, workers), max(1, writers)) as pipeline:
        for stage in made.stages:
            steps.start(stage, pipeline)
    return steps.digests


def _places(files: Sequence[tuple[ShardFile, RangeWriter]]) -> Places:
    """Write the headers; where each tensor begins."""
    places: dict[int, tuple[RangeWriter, int]] = {}
    for shard, file in files:
        file.write(0, memoryview(shard.header))
        places |= {number: (file, offset) for number, offset in shard.offsets.items()}
    return places


__all__ = ["DEFAULT_BUDGET", "Open", "Progress", "Sink", "TensorResult", "run"]
