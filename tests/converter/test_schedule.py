"""Slabs and schedules of typical stacks: sizes only, no data."""

import numpy as np
import pytest

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.execute import slabs as slabs_module
from mtx2vllm.converter.execute.schedule import least, needs_of, schedule
from mtx2vllm.converter.execute.slabs import slabs
from mtx2vllm.converter.plans import Leaf, Move, Plan, Tensor

L, X, E, F = 4, 8, 64, 48


@pytest.fixture(autouse=True)
def chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(slabs_module, "SMALL", 0)


def numbered(*shape):
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)


def leaf(key, shape, chunks):
    return Leaf(key, key, shape, "bfloat16", chunks)


def experts(chunks):
    """w13: gate and up of all experts and layers."""
    sizes = {"x": X, "l": L, "e": E, "f": F}
    source, target = (("x",), ("l",), ("e",), ("f",)), (("x",), ("f",), ("e",))
    moves = [
        Move(leaf(name, (X, L, E, F), chunks), source, sizes, target, (0, at, 0), (1, 1, 1), ("l",), numbered(L))
        for name, at in (("gate", 0), ("up", F))
    ]
    return Plan("canonical", "t", "T", [Tensor(f"w13.{i}", (X, 2 * F, E), "bfloat16") for i in range(L)], moves)


def cut(plan):
    return [slab for group in plan.groups for slab in slabs(plan, group)]


def test_parts_of_a_concatenation_follow_one_another():
    moves, row = [], 0
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        sizes = {"e": E, "l": L, "h": heads, "d": 8}
        source = (("e",), ("l",), ("h",), ("d",))
        grid = leaf(name, (E, L, heads, 8), (16, L, heads, 8))
        moves.append(Move(grid, source, sizes, (("h", "d"), ("e",)), (row, 0), (1, 1), ("l",), numbered(L)))
        row += heads * 8
    plan = Plan("canonical", "t", "T", [Tensor(f"qkv.{i}", (row, E), "bfloat16") for i in range(L)], moves)
    found = cut(plan)
    assert [slab.parts[0].rows for slab in found] == [(0, 32), (32, 48), (48, 64)]
    assert [{load.leaf.key for load in slab.loads} for slab in found] == [{"q"}, {"k"}, {"v"}]
    assert all(len(slab.parts) == L and len(slab.loads) == 4 for slab in found)
    [whole] = needs_of(plan, 1 << 20, remote_sink=True).stages
    assert [p.rows for p in whole.slab.parts] == [(0, 64)] * L


def test_fused_experts_need_gate_and_up_of_the_same_experts():
    found = cut(experts((2, L, E // 4, F)))
    assert [slab.parts[0].rows for slab in found] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert all({load.leaf.key for load in slab.loads} == {"gate", "up"} for slab in found)
    assert len(cut(experts((X, L, 8, F)))) == 1


def test_unlike_grids_meet_at_their_common_lines():
    plan = experts((2, L, E, F))
    other = experts((4, L, E, F)).moves[1]
    mixed = Plan("canonical", "t", "T", plan.tensors, [plan.moves[0], other])
    assert [slab.parts[0].rows for slab in cut(mixed)] == [(0, 4), (4, 8)]


def test_single_experts_are_divided_by_the_expert_grid():
    sizes = {"x": X, "l": L, "e": E, "f": F}
    grid = leaf("gate", (X, L, E, F), (2, L, E, F))
    move = Move(grid, tuple((a,) for a in "xlef"), sizes, (("f",), ("e",)), (0, 0), (1, 1), ("l", "x"), numbered(L, X))
    plan = Plan("hf", "t", "T", [Tensor(f"t{i}", (F, E), "bfloat16") for i in range(L * X)], [move])
    found = cut(plan)
    assert len(found) == 4 and all(len(slab.loads) == 1 and len(slab.parts) == L * 2 for slab in found)


def test_vocabulary_rows_stream_and_the_padding_goes_with_the_last():
    move = Move(
        leaf("emb", (100, 8), (25, 8)),
        (("v",), ("e",)),
        {"v": 100, "e": 8},
        (("v",), ("e",)),
        (0, 0),
        (1, 1),
        (),
        np.array(0, np.int32),
        {"v": (0, 80)},
    )
    found = cut(Plan("hf", "t", "T", [Tensor("w", (128, 8), "bfloat16", 48)], [move]))
    assert [slab.parts[0].rows for slab in found] == [(0, 25), (25, 50), (50, 75), (75, 128)]


def test_what_does_not_fit_is_reread_or_spilled_and_says_why():
    plan = experts((X, L, E // 16, F))  # 393 KB of w13, chunks of 12 KB, rows of 12 KB
    whole = schedule(plan, 4 << 20)
    assert not whole.oversize and whole.scratch == 0 and whole.read == plan.nbytes
    half = schedule(plan, 300_000)
    assert {o.how for o in half.oversize} == {"reread"} and half.read > plan.nbytes and half.scratch == 0
    never = schedule(plan, 300_000, runs=1)
    assert {o.how for o in never.oversize} == {"spill"} and never.read == plan.nbytes
    assert never.scratch == never.spilled == plan.nbytes
    assert needs_of(plan, 300_000, remote_source=True).read == plan.nbytes
    small = schedule(plan, 120_000)
    [note] = small.oversize
    assert note.how == "spill" and note.nbytes == plan.nbytes and "times" in note.reason
    for made in (whole, half, never, small):
        assert made.rings <= 4 << 20 and made.written == plan.nbytes


def test_a_budget_too_small_is_refused_with_the_one_that_would_do():
    plan = experts((X, L, E, F))
    need = least(plan)
    schedule(plan, need)
    with pytest.raises(InputError) as caught:
        schedule(plan, need - 1)
    [said] = caught.value.problems
    assert said.startswith(f"pass --memory-budget {need} or more")
    assert "one stored chunk [8, 4, 64, 48] of gate decodes to" in said
