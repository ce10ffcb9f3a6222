"""Divide a plan among machines: units of work that share no chunk, and how evenly they can be spread.

A group whose tensors come from the same chunks stays together while it is small. A large one is cut between its slabs.
Where that puts rows of one tensor on several machines (a fused w13 by experts), nobody sees all of its bytes in order,
so its digest is taken afterwards from what was written: `Unit.partial` names such tensors.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from mtx2vllm.converter.plan import Plan
from mtx2vllm.converter.schedule import RUNS, runs_of
from mtx2vllm.converter.slabs import Slab, slabs

SHARE = 8  # units a machine: the last one to end then costs an eighth of a machine's time at most
SMALLEST = 64 << 20  # bytes; below that starting a task costs more than it spreads
HASHING = 0.25  # what taking a digest of a written byte costs, against converting it


@dataclass(frozen=True, slots=True)
class Unit:
    """Slabs that one machine converts. `partial`: tensors of which other units have rows too."""

    slabs: tuple[Slab, ...]
    nbytes: int
    partial: frozenset[int]

    @property
    def tensors(self) -> frozenset[int]:
        """All tensors it writes into."""
        return frozenset(p.tensor for slab in self.slabs for p in slab.parts)


def units(plan: Plan, machines: int) -> list[Unit]:
    """The units of a plan for so many machines, largest first."""
    limit = max(SMALLEST, plan.nbytes // (machines * SHARE))
    found = [piece for pieces in _families(plan) for piece in _pieces(pieces, limit, plan.nbytes // machines)]
    packed = list(_packed(found, limit))
    owners: dict[int, int] = {}
    for unit in packed:
        for number in {p.tensor for slab in unit for p in slab.parts}:
            owners[number] = owners.get(number, 0) + 1
    made = [
        Unit(
            tuple(unit),
            sum(slab.nbytes for slab in unit),
            frozenset(p.tensor for slab in unit for p in slab.parts if owners[p.tensor] > 1),
        )
        for unit in packed
    ]
    return sorted(made, key=lambda unit: -unit.nbytes)


def _families(plan: Plan) -> Iterator[list[Slab]]:
    """Slabs that write into the same tensors, as lists in order of rows."""
    for group in plan.groups:
        family: list[Slab] = []
        for slab in slabs(plan, group):
            if family and not {p.tensor for p in family[-1].parts} & {p.tensor for p in slab.parts}:
                yield family
                family = []
            family.append(slab)
        if family:
            yield family


def _pieces(family: list[Slab], limit: int, share: int) -> Iterator[list[Slab]]:
    """A family whole, or its slabs apart where they are too many bytes; a giant one in runs of its tensors."""
    if sum(slab.nbytes for slab in family) <= limit:
        yield family
        return
    for slab in family:
        runs = min(RUNS, ceil(slab.nbytes / max(1, share)))
        if runs == 1:
            yield [slab]
        else:  # its chunks are read once a run: better than all machines waiting for one
            for parts in runs_of(slab.parts, ceil(slab.nbytes / runs)):
                yield [replace(slab, parts=parts)]


def _packed(pieces: Iterable[list[Slab]], limit: int) -> Iterator[list[Slab]]:
    """Small pieces together; neighbours stay neighbours, so that fewer tensors are partial."""
    pending: list[Slab] = []
    for piece in pieces:
        if pending and sum(s.nbytes for s in (*pending, *piece)) > limit:
            yield pending
            pending = []
        pending = [*pending, *piece]
    if pending:
        yield pending


def hashing(plan: Plan, found: Sequence[Unit], machines: int) -> list[tuple[int, ...]]:
    """Tensors that need a digest afterwards, in bundles of about the same size, largest first."""
    numbers = sorted(frozenset[int]().union(*(unit.partial for unit in found)), key=lambda n: -plan.tensors[n].nbytes)
    limit = max(SMALLEST, sum(plan.tensors[n].nbytes for n in numbers) // (machines * SHARE))
    bundles: list[list[int]] = []
    room = 0
    for number in numbers:
        if room < plan.tensors[number].nbytes:
            bundles.append([])
            room = limit
        bundles[-1].append(number)
        room -= plan.tensors[number].nbytes
    return [tuple(bundle) for bundle in bundles]


def makespan(costs: Iterable[float], machines: int) -> float:
    """When the last machine is done, if each takes the largest unit that is left."""
    ends = [0.0] * machines
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def imbalance(plan: Plan, machines: int) -> float:
    """By which part a run on so many machines takes longer than if its work could be divided at will."""
    found = units(plan, machines)
    convert = [float(unit.nbytes) for unit in found]
    digest = [HASHING * sum(plan.tensors[n].nbytes for n in bundle) for bundle in hashing(plan, found, machines)]
    ideal = (plan.nbytes + sum(digest)) / machines
    return (makespan(convert, machines) + makespan(digest, machines)) / ideal - 1 if ideal else 0.0
