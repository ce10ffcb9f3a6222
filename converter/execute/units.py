"""Divide a plan among machines: units of work that share no chunk, and how evenly they can be spread.

A group whose tensors come from the same chunks stays together while it is small. A large one is cut between its slabs.
Where that puts rows of one tensor on several machines (a fused w13 by experts), nobody sees all of its bytes in order,
so its digest is taken afterwards from what was written: `Unit.partial` names such tensors.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from mtx2vllm.converter.execute.schedule import runs_of
from mtx2vllm.converter.execute.slabs import Slab, slabs
from mtx2vllm.converter.plans import Group, Plan

SHARE = 16  # units a machine: the last one to end then costs a sixteenth of a machine's time at most
ENOUGH = 4  # so many pieces a machine spread evenly enough
CUTS = 3  # a slab goes to so many machines at most: each of them decodes all of its chunks
SMALLEST = 64 << 20  # bytes; below that starting a task costs more than it spreads
HASHING = 0.25  # what taking a digest of a written byte costs, against converting it


@dataclass(frozen=True, slots=True)
class Unit:
    """Slabs that one machine converts. `partial`: tensors of which other units have rows too."""

    slabs: tuple[Slab, ...]
    nbytes: int
    partial: frozenset[int]

    @property
    def cost(self) -> float:
        """In converted bytes: reading and writing are about half of the work each."""
        return (self.nbytes + sum(load.nbytes for slab in self.slabs for load in slab.loads)) / 2

    @property
    def tensors(self) -> frozenset[int]:
        """All tensors it writes into."""
        return frozenset(p.tensor for slab in self.slabs for p in slab.parts)


def units(plan: Plan, machines: int) -> list[Unit]:
    """The units of a plan for so many machines, largest first."""
    limit = max(SMALLEST, plan.nbytes // (machines * SHARE))
    found = [piece for group in plan.groups for piece in _pieces(_families(plan, group), limit, machines)]
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
    return sorted(made, key=lambda unit: -unit.cost)


def _families(plan: Plan, group: Group) -> list[list[Slab]]:
    """Slabs that write into the same tensors, as lists in order of rows."""
    found: list[list[Slab]] = []
    for slab in slabs(plan, group):
        mine = {p.tensor for p in slab.parts}
        if found and not mine.isdisjoint(p.tensor for p in found[-1][-1].parts):
            found[-1].append(slab)
        else:
            found.append([slab])
    return found


def _pieces(families: list[list[Slab]], limit: int, machines: int) -> Iterator[list[Slab]]:
    """The families of a group whole, where there are enough of them or they are small; otherwise their slabs apart. A few
    large slabs are cut into runs of their tensors: that reads their chunks once a run, better than all waiting for one."""
    if len(families) >= ENOUGH * machines or sum(slab.nbytes for family in families for slab in family) <= limit:
        yield from families
        return
    found = [slab for family in families for slab in family]
    for slab in found:
        runs = min(CUTS, ceil(slab.nbytes / limit)) if len(found) < machines else 1
        cut = runs_of(slab.parts, ceil(slab.nbytes / runs)) if runs > 1 else [slab.parts]
        for parts in cut:
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


def makespan(plan: Plan, found: Sequence[Unit], bundles: Sequence[Sequence[int]], machines: int) -> float:
    """When the last machine is done, in converted bytes: each takes the next unit, then bundles that can be digested."""
    ends = [0.0] * machines
    complete: dict[int, float] = {}
    for unit in found:
        end = heapq.heappop(ends) + unit.cost
        heapq.heappush(ends, end)
        complete |= {number: max(end, complete.get(number, 0.0)) for number in unit.partial}
    ready = sorted(
        (max(complete[n] for n in bundle), sum(plan.tensors[n].nbytes for n in bundle)) for bundle in bundles
    )
    for begin, nbytes in ready:
        heapq.heappush(ends, max(begin, heapq.heappop(ends)) + HASHING * nbytes)
    return max(ends)


def imbalance(plan: Plan, machines: int) -> float:
    """By which part a run on so many machines takes longer than if its work could be divided at will."""
    found = units(plan, machines)
    bundles = hashing(plan, found, machines)
    digested = sum(plan.tensors[n].nbytes for bundle in bundles for n in bundle)
    ideal = (plan.nbytes + HASHING * digested) / machines
    return makespan(plan, found, bundles, machines) / ideal - 1 if ideal else 0.0
