"""Carry out a plan: decode every stored chunk once, put its values where they belong, write, digest, count NaN."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mtx2vllm.converter.chunks import Box, landings, numbers, pieces
from mtx2vllm.converter.plan import Group, Leaf, Move, Plan, arithmetic
from mtx2vllm.converter.shards import ShardFile
from mtx2vllm.converter.storage import RangeWriter

Open = Callable[[Leaf], Any]  # gives the tensorstore.TensorStore of a leaf
Sink = Callable[[ShardFile], RangeWriter]
Progress = Callable[[int], None]  # called with the number of bytes just written


@dataclass(frozen=True, slots=True)
class TensorResult:
    """What is known of a tensor once it is written: blake3 of its bytes (hex), and how many values are not finite."""

    digest: str
    nans: int
    infs: int


def run(
    plan: Plan,
    shards: Sequence[ShardFile],
    read: Open,
    sink: Sink,
    *,
    budget: int = 1 << 30,
    workers: int = 2,
    progress: Progress = lambda _: None,
) -> dict[int, TensorResult]:
    """Convert everything into `shards`; headers included, files committed. Nothing visible remains on failure."""
    del budget, workers
    writers = [sink(shard) for shard in shards]
    try:
        place: dict[int, tuple[RangeWriter, int]] = {}
        for shard, writer in zip(shards, writers, strict=True):
            writer.write(0, memoryview(shard.header))
            place |= {n: (writer, at) for n, at in shard.offsets.items()}
        results: dict[int, TensorResult] = {}
        for group in plan.groups:
            results |= _convert(plan, group, read, place, progress)
        for writer in writers:
            writer.commit()
    except BaseException:
        for writer in writers:
            writer.abort()
        raise
    return results


def _convert(
    plan: Plan, group: Group, read: Open, place: Mapping[int, tuple[RangeWriter, int]], progress: Progress
) -> dict[int, TensorResult]:
    buffers = {n: np.zeros(plan.tensors[n].shape, plan.tensors[n].dtype) for n in group.tensors}
    by_leaf: dict[str, list[Move]] = {}
    for number in group.moves:
        by_leaf.setdefault(plan.moves[number].leaf.key, []).append(plan.moves[number])
    for moves in by_leaf.values():
        leaf = moves[0].leaf
        store = read(leaf)
        for box in grid(leaf):
            chunk = np.asarray(store[tuple(slice(*r) for r in box)].read().result())
            for move in moves:
                scatter(move, box, chunk, buffers)
    results = {}
    for number, values in buffers.items():
        writer, offset = place[number]
        data = memoryview(values.reshape(-1).view(np.uint8))
        if data.nbytes:
            writer.write(offset, data)
        progress(data.nbytes)
        nans, infs = screen(values)
        results[number] = TensorResult(blake3(data).hexdigest(), nans, infs)
    return results


def grid(leaf: Leaf) -> Iterator[Box]:
    """Every stored chunk of a leaf as a box of half-open ranges, in row-major order."""
    lines = [
        [(at, min(at + c, n)) for at in range(0, n, c)] if n else []
        for n, c in zip(leaf.shape, leaf.chunks, strict=True)
    ]
    return product(*lines)


def scatter(move: Move, box: Box, chunk: NDArray[Any], tensors: Mapping[int, NDArray[Any]]) -> None:
    """Put what a move takes from one chunk into whole tensors."""
    for piece in pieces(move, box):
        values = piece.of(chunk)
        for at, number in numbers(move, piece):
            tensor = tensors[number]
            for landing in landings(move, piece, (0, tensor.shape[0] if tensor.ndim else 1)):
                landing.of(tensor)[...] = arithmetic(move.op, values[at][landing.taken], tensor.dtype)


def screen(values: NDArray[Any]) -> tuple[int, int]:
    """How many NaN and infinite values an array has."""
    if values.dtype.kind in "iub":
        return 0, 0
    finite = np.isfinite(values)
    if finite.all():
        return 0, 0
    nans = int(np.isnan(values).sum())
    return nans, int((~finite).sum()) - nans
