"""Copy one strided view into another when their innermost axes differ: the transpose in the middle of everything.

A plain assignment reads a column of the source for each row of the target. With the strides that stacks of layers have
(multiples of a page) all of a column's cache lines fall into the same few sets of the cache and evict one another.
Going through two small buffers whose strides are odd multiples of a cache line avoids that on both sides.
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = (256, 512)  # items along the target's and the source's innermost axis; two buffers stay in a core's L2 cache
PAD = 32  # items; with 2 or 4 bytes each this moves the next row by a cache line or two
WORTH = 16  # below so many items along either axis a plain assignment is as good

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


class _Buffers(threading.local):
    """One pair a thread: source order and target order."""

    def __init__(self) -> None:
        rows, columns = BLOCK
        self.source = np.empty(rows * (columns + PAD), np.uint32)
        self.target = np.empty(columns * (rows + PAD), np.uint32)


_BUFFERS = _Buffers()


def copy(target: NDArray[Any], source: NDArray[Any]) -> None:
    """`target[...] = source` for two views of the same shape and dtype."""
    unsigned = _UNSIGNED.get(source.dtype.itemsize)
    if source.dtype != target.dtype or unsigned is None or source.size < WORTH * WORTH:
        target[...] = source
        return
    to, of = coalesced(target.view(unsigned), source.view(unsigned))
    rows, columns = _innermost(to), _innermost(of)
    if rows == columns or min(to.shape[rows], to.shape[columns]) < WORTH:
        to[...] = of
        return
    to, of = np.moveaxis(to, (rows, columns), (-1, -2)), np.moveaxis(of, (rows, columns), (-2, -1))
    for at in np.ndindex(to.shape[:-2]):
        _transpose(to[at], of[at])


def _transpose(to: NDArray[Any], of: NDArray[Any]) -> None:
    """`to[...] = of.T`, both with a contiguous last axis."""
    height, width = BLOCK
    for top in range(0, of.shape[0], height):
        for left in range(0, of.shape[1], width):
            block = of[top : top + height, left : left + width]
            n, m = block.shape
            near = _BUFFERS.source.view(of.dtype)[: n * (m + PAD)].reshape(n, m + PAD)[:, :m]
            near[...] = block
            turned = _BUFFERS.target.view(of.dtype)[: m * (n + PAD)].reshape(m, n + PAD)[:, :n]
            turned[...] = near.T
            to[left : left + width, top : top + height] = turned


def coalesced(target: NDArray[Any], source: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same two views with as few dimensions as possible, by the target's strides descending."""
    order = sorted((d for d, n in enumerate(target.shape) if n != 1), key=lambda d: -target.strides[d])
    target, source = (x.reshape([x.shape[d] for d in sorted(order)]) for x in (target, source))
    rank = {d: i for i, d in enumerate(sorted(order))}
    target, source = (x.transpose([rank[d] for d in order]) for x in (target, source))
    shape: list[int] = []
    for d, n in enumerate(target.shape):
        joins = shape and all(x.strides[d - 1] == n * x.strides[d] for x in (target, source))
        if joins:
            shape[-1] *= n
        else:
            shape.append(n)
    return target.reshape(shape), source.reshape(shape)


def _innermost(view: NDArray[Any]) -> int:
    return min(range(view.ndim), key=lambda d: view.strides[d])
