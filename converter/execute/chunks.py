"""Where the values of one stored chunk go: boxes over elementary axes, and views of both sides.

A chunk is a box in the source's dimensions. Its borders need not respect the elementary axes of a composite dimension
(a flat heads * head_dim may be cut inside a head), so a range over k axes falls apart into at most 2k-1 boxes that do.
Everything here is arithmetic on sizes; `Piece.of` and `Landing.of` turn it into views of arrays.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from numpy.typing import NDArray

from mtx2vllm.converter.plans import Move

Range = tuple[int, int]
Box = tuple[Range, ...]


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
    if first == last and (begin % inner or end % inner):
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


def span(begin: int, end: int, sizes: Sequence[int]) -> Box:
    """The smallest box that holds the range [begin, end) of a composite axis."""
    found = boxes(begin, end, sizes)
    return tuple((min(low for low, _ in r), max(high for _, high in r)) for r in zip(*found, strict=True))


def flat(at: Sequence[int], sizes: Sequence[int]) -> int:
    """The position on a row-major composite axis."""
    position = 0
    for i, n in zip(at, sizes, strict=True):
        position = position * n + i
    return position


def meet(a: Range, b: Range) -> Range:
    """The common part of two ranges (empty where the begin is not below the end)."""
    return max(a[0], b[0]), min(a[1], b[1])


@dataclass(frozen=True, slots=True)
class Piece:
    """A box over all elementary axes of a move, as a part of one chunk."""

    slices: tuple[slice, ...]  # of the chunk's dimensions
    shape: tuple[int, ...]  # of that slice by elementary axes, in the source's order
    cut: tuple[slice, ...]  # the window's part of it
    turn: tuple[int, ...]  # source order -> index axes, then target axes
    ranges: Mapping[str, Range]  # by axis, counted from the window's begin

    def of(self, chunk: NDArray[Any]) -> NDArray[Any]:
        """The view of a decoded chunk: one dimension an axis, the index axes first."""
        return chunk[self.slices].reshape(self.shape)[self.cut].transpose(self.turn)


def pieces(move: Move, box: Box) -> Iterator[Piece]:
    """The parts that a move takes of the chunk that covers `box` of its leaf."""
    order = [a for axes in move.source for a in axes]
    turn = tuple(order.index(a) for a in (*move.index, *(a for axes in move.target for a in axes)))
    sizes = [[move.sizes[a] for a in axes] for axes in move.source]
    windows = [move.window.get(a, (0, move.sizes[a])) for a in order]
    for parts in product(*(boxes(*r, n) for r, n in zip(box, sizes, strict=True))):
        ranges = [r for part in parts for r in part]
        taken = [meet(r, w) for r, w in zip(ranges, windows, strict=True)]
        if any(low >= high for low, high in taken):
            continue
        yield Piece(
            tuple(_within(part, n, r[0]) for part, n, r in zip(parts, sizes, box, strict=True)),
            tuple(high - low for low, high in ranges),
            tuple(slice(t[0] - r[0], t[1] - r[0]) for t, r in zip(taken, ranges, strict=True)),
            turn,
            {a: (t[0] - w[0], t[1] - w[0]) for a, t, w in zip(order, taken, windows, strict=True)},
        )


def _within(part: Box, sizes: Sequence[int], outer: int) -> slice:
    begin = flat([low for low, _ in part], sizes) - outer
    return slice(begin, begin + prod(high - low for low, high in part))


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a part of a piece lies in some rows of a target tensor."""

    slices: tuple[slice, ...]  # of the dimensions of those rows
    shape: tuple[int, ...]  # of that slice by the target's elementary axes
    at: tuple[slice, ...]  # the part of it that is filled
    taken: tuple[slice, ...]  # from which part of the piece, without its index axes

    def of(self, region: NDArray[Any]) -> NDArray[Any]:
        """The view of a buffer that holds those rows: one dimension an axis."""
        return region[self.slices].reshape(self.shape)[self.at]

    @property
    def extents(self) -> tuple[int, ...]:
        """Shape of the view."""
        return tuple(s.stop - s.start for s in self.at)


def landings(move: Move, piece: Piece, rows: Range) -> list[Landing]:
    """Where a piece meets the rows [begin, end) of a target tensor's first dimension (a scalar has one row)."""
    if not move.target:
        return [Landing((), (), (), ())]
    head, inner = move.target[0], [a for axes in move.target[1:] for a in axes]
    others = tuple(
        slice(s, s + (n - 1) * k + 1 if n else s, k)
        for s, n, k in zip(move.start[1:], move.block[1:], move.step[1:], strict=True)
    )
    sizes = [move.extent(a) for a in head]
    start, step = move.start[0], move.step[0]
    first, last = max(0, -((start - rows[0]) // step)), min(prod(sizes), -((start - rows[1]) // step))
    found = []
    for box in boxes(first, last, sizes):
        common = [meet(r, piece.ranges[a]) for a, r in zip(head, box, strict=True)]
        if any(low >= high for low, high in common):
            continue
        low = start + flat([r[0] for r in box], sizes) * step - rows[0]
        count = prod(r[1] - r[0] for r in box)
        at = [slice(c[0] - r[0], c[1] - r[0]) for c, r in zip(common, box, strict=True)]
        taken = [slice(c[0] - piece.ranges[a][0], c[1] - piece.ranges[a][0]) for a, c in zip(head, common, strict=True)]
        found.append(
            Landing(
                (slice(low, low + (count - 1) * step + 1, step), *others),
                (*(r[1] - r[0] for r in box), *(move.extent(a) for a in inner)),
                (*at, *(slice(*piece.ranges[a]) for a in inner)),
                (*taken, *(slice(0, piece.ranges[a][1] - piece.ranges[a][0]) for a in inner)),
            )
        )
    return found


def places(move: Move, piece: Piece, number: int) -> Iterator[tuple[int, ...]]:
    """Where a target tensor lies in a piece: indices into the piece's index axes."""
    ranges = [piece.ranges[a] for a in move.index]
    for at in move.places.get(number, ()):
        if all(low <= i < high for i, (low, high) in zip(at, ranges, strict=True)):
            yield tuple(i - low for i, (low, _) in zip(at, ranges, strict=True))
