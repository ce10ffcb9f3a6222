"""What a run keeps of each chunk: a spill keeps it for all chunks of a slab, and a chunk may reach thousands of tensors."""

import tracemalloc

import numpy as np

from mtx2vllm.converter.execute.scatter import Scatter
from mtx2vllm.converter.execute.slabs import Load, part
from mtx2vllm.converter.plans import Leaf, Move, Plan, Tensor

LAYERS, EXPERTS, CHUNKS = 24, 128, 32


def test_chunks_of_experts_are_kept_without_their_tensors() -> None:
    sizes = {"in": CHUNKS, "layer": LAYERS, "expert": EXPERTS, "out": 8}
    leaf = Leaf("wi", "wi", tuple(sizes.values()), "float16", (1, LAYERS, EXPERTS, 8))
    numbers = np.arange(LAYERS * EXPERTS, dtype=np.int32).reshape(LAYERS, EXPERTS)
    source = tuple((axis,) for axis in sizes)
    move = Move(leaf, source, sizes, (("out",), ("in",)), (0, 0), (1, 1), ("layer", "expert"), numbers)
    tensors = [Tensor(f"{n}", (8, CHUNKS), "float16") for n in range(numbers.size)]
    plan = Plan("hf", "", "", tensors, [move])
    parts = [part(tensor, n, (0, 8)) for n, tensor in enumerate(tensors)]
    assert len(move.places) == len(parts)
    kept = []
    tracemalloc.start()
    try:
        for chunk in range(CHUNKS):
            load = Load(leaf, ((chunk, chunk + 1), (0, LAYERS), (0, EXPERTS), (0, 8)))
            kept.append(Scatter(plan, (0,), load))
            assert {kept[-1].size(p) for p in parts} == {8 * 2}
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < len(kept) * len(parts) * 4  # bytes; a reference would be 8
