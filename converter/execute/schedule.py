"""How a plan is carried out within a memory budget, decided from sizes alone.

Two rings of memory are all that a run holds: one of decoded chunks, one of finished parts. A slab goes through them in
one of four ways:

    gather   all its parts fit into the second ring: chunk after chunk is scattered into them
    stream   all its chunks fit into the first ring: part after part is filled from them, and leaves
    reread   cut into a few runs of parts, each gathered by itself: its chunks are decoded once a run
    spill    each chunk is rearranged once and its pieces go to a scratch file, from which part after part is put together

Rereading costs time (measured: 11 % for 2 runs, 28 % for 3), spilling writes twice and needs scratch space (3 runs or a
spill: 3.87 s against 4.30 for 3.2 GB of experts, the same for 6.7 GB in 60 dense layers).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.execute.ring import ALIGNMENT, aligned
from mtx2vllm.converter.execute.slabs import Part, Slab, lines, slabs
from mtx2vllm.converter.execute.slabs import part as part_of
from mtx2vllm.converter.plans import Leaf, Plan, Tensor

How = Literal["gather", "stream", "spill"]
CHUNKS = 3  # so many of the largest chunks keep two cores decoding while one is being scattered
DECODING = 5  # so many of them TensorStore holds besides while two cores decode (measured: 5 to 6)
OVER = 88 << 20  # with a small budget decoding takes up to this much beyond it, rather than most of the second ring
RUNS = 2  # up to so many runs of a reread; beyond that spilling is as fast or faster
PROCESS = 64 << 20  # Python, numpy and TensorStore (measured)
JOIN = 1 / 16  # slabs of the same tensors are joined up to this part of the ring


@dataclass(frozen=True, slots=True)
class Stage:
    """A slab, or a run of its parts, and how it is carried out."""

    slab: Slab
    how: How


@dataclass(frozen=True, slots=True)
class Oversize:
    """A slab that does not fit, and what is done about it."""

    leaves: tuple[str, ...]
    how: Literal["reread", "spill"]
    nbytes: int
    reason: str


@dataclass(frozen=True)
class Schedule:
    """Stages in order, and what they need, in bytes."""

    stages: tuple[Stage, ...]
    chunk_ring: int
    part_ring: int
    read: int  # decoded, what is read again included
    written: int
    scratch: int  # at most at a time
    spilled: int  # written to scratch in all
    oversize: tuple[Oversize, ...]
    largest: int  # decoded chunk

    @property
    def rings(self) -> int:
        """Memory for chunks and parts."""
        return self.chunk_ring + self.part_ring

    @property
    def memory(self) -> int:
        """Of the process, about: both rings, what TensorStore holds of the chunks that two cores decode, and Python."""
        at_once = min(2, self.chunk_ring // max(1, self.largest))
        return self.rings + DECODING * at_once // 2 * self.largest + PROCESS


def schedule(plan: Plan, budget: int, *, runs: int = RUNS, join: float = JOIN) -> Schedule:
    """Decide how each slab is carried out.

    Args:
        plan: what to do.
        budget: bytes of memory for chunks and parts.
        runs: the most runs of a reread; 1 where no source byte may be read twice.
        join: up to which part of the ring slabs of the same tensors are joined; 1 for stores that want whole tensors.

    Raises:
        InputError: a chunk, or a row of a tensor, does not fit into the budget; names them and the budget needed.
    """
    _, part_ring = _rings(plan, budget)
    found = (slab for group in plan.groups for slab in slabs(plan, group, int(part_ring * join)))
    return of_slabs(plan, found, budget, runs=runs)


def of_slabs(plan: Plan, found: Iterable[Slab], budget: int, *, runs: int = RUNS) -> Schedule:
    """The schedule of some slabs of a plan. Arguments and errors as `schedule`."""
    rings = _rings(plan, budget)
    stages: list[Stage] = []
    oversize: list[Oversize] = []
    for slab in found:
        more, note = _decide(plan, slab, rings, runs)
        stages += more
        oversize += [note] if note else []
    largest = max((_load_bytes(move.leaf) for move in plan.moves), default=0)
    spills = [s.slab.nbytes for s in stages if s.how == "spill"]
    read = sum(load.nbytes for s in stages for load in s.slab.loads)
    written = sum(s.slab.nbytes for s in stages)
    return Schedule(tuple(stages), *rings, read, written, max(spills, default=0), sum(spills), tuple(oversize), largest)


def needs_of(plan: Plan, budget: int, *, remote_source: bool = False, remote_sink: bool = False) -> Schedule:
    """The schedule of a run, by where its ends lie: nothing crosses a network twice, and objects want whole tensors.

    Raises:
        InputError: as `schedule`.
    """
    return schedule(plan, budget, runs=1 if remote_source else RUNS, join=1.0 if remote_sink else JOIN)


def least(plan: Plan) -> int:
    """The smallest budget that a plan can be carried out with: its largest chunk, and two rows of its tensors."""
    largest, row = _extremes(plan)
    return largest + 2 * row


def _extremes(plan: Plan) -> tuple[int, int]:
    row = aligned(max((_row_bytes(t) for t in plan.tensors), default=0))
    return max(row, aligned(max((_load_bytes(move.leaf) for move in plan.moves), default=0))), row


def _rings(plan: Plan, budget: int) -> tuple[int, int]:
    """Divide the budget between chunks and parts."""
    largest, row = _extremes(plan)
    if largest + 2 * row > budget:
        raise InputError(_too_small(plan, budget, largest + 2 * row))
    chunks = max(largest, min(CHUNKS * largest, budget // 2, budget - 2 * row))
    decoding = min(DECODING * largest, max(budget // 6, budget // 2 - OVER), budget - chunks - 2 * row)
    total = sum(aligned(t.nbytes) for t in plan.tensors)
    return chunks, min(budget - chunks - decoding, 2 * total + ALIGNMENT)


def _too_small(plan: Plan, budget: int, need: int) -> str:
    """What would do, and what needs so much."""
    leaf = max((move.leaf for move in plan.moves), key=_load_bytes)
    tensor = max(plan.tensors, key=_row_bytes)
    return (
        f"pass --memory-budget {need} or more: {budget:,} bytes are too few for this checkpoint, where one stored chunk "
        f"{list(leaf.chunks)} of {leaf.key} decodes to {_load_bytes(leaf):,} bytes and one index of the first dimension of "
        f"{tensor.name} takes {_row_bytes(tensor):,}"
    )


def _load_bytes(leaf: Leaf) -> int:
    longest = (max((high - low for low, high in ranges), default=0) for ranges in lines(leaf))
    return prod(longest) * np.dtype(leaf.dtype).itemsize


def _row_bytes(tensor: Tensor) -> int:
    return tensor.nbytes // max(1, tensor.shape[0]) if tensor.shape else tensor.nbytes


def _decide(plan: Plan, slab: Slab, rings: tuple[int, int], runs: int) -> tuple[list[Stage], Oversize | None]:
    chunk_ring, part_ring = rings
    size = sum(aligned(p.nbytes) for p in slab.parts)
    resident = sum(aligned(load.nbytes) for load in slab.loads) <= chunk_ring
    if size <= part_ring and len(slab.loads) != 1:
        return [Stage(slab, "gather")], None
    if resident:
        return [Stage(replace(slab, parts=_split(plan, slab.parts, part_ring // 2)), "stream")], None
    cut = runs_of(_split(plan, slab.parts, part_ring), part_ring)
    leaves = tuple(sorted({load.leaf.path for load in slab.loads}))
    have = f"{size:,} bytes of results do not fit into {part_ring:,}"
    if len(cut) <= runs:
        note = Oversize(leaves, "reread", size, f"{have}; decoding {len(cut)} times is cheaper than a scratch file")
        return [Stage(replace(slab, parts=run), "gather") for run in cut], note
    parts = _split(plan, slab.parts, min(chunk_ring, part_ring // 2))
    note = Oversize(
        leaves, "spill", size, f"{have}; without a scratch file each chunk would be decoded {len(cut)} times"
    )
    return [Stage(replace(slab, parts=parts), "spill")], note


def _split(plan: Plan, parts: Sequence[Part], limit: int) -> tuple[Part, ...]:
    """Cut parts by rows so that each takes at most `limit` bytes of a ring."""
    found: list[Part] = []
    for p in parts:
        if aligned(p.nbytes) <= limit:
            found.append(p)
            continue
        tensor = plan.tensors[p.tensor]
        count = max(1, limit // ALIGNMENT * ALIGNMENT // _row_bytes(tensor))
        begin, end = p.rows
        found += [part_of(tensor, p.tensor, (at, min(at + count, end))) for at in range(begin, end, count)]
    return tuple(found)


def runs_of(parts: Sequence[Part], limit: int) -> list[tuple[Part, ...]]:
    """Consecutive parts, as few runs as possible, of about the same size."""
    total = sum(aligned(p.nbytes) for p in parts)
    wanted = -(-total // -(-total // limit))
    found: list[list[Part]] = [[]]
    size = 0
    for p in parts:
        if found[-1] and (size >= wanted or size + aligned(p.nbytes) > limit):
            found.append([])
            size = 0
        found[-1].append(p)
        size += aligned(p.nbytes)
    return [tuple(run) for run in found]
