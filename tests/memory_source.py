"""Checkpoints and files in memory, for the executor's tests: TensorStore arrays from numpy, writers that keep bytes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from mtx2vllm.converter.plans import Leaf
from mtx2vllm.converter.shards import ShardFile


def opener(arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Opens leaves from memory, as zarr3 arrays with the leaf's chunk grid."""
    context = ts.Context()

    def read(leaf: Leaf) -> Any:
        values = arrays[leaf.key]
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "memory", "path": leaf.key + "/"},
            "fill_missing_data_reads": False,
        }
        chunks = {"chunk_shape": [max(1, c) for c in leaf.chunks]}
        store = ts.open(
            spec,
            context=context,
            open=True,
            create=True,
            dtype=ts.dtype(leaf.dtype),
            shape=leaf.shape,
            chunk_layout=ts.ChunkLayout(**chunks) if leaf.shape else None,
        ).result()
        store.write(values).result()
        return store

    return read


class MemoryFile:
    """A RangeWriter that keeps its bytes and refuses a byte written twice."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.seen = np.zeros(size, np.uint8)
        self.committed = self.aborted = False

    def write(self, offset: int, data: memoryview) -> None:
        raw = bytes(data)
        assert offset + len(raw) <= len(self.data), "written beyond the file"
        assert not self.seen[offset : offset + len(raw)].any(), "a byte was written twice"
        self.seen[offset : offset + len(raw)] = 1
        self.data[offset : offset + len(raw)] = raw

    def commit(self) -> None:
        assert self.seen.all(), "a byte was never written"
        self.committed = True

    def abort(self) -> None:
        self.aborted = True


class Files(dict[str, MemoryFile]):
    """The sink: a MemoryFile for each shard, by name."""

    def __call__(self, shard: ShardFile) -> MemoryFile:
        self[shard.name] = MemoryFile(shard.size)
        return self[shard.name]
