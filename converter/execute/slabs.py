"""Cut a group of moves into slabs: the smallest parts that a disjoint set of chunks completes, in byte order.

Two things are looked at. Which tensors does a chunk reach (an expert axis that is split among chunks divides the
tensors into classes)? And which rows of them, a row being an index of a tensor's first dimension (q, k and v fill
ranges one after another; gate and up of w13 share experts)? Ranges are bounded from outside, so a slab may be larger
than it had to be, never too small.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.execute.chunks import Box, Range, flat, meet, span
from mtx2vllm.converter.execute.sets import Sets, ordered
from mtx2vllm.converter.plans import Group, Leaf, Move, Plan, Tensor

SMALL = 4 << 20  # a leaf up to this size is read whole: a chunk of a norm is a few KB, and asking costs 0.1 ms


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one target tensor: a contiguous range of its bytes. A scalar has one row."""

    tensor: int
    rows: Range
    start: int  # in the tensor's bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """A box of a leaf that is decoded at once: a stored chunk, or all of a small leaf."""

    leaf: Leaf
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decoded values."""
        return tuple(high - low for low, high in self.box)

    @property
    def nbytes(self) -> int:
        """Of the decoded values."""
        return prod(self.shape) * np.dtype(self.leaf.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Slab:
    """Parts and all the loads that fill them. `moves` are numbers in the plan."""

    moves: tuple[int, ...]
    parts: tuple[Part, ...]
    loads: tuple[Load, ...]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(p.nbytes for p in self.parts)


def part(tensor: Tensor, number: int, rows: Range) -> Part:
    """The bytes of some rows."""
    nbytes = tensor.nbytes
    row = nbytes // tensor.shape[0] if tensor.shape and tensor.shape[0] else nbytes
    return Part(number, rows, rows[0] * row, (rows[1] - rows[0]) * row)


def lines(leaf: Leaf) -> list[list[Range]]:
    """The ranges into which loads cut each dimension of a leaf."""
    chunks = leaf.shape if leaf.nbytes <= SMALL else leaf.chunks
    return [[(at, min(at + c, n)) for at in range(0, n, c or 1)] for n, c in zip(leaf.shape, chunks, strict=True)]


def slabs(plan: Plan, group: Group, merge_below: int = 0) -> Iterator[Slab]:
    """The slabs of a group, so that each tensor's bytes come in ascending order.

    Slabs of the same tensors that follow one another are joined while they hold at most `merge_below` bytes.
    """
    table = _Table(plan, group)
    for members in table.classes():
        pending: list[Slab] = []
        for slab in table.cut(members):
            if pending and sum(s.nbytes for s in pending) + slab.nbytes > merge_below:
                yield _joined(plan, pending)
                pending = []
            pending.append(slab)
        if pending:
            yield _joined(plan, pending)


def _joined(plan: Plan, found: Sequence[Slab]) -> Slab:
    if len(found) == 1:
        return found[0]
    rows: dict[int, Range] = {}
    for p in (p for slab in found for p in slab.parts):
        before = rows.get(p.tensor, p.rows)
        rows[p.tensor] = (min(before[0], p.rows[0]), max(before[1], p.rows[1]))
    parts = tuple(part(plan.tensors[n], n, r) for n, r in sorted(rows.items()))
    return Slab(found[0].moves, parts, tuple(load for slab in found for load in slab.loads))


Reach = Mapping[str, Range]  # the values of elementary axes that a line of the grid can meet, within the window


class _Table:
    """What is known of one group while it is cut."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group = plan, group
        self.tensors = np.asarray(group.tensors, np.int64)
        self.leaves: dict[str, list[int]] = {}
        for number in group.moves:
            self.leaves.setdefault(plan.moves[number].leaf.key, []).append(number)
        self.lines = {key: lines(plan.moves[numbers[0]].leaf) for key, numbers in self.leaves.items()}
        self.reach = {number: self._reach(plan.moves[number]) for number in group.moves}
        self.index_dims = {key: self._dims(numbers, rows=False) for key, numbers in self.leaves.items()}
        self.row_dims = {key: self._dims(numbers, rows=True) for key, numbers in self.leaves.items()}
        moved = {number: np.unique(plan.moves[number].tensors) for number in group.moves}
        self.writes = {number: np.isin(self.tensors, chosen) for number, chosen in moved.items()}
        shapes = [plan.tensors[n].shape for n in group.tensors]
        self.kind: NDArray[np.int64] = np.array([s[0] if s else 1 for s in shapes], np.int64)
        for writes in self.writes.values():
            self.kind = np.unique(self.kind * 2 + writes, return_inverse=True)[1]
        self.label: NDArray[np.int64] = np.arange(len(self.tensors))
        self.reached: dict[tuple[str, tuple[int, ...]], int] = {}  # a tensor, by leaf and place on index_dims

    def _reach(self, move: Move) -> list[list[Reach | None]]:
        found: list[list[Reach | None]] = []
        for axes, ranges in zip(move.source, self.lines[move.leaf.key], strict=True):
            sizes = [move.sizes[a] for a in axes]
            row: list[Reach | None] = []
            for r in ranges:
                box = dict(zip(axes, span(*r, sizes), strict=True))
                cut = {a: meet(v, move.window.get(a, v)) for a, v in box.items()}
                empty = any(low >= high for low, high in cut.values())
                shift = {a: move.window[a][0] if a in move.window else 0 for a in axes}
                row.append(None if empty else {a: (v[0] - shift[a], v[1] - shift[a]) for a, v in cut.items()})
            found.append(row)
        return found

    def _dims(self, numbers: Sequence[int], rows: bool) -> tuple[int, ...]:
        found: set[int] = set()
        for move in (self.plan.moves[n] for n in numbers):
            wanted = set(move.target[0] if rows and move.target else () if rows else move.index)
            found |= {d for d, axes in enumerate(move.source) if wanted & set(axes)}
        return tuple(sorted(found))

    def _places(self, key: str, dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
        return product(*(range(len(self.lines[key][d])) for d in dims))

    def _at(self, number: int, dims: Sequence[int], place: Sequence[int]) -> dict[str, Range] | None:
        """The reach of a move at a place of the grid; None outside the window."""
        found: dict[str, Range] = {}
        for d, i in zip(dims, place, strict=True):
            reach = self.reach[number][d][i]
            if reach is None:
                return None
            found |= reach
        return found

    def classes(self) -> list[NDArray[np.int64]]:
        """Tensors (numbers in the plan) that share chunks, in the order of their first."""
        for key, numbers in self.leaves.items():
            dims = self.index_dims[key]
            for place in self._places(key, dims):
                ids = np.unique(np.concatenate([self._reached(n, dims, place) for n in numbers]))
                if len(ids):
                    roots = np.unique(self.label[ids])
                    if len(roots) > 1:
                        self.label[np.isin(self.label, roots)] = roots[0]
                    self.reached[key, place] = int(ids[0])
        return [np.flatnonzero(self.label == root) for root in np.unique(self.label)]

    def _reached(self, number: int, dims: Sequence[int], place: Sequence[int]) -> NDArray[np.int64]:
        move, reach = self.plan.moves[number], self._at(number, dims, place)
        if reach is None:
            return np.empty(0, np.int64)
        chosen = np.asarray(move.tensors[tuple(slice(*reach[a]) for a in move.index)])
        return np.searchsorted(self.tensors, chosen[chosen >= 0]).astype(np.int64)

    def cut(self, members: NDArray[np.int64]) -> list[Slab]:
        """The slabs of one class."""
        kinds = self._kinds(members)
        rows = {key: self._rows(key, kinds) for key in self.leaves}
        bounds = [self._bounds(ids, moves, rows) for ids, moves in kinds]
        first = np.cumsum([0, *(len(b) - 1 for b in bounds)]).tolist()
        sets = Sets(first[-1])
        touched: dict[tuple[str, tuple[int, ...]], int] = {}
        for key, found in rows.items():
            for place, by_move in found.items():
                nodes = [
                    first[k] + i
                    for k, (_, moves) in enumerate(kinds)
                    for number, (low, high) in by_move.items()
                    if number in moves
                    for i in range(bisect_left(bounds[k], low), bisect_left(bounds[k], high))
                ]
                if nodes:
                    sets.join(nodes)
                    touched[key, place] = nodes[0]
        self._adopt_gaps(sets, touched, first)
        order = ordered(sets, first)
        rank = {root: i for i, roots in enumerate(order) for root in roots}
        return self._assemble(kinds, bounds, first, sets, touched, rank, len(order), int(self.label[members[0]]))

    def _kinds(self, members: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], frozenset[int]]]:
        """Tensors of a class by the moves that write them and the length of their first dimension."""
        found = []
        for value in np.unique(self.kind[members]):
            ids = members[self.kind[members] == value]
            found.append((ids, frozenset(n for n in self.group.moves if self.writes[n][ids[0]])))
        return found

    def _rows(
        self, key: str, kinds: Sequence[tuple[object, frozenset[int]]]
    ) -> dict[tuple[int, ...], dict[int, Range]]:
        """The rows that each move of a leaf reaches from each place on the dimensions that decide about rows."""
        dims, wanted = self.row_dims[key], frozenset[int]().union(*(moves for _, moves in kinds))
        numbers = [n for n in self.leaves[key] if n in wanted]
        found: dict[tuple[int, ...], dict[int, Range]] = {}
        for place in self._places(key, dims):
            by_move = {}
            for number in numbers:
                reach = self._at(number, dims, place)
                if reach is not None:
                    by_move[number] = _row_range(self.plan.moves[number], reach)
            found[place] = by_move
        return found

    def _bounds(
        self,
        ids: NDArray[np.int64],
        moves: frozenset[int],
        rows: Mapping[str, Mapping[tuple[int, ...], Mapping[int, Range]]],
    ) -> list[int]:
        shape = self.plan.tensors[int(self.tensors[ids[0]])].shape
        ends = {0, shape[0] if shape else 1}
        for places in rows.values():
            for by_move in places.values():
                for number, (low, high) in by_move.items():
                    if number in moves:
                        ends |= {low, high}
        return sorted(ends) if len(ends) > 1 else [0, 0]

    @staticmethod
    def _adopt_gaps(sets: Sets, touched: Mapping[tuple[str, tuple[int, ...]], int], first: Sequence[int]) -> None:
        """Rows that nothing fills (the padding) go with those before them."""
        filled = {sets.find(node) for node in touched.values()}
        for begin, end in pairwise(first):
            for node in range(begin, end):
                if sets.find(node) not in filled:
                    sets.join([node, node - 1 if node > begin else min(node + 1, end - 1)])

    def _assemble(
        self,
        kinds: Sequence[tuple[NDArray[np.int64], frozenset[int]]],
        bounds: Sequence[Sequence[int]],
        first: Sequence[int],
        sets: Sets,
        touched: Mapping[tuple[str, tuple[int, ...]], int],
        rank: Mapping[int, int],
        count: int,
        label: int,
    ) -> list[Slab]:
        parts: list[list[Part]] = [[] for _ in range(count)]
        for k, (ids, _) in enumerate(kinds):
            ranks = [rank[sets.find(node)] for node in range(first[k], first[k + 1])]
            for r in sorted(set(ranks)):
                at = [i for i, other in enumerate(ranks) if other == r]
                rows = (bounds[k][at[0]], bounds[k][at[-1] + 1])
                numbers = self.tensors[ids].tolist()
                parts[r] += [part(self.plan.tensors[n], n, rows) for n in numbers]
        loads: list[list[Load]] = [[] for _ in range(count)]
        for key, numbers in self.leaves.items():
            leaf, grid = self.plan.moves[numbers[0]].leaf, self.lines[key]
            for place in product(*(range(len(ranges)) for ranges in grid)):
                tensor = self.reached.get((key, tuple(place[d] for d in self.index_dims[key])))
                node = touched.get((key, tuple(place[d] for d in self.row_dims[key])))
                if tensor is not None and node is not None and self.label[tensor] == label:
                    box = tuple(ranges[i] for ranges, i in zip(grid, place, strict=True))
                    loads[rank[sets.find(node)]].append(Load(leaf, box))
        return [
            Slab(self.group.moves, tuple(sorted(p, key=lambda p: p.tensor)), tuple(found))
            for p, found in zip(parts, loads, strict=True)
        ]


def _row_range(move: Move, reach: Reach) -> Range:
    """The rows of the target between the first and the last that a reach meets."""
    if not move.target:
        return (0, 1)
    axes = move.target[0]
    sizes = [move.extent(a) for a in axes]
    low = flat([reach[a][0] for a in axes], sizes)
    high = flat([reach[a][1] - 1 for a in axes], sizes)
    return move.start[0] + low * move.step[0], move.start[0] + high * move.step[0] + 1
