"""The plan of a conversion: which elements of which source leaf land where in which tensor. Sizes only, no data.

A `Move` says it for one leaf at once, all layers and experts of a stack included. In numpy, for a whole leaf `x`:

    y = x.reshape(every dimension split into its elementary axes)[windows].transpose(index axes, then target axes)
    for i in ndindex(sizes of the index axes):
        tensor[move.tensors[i]][start:start + n * step:step for each dimension].reshape(target axes)[...] = op(y[i])

Every split of a dimension is a view on both sides, so a move never computes an address beyond strides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (numpy learns "bfloat16" from it)
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Leaf:
    """A source array. `path` is normalized (no wrapper: `decoder.layers.mlp.wi_0.kernel`), `key` is the name in the
    checkpoint, `chunks` the shape of one stored chunk (the last one along an axis may be cut by the shape)."""

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, uncompressed."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write. The last `pad_rows` rows of its first dimension are zeros that no leaf fills."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pad_rows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Op:
    """Value arithmetic: upcast to float32, apply once with `value` as float32, round once to the target's dtype."""

    kind: Literal["multiply", "divide", "add"]
    value: float


@dataclass(frozen=True, eq=False)
class Move:
    """One leaf's elements (or a window of them) on their way into one tensor, or into one tensor a layer and expert."""

    leaf: Leaf
    source: tuple[tuple[str, ...], ...]  # the elementary axes of each source dimension, outermost first
    sizes: Mapping[str, int]  # of every elementary axis, before the window
    target: tuple[tuple[str, ...], ...]  # the elementary axes of each target dimension, outermost first
    start: tuple[int, ...]  # where the block begins in each target dimension
    step: tuple[int, ...]  # and with which stride it lies there (2: interleaved)
    index: tuple[str, ...]  # the axes that choose the tensor (layers, experts); () for a single tensor
    tensors: NDArray[np.int32]  # numbers in Plan.tensors, by index axes; -1: this slice goes nowhere
    window: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # half-open range of an axis that is taken
    op: Op | None = None

    def extent(self, axis: str) -> int:
        """How many values of an axis are taken."""
        begin, end = self.window.get(axis, (0, self.sizes[axis]))
        return end - begin

    @cached_property
    def places(self) -> Mapping[int, Sequence[tuple[int, ...]]]:
        """Where each target tensor's number stands in `tensors`."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for at, number in np.ndenumerate(self.tensors):
            if number >= 0:
                found.setdefault(int(number), []).append(at)
        return found

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of what one target tensor receives."""
        return tuple(prod(self.extent(a) for a in axes) for axes in self.target)


@dataclass(frozen=True, slots=True)
class Drop:
    """A leaf, or a part of one, that is left out on purpose."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Group:
    """Moves that share target tensors, directly or through others: the unit of scheduling. Numbers index the plan's
    lists; tensors are in the order in which they are written."""

    moves: tuple[int, ...]
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs to know. Tensors are listed in group order, which is their order in the shards."""

    layout: Literal["canonical", "hf"]
    family: str
    architecture: str
    tensors: Sequence[Tensor]
    moves: Sequence[Move]
    drops: Sequence[Drop] = ()
    conventions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The connected components of moves and tensors, in the order of the tensors."""
        return group(self.moves)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)


def group(moves: Sequence[Move]) -> tuple[Group, ...]:
    """Put moves that write into the same tensors together."""
    root: dict[int, int] = {}  # tensor -> the first move that writes it

    parent = list(range(len(moves)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for number, move in enumerate(moves):
        for tensor in np.unique(move.tensors).tolist():
            if tensor >= 0:
                first = root.setdefault(tensor, number)
                parent[max(find(first), find(number))] = min(find(first), find(number))
    members: dict[int, tuple[list[int], set[int]]] = {}
    for number, move in enumerate(moves):
        numbers, tensors = members.setdefault(find(number), ([], set()))
        numbers.append(number)
        tensors.update(t for t in np.unique(move.tensors).tolist() if t >= 0)
    groups = [Group(tuple(numbers), tuple(sorted(tensors))) for numbers, tensors in members.values()]
    return tuple(sorted(groups, key=lambda g: g.tensors[:1]))


def apply(move: Move, values: NDArray[Any], tensors: Mapping[int, NDArray[Any]]) -> None:
    """Carry out a move on a whole leaf in memory: the definition that every faster way must agree with."""
    split = values.reshape([move.sizes[a] for axes in move.source for a in axes])
    order = [a for axes in move.source for a in axes]
    split = split[tuple(slice(*move.window.get(a, (0, move.sizes[a]))) for a in order)]
    wanted = [*move.index, *(a for axes in move.target for a in axes)]
    split = split.transpose([order.index(a) for a in wanted])
    for at in np.ndindex(*(move.extent(a) for a in move.index)):
        number = int(move.tensors[at])
        if number < 0:
            continue
        view = tensors[number][
            tuple(slice(s, s + n * k, k) for s, n, k in zip(move.start, move.block, move.step, strict=True))
        ]
        block = view.reshape([move.extent(a) for axes in move.target for a in axes])
        block[...] = arithmetic(move.op, split[at], view.dtype)


def arithmetic(op: Op | None, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Apply `op` in float32 and round once to `dtype` (facts: upstream multiplies in bf16, which differs in 3 %). NaN and
    infinity are counted where tensors are written, so numpy need not warn of them."""
    with np.errstate(all="ignore"):
        if op is None:
            return values.astype(dtype, copy=False)
        x = values.astype(np.float32)
        by = np.float32(op.value)
        y = x * by if op.kind == "multiply" else x / by if op.kind == "divide" else x + by
        return y.astype(dtype)
