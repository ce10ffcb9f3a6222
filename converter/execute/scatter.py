"""Copy what a decoded chunk holds into parts, or into pieces of a scratch file and from there into parts."""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.execute.chunks import Landing, Piece, Range, landings, pieces, places
from mtx2vllm.converter.execute.copying import copy
from mtx2vllm.converter.execute.slabs import Load, Part
from mtx2vllm.converter.plans import Move, Plan, arithmetic

Bytes = NDArray[np.uint8]


class Scatter:
    """What one load gives to which tensor, worked out once."""

    def __init__(self, plan: Plan, moves: Iterable[int], load: Load) -> None:
        self.load = load
        self._plan = plan
        # By chunk, not by tensor: a chunk of experts may reach thousands of them, and a spill keeps all its scatters.
        chosen = [move for move in (plan.moves[n] for n in moves) if move.leaf.key == load.leaf.key]
        self._pieces = [(move, piece) for move in chosen for piece in pieces(move, load.box)]
        self._landings: dict[tuple[int, Range], list[Landing]] = {}

    def reaches(self, part: Part) -> bool:
        """Whether the load may give something to a part."""
        return any(True for _ in self._found(part))

    def _found(self, part: Part) -> Iterator[tuple[Move, Piece, tuple[int, ...]]]:
        for move, piece in self._pieces:
            for at in places(move, piece, part.tensor):
                yield move, piece, at

    def _pairs(self, part: Part) -> Iterator[tuple[Move, Piece, tuple[int, ...], Landing]]:
        for move, piece, at in self._found(part):
            key = (id(piece), part.rows)
            if key not in self._landings:
                self._landings[key] = landings(move, piece, part.rows)
            for landing in self._landings[key]:
                yield move, piece, at, landing

    def fill(self, part: Part, data: Bytes, chunk: NDArray[Any]) -> None:
        """Copy the chunk's values into the bytes of a part."""
        region = region_of(self._plan, part, data)
        for move, piece, at, landing in self._pairs(part):
            copy(landing.of(region), arithmetic(move.op, piece.of(chunk)[at][landing.taken], region.dtype))

    def size(self, part: Part) -> int:
        """How many bytes of a part come from this load."""
        itemsize = np.dtype(self._plan.tensors[part.tensor].dtype).itemsize
        return sum(prod(landing.extents) for *_, landing in self._pairs(part)) * itemsize

    def pack(self, part: Part, data: Bytes, chunk: NDArray[Any]) -> None:
        """Put what a part gets from the chunk back to back, in the part's own order of axes."""
        dtype = np.dtype(self._plan.tensors[part.tensor].dtype)
        end = 0
        for move, piece, at, landing in self._pairs(part):
            begin, end = end, end + prod(landing.extents) * dtype.itemsize
            values = arithmetic(move.op, piece.of(chunk)[at][landing.taken], dtype)
            copy(data[begin:end].view(dtype).reshape(landing.extents), values)

    def unpack(self, part: Part, data: Bytes, packed: Bytes) -> None:
        """The inverse of `pack`: put its bytes into a part."""
        region = region_of(self._plan, part, data)
        end = 0
        for *_, landing in self._pairs(part):
            begin, end = end, end + prod(landing.extents) * region.itemsize
            copy(landing.of(region), packed[begin:end].view(region.dtype).reshape(landing.extents))


def region_of(plan: Plan, part: Part, data: Bytes) -> NDArray[Any]:
    """The bytes of a part as rows of its tensor."""
    tensor = plan.tensors[part.tensor]
    values = data.view(tensor.dtype)
    return values.reshape((part.rows[1] - part.rows[0], *tensor.shape[1:]) if tensor.shape else ())


def clear_padding(plan: Plan, part: Part, data: Bytes) -> None:
    """Zero the rows of a part that no leaf fills."""
    tensor = plan.tensors[part.tensor]
    if tensor.pad_rows:
        first = max(part.rows[0], tensor.shape[0] - tensor.pad_rows)
        if first < part.rows[1]:
            region_of(plan, part, data)[first - part.rows[0] :] = 0
