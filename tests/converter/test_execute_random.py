"""Random moves, chunk grids and budgets: every way through the memory ends, and agrees with the plan's definition."""

import threading
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_source import Files, opener

from mtx2vllm.converter.execute import slabs as slabs_module
from mtx2vllm.converter.execute.run import run
from mtx2vllm.converter.execute.schedule import least, schedule
from mtx2vllm.converter.plans import Leaf, Move, Op, Plan, Tensor, apply
from mtx2vllm.converter.shards import layout

DEADLOCK = 30.0  # seconds; such a run takes 20 ms


@pytest.fixture(autouse=True, scope="module")
def every_chunk_by_itself():
    """Without this the small arrays of a test would be read whole."""
    before, slabs_module.SMALL = slabs_module.SMALL, 0
    yield
    slabs_module.SMALL = before


def partition(draw, items):
    """Cut a list into 1 to 4 runs."""
    items = list(items)
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=3)))
    return tuple(tuple(items[a:b]) for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True))


@st.composite
def plans(draw):
    """Some moves that fill the same tensors side by side or interleaved, from leaves of different structure."""
    axes = "abcde"[: draw(st.integers(1, 5))]
    extent = {a: draw(st.integers(1, 5)) for a in axes}
    order = draw(st.permutations(axes))
    n_index = draw(st.integers(0, min(2, len(axes) - 1)))
    index, target = tuple(order[:n_index]), partition(draw, order[n_index:])
    count = draw(st.integers(1, 3))
    dim = draw(st.integers(0, len(target) - 1))
    interleaved = draw(st.booleans())
    block = [prod(extent[a] for a in group) for group in target]
    shape = [n * count if d == dim else n for d, n in enumerate(block)]
    pad = draw(st.integers(0, 3))
    shape[0] += pad
    table = np.arange(prod(extent[a] for a in index), dtype=np.int32).reshape([extent[a] for a in index])
    tensors = [
        Tensor(f"t{i}", tuple(shape), draw(st.sampled_from(["bfloat16", "float32"])), pad) for i in range(table.size)
    ]
    moves = []
    for number in range(count):
        window, sizes = {}, dict(extent)
        for a in axes:
            if draw(st.integers(0, 4)) == 0:
                low = draw(st.integers(0, 2))
                sizes[a] = low + extent[a] + draw(st.integers(0, 2))
                window[a] = (low, low + extent[a])
        source = partition(draw, draw(st.permutations(axes)))
        leaf_shape = tuple(prod(sizes[a] for a in group) for group in source)
        chunks = tuple(draw(st.integers(1, n)) for n in leaf_shape)
        leaf = Leaf(f"x{number}", f"x{number}", leaf_shape, draw(st.sampled_from(["bfloat16", "float32"])), chunks)
        start, step = [0] * len(target), [1] * len(target)
        start[dim] = number if interleaved else number * block[dim]
        step[dim] = count if interleaved else 1
        op = draw(st.sampled_from([None, None, Op("add", -1.0), Op("multiply", 1.7)]))
        moves.append(Move(leaf, source, sizes, target, tuple(start), tuple(step), index, table, window, op))
    return Plan("hf", "random", "Random", tensors, moves)


def arrays_of(plan, seed=0):
    rng = np.random.default_rng(seed)
    return {m.leaf.key: rng.standard_normal(m.leaf.shape).astype(m.leaf.dtype) for m in plan.moves}


def expected(plan, arrays):
    tensors = {n: np.zeros(t.shape, t.dtype) for n, t in enumerate(plan.tensors)}
    for move in plan.moves:
        apply(move, arrays[move.leaf.key], tensors)
    return tensors


def in_time(work):
    """Run it in a thread, so that a deadlock fails the test and does not hang it."""
    outcome = []

    def body():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(DEADLOCK)
    assert outcome, "the run did not end"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.integers(0, 3000), st.integers(1, 3), st.integers(1, 3), st.integers(0, 16))
def test_agrees_with_the_definition(plan, spare, runs, workers, join):
    arrays = arrays_of(plan)
    made = schedule(plan, least(plan) + spare, runs=runs, join=join / 16)
    shards = layout(plan.tensors, 500, {})
    files = Files()
    results = in_time(lambda: run(plan, shards, opener(arrays), files, made=made, workers=workers, writers=2))
    assert sorted(results) == list(range(len(plan.tensors)))
    assert made.rings <= least(plan) + spare
    wanted = expected(plan, arrays)
    for shard in shards:
        data = files[shard.name].data
        for number, offset in shard.offsets.items():
            want = wanted[number].tobytes()
            assert data[offset : offset + len(want)] == want


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.integers(0, 2000))
def test_each_chunk_is_read_once_unless_it_says_so(plan, spare):
    made = schedule(plan, least(plan) + spare, runs=1)
    seen = [(load.leaf.key, load.box) for stage in made.stages for load in stage.slab.loads]
    assert len(seen) == len(set(seen))
    assert not [o for o in made.oversize if o.how == "reread"]


def test_all_ways_are_taken():
    """The random plans above are only worth something if they go every way."""
    ways = set()

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(plans(), st.integers(0, 3000), st.integers(1, 3))
    def look(plan, spare, runs):
        made = schedule(plan, least(plan) + spare, runs=runs)
        ways.update(stage.how for stage in made.stages)
        ways.update(o.how for o in made.oversize)

    look()
    assert ways == {"gather", "stream", "spill", "reread"}
