"""Where the values of one stored chunk go: boxes over elementary axes, and views of both sides.

A chunk is a box in the source's dimensions. Its borders need not respect the elementary axes of a composite dimension
(a flat heads * head_dim may be cut inside a head), so a range over k axes falls apart into at most 2k-1 boxes that do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.plan import Leaf, Move

Range = tuple[int, int]
Box = tuple[Range, ...]


def grid(leaf: Leaf) -> Iterator[Box]:
    """Every stored chunk of a leaf as a box of half-open ranges, in row-major order."""
    lines = [
        [(at, min(at + c, n)) for at in range(0, n, c)] if n else []
        for n, c in zip(leaf.shape, leaf.chunks, strict=True)
    ]
    return product(*lines)


def boxes(begin: int, end: int, sizes: Sequence[int]) -> list[Box]:
    """Cover the range [begin, end) of a row-major composite axis by boxes over its parts, in ascending order.

    Each box is itself one contiguous range of the composite axis. At most 2 * len(sizes) - 1 boxes.
    """
    if begin >= end:
        return []
    if not sizes:
        return [()]
    if len(sizes) == 1:
        return [((begin, end),)]
    inner, rest = prod(sizes[1:]), sizes[1:]
    first, last = begin // inner, (end - 1) // inner
    if first == last:
        return [((first, first + 1), *b) for b in boxes(begin - first * inner, end - first * inner, rest)]
    found: list[Box] = []
    if begin % inner:
        found += [((first, first + 1), *b) for b in boxes(begin % inner, inner, rest)]
        first += 1
    whole = end // inner
    if first < whole:
        found.append(((first, whole), *((0, n) for n in rest)))
    if end % inner:
        found += [((whole, whole + 1), *b) for b in boxes(0, end % inner, rest)]
    return found


def begin_of(box: Box, sizes: Sequence[int]) -> int:
    """Where a box begins on the composite axis."""
    at = 0
    for (low, _), n in zip(box, sizes, strict=True):
        at = at * n + low
    return at


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a chunk over all elementary axes of a move; `ranges` count from the window's begin."""

    values: NDArray[Any]  # a view of the chunk, one dimension an axis, index axes first, then the target's
    ranges: Mapping[str, Range]


def pieces(move: Move, box: Box, chunk: NDArray[Any]) -> Iterator[Piece]:
    """The parts of a decoded chunk that a move takes, as views."""
    order = [a for axes in move.source for a in axes]
    wanted = [*move.index, *(a for axes in move.target for a in axes)]
    turn = [order.index(a) for a in wanted]
    sizes = [[move.sizes[a] for a in axes] for axes in move.source]
    for parts in product(*(boxes(*r, n) for r, n in zip(box, sizes, strict=True))):
        ranges = dict(zip(order, (r for part in parts for r in part), strict=True))
        cut = {a: _meet(ranges[a], move.window.get(a, (0, move.sizes[a]))) for a in order}
        if any(low >= high for low, high in cut.values()):
            continue
        view = chunk[tuple(_within(part, n, r) for part, n, r in zip(parts, sizes, box, strict=True))]
        view = view.reshape([high - low for low, high in ranges.values()])
        view = view[tuple(slice(cut[a][0] - ranges[a][0], cut[a][1] - ranges[a][0]) for a in order)]
        shift = {a: move.window[a][0] if a in move.window else 0 for a in order}
        yield Piece(view.transpose(turn), {a: (cut[a][0] - shift[a], cut[a][1] - shift[a]) for a in order})


def _within(part: Box, sizes: Sequence[int], outer: Range) -> slice:
    begin = begin_of(part, sizes) - outer[0]
    return slice(begin, begin + prod(high - low for low, high in part))


def _meet(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), min(a[1], b[1])


def landing(move: Move, rows: Range) -> list[tuple[slice, Box]]:
    """Where a move's block meets the rows [begin, end) of its target tensor.

    Returns pairs of a slice of the tensor's first dimension (counted from `begin`) and the box over the elementary
    axes of that dimension that lies there. A scalar tensor has one row.
    """
    if not move.target:
        return [(slice(0, 1), ())]
    sizes = [move.extent(a) for a in move.target[0]]
    start, step = move.start[0], move.step[0]
    first = max(0, -(-(rows[0] - start) // step))
    last = min(prod(sizes), -(-(rows[1] - start) // step))
    found = []
    for box in boxes(first, last, sizes):
        at = begin_of(box, sizes)
        count = prod(high - low for low, high in box)
        low = start + at * step - rows[0]
        found.append((slice(low, low + (count - 1) * step + 1, step), box))
    return found


def meeting(move: Move, piece: Piece, rows: Range, region: NDArray[Any]) -> Iterator[tuple[NDArray[Any], Any]]:
    """Pairs (view of `region`, index into the piece's dimensions behind the index axes) where a piece lands.

    `region` holds the rows [begin, end) of a target tensor; the views have the piece's target axes as dimensions.
    """
    head = move.target[0] if move.target else ()
    inner = [a for axes in move.target[1:] for a in axes]
    for where, box in landing(move, rows):
        common = [_meet(r, piece.ranges[a]) for a, r in zip(head, box, strict=True)]
        if any(low >= high for low, high in common):
            continue
        view = region
        if move.target:
            others = (
                slice(s, s + (n - 1) * k + 1 if n else s, k)
                for s, n, k in zip(move.start[1:], move.block[1:], move.step[1:], strict=True)
            )
            view = region[(where, *others)]
        view = view.reshape([*(high - low for low, high in box), *(move.extent(a) for a in inner)])
        at = [slice(low - r[0], high - r[0]) for (low, high), r in zip(common, box, strict=True)]
        at += [slice(*piece.ranges[a]) for a in inner]
        taken = [
            slice(low - piece.ranges[a][0], high - piece.ranges[a][0])
            for a, (low, high) in zip(head, common, strict=True)
        ]
        yield view[tuple(at)], tuple(taken)


def numbers(move: Move, piece: Piece) -> Iterator[tuple[tuple[int, ...], int]]:
    """The target tensors of a piece: (index into the piece's index axes, number in the plan)."""
    chosen = move.tensors[tuple(slice(*piece.ranges[a]) for a in move.index)]
    for at in np.ndindex(chosen.shape):
        if chosen[at] >= 0:
            yield at, int(chosen[at])
