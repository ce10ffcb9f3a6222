"""The executor against plain numpy, written without the plan's own algebra."""

import blake3
import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from memory_source import Files, opener
from safetensors import deserialize

from mtx2vllm.converter.execute.run import run
from mtx2vllm.converter.plans import Leaf, Move, Op, Plan, Tensor
from mtx2vllm.converter.shards import layout

L, E, H, K, D, F, X = 3, 24, 4, 2, 8, 20, 4


def random(shape, dtype="bfloat16", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def leaf(key, values, chunks):
    return Leaf(key, key, values.shape, values.dtype.name, chunks)


def convert(tensors, moves, arrays, budget=1 << 20, max_shard_size=None):
    plan = Plan("canonical", "test", "Test", tensors, moves)
    shards = layout(tensors, max_shard_size, {"layout": "canonical"})
    files = Files()
    results = run(plan, shards, opener(arrays), files, budget=budget)
    assert all(f.committed for f in files.values())
    out = {}
    for f in files.values():
        for name, entry in deserialize(bytes(f.data)):
            dtype = {"BF16": "bfloat16", "F32": "float32"}[entry["dtype"]]
            out[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    for number, tensor in enumerate(tensors):
        data = np.ascontiguousarray(out[tensor.name]).view(np.uint8).tobytes()
        assert results[number].digest == blake3.blake3(data).hexdigest()
    return out


def numbered(*shape, start=0):
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


@pytest.mark.parametrize("chunks", [(E, L, F), (6, L, F), (7, L, 3), (E, 1, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transpose(chunks, dtype):
    x = random((E, L, F), dtype)
    tensors = [Tensor(f"l{i}", (F, E), dtype) for i in range(L)]
    move = Move(
        leaf("x", x, chunks),
        (("e",), ("l",), ("f",)),
        {"e": E, "l": L, "f": F},
        (("f",), ("e",)),
        (0, 0),
        (1, 1),
        ("l",),
        numbered(L),
    )
    out = convert(tensors, [move], {"x": x})
    for i in range(L):
        same(out[f"l{i}"], x[:, i].T)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("cut", [3, 5, 8, 1000])
def test_qkv_concatenation(flat, cut):
    q, k, v = (random((E, L, n, D), seed=n) for n in (H, K, K + 1))
    arrays, moves, row = {}, [], 0
    rows = (H + K + K + 1) * D
    for name, x, n in (("q", q, H), ("k", k, K), ("v", v, K + 1)):
        source = (("e",), ("l",), ("h", "d")) if flat else (("e",), ("l",), ("h",), ("d",))
        values = x.reshape(E, L, n * D) if flat else x
        arrays[name] = values
        chunks = tuple(min(cut, s) if i != 1 else s for i, s in enumerate(values.shape))
        sizes = {"e": E, "l": L, "h": n, "d": D}
        moves.append(
            Move(leaf(name, values, chunks), source, sizes, (("h", "d"), ("e",)), (row, 0), (1, 1), ("l",), numbered(L))
        )
        row += n * D
    out = convert([Tensor(f"l{i}", (rows, E), "bfloat16") for i in range(L)], moves, arrays)
    for i in range(L):
        want = np.concatenate([x[:, i].reshape(E, -1).T for x in (q, k, v)])
        same(out[f"l{i}"], want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("chunks", [(X, L, E, F), (1, L, 6, F), (X, L, 5, 7), (3, L, E, 4)])
def test_experts_w13(interleaved, chunks):
    gate, up = random((X, L, E, F), seed=1), random((X, L, E, F), seed=2)
    moves = []
    for name, x, place in (("g", gate, 0), ("u", up, 1)):
        start, step = ((0, place, 0), (1, 2, 1)) if interleaved else ((0, place * F, 0), (1, 1, 1))
        sizes = {"x": X, "l": L, "e": E, "f": F}
        moves.append(
            Move(
                leaf(name, x, chunks),
                (("x",), ("l",), ("e",), ("f",)),
                sizes,
                (("x",), ("f",), ("e",)),
                start,
                step,
                ("l",),
                numbered(L),
            )
        )
    out = convert([Tensor(f"l{i}", (X, 2 * F, E), "bfloat16") for i in range(L)], moves, {"g": gate, "u": up})
    for i in range(L):
        g, u = (np.swapaxes(w[:, i], 1, 2) for w in (gate, up))
        want = np.stack([g, u], 2).reshape(X, 2 * F, E) if interleaved else np.concatenate([g, u], 1)
        same(out[f"l{i}"], want)


@pytest.mark.parametrize("chunks", [(100, 8), (13, E), (30, 5)])
def test_vocabulary_cut_and_padded(chunks):
    x = random((100, E))
    move = Move(
        leaf("x", x, chunks),
        (("v",), ("e",)),
        {"v": 100, "e": E},
        (("v",), ("e",)),
        (0, 0),
        (1, 1),
        (),
        np.array(0, np.int32),
        {"v": (0, 90)},
    )
    out = convert([Tensor("w", (128, E), "bfloat16", 38)], [move], {"x": x})
    same(out["w"], np.concatenate([x[:90], np.zeros((38, E), x.dtype)]))


def test_norm_minus_one_rounds_once():
    x = random((E, L), "float32") + np.float32(1)
    tensors = [Tensor(f"l{i}", (E,), "bfloat16") for i in range(L)]
    move = Move(
        leaf("x", x, (E, L)),
        (("e",), ("l",)),
        {"e": E, "l": L},
        (("e",),),
        (0,),
        (1,),
        ("l",),
        numbered(L),
        op=Op("add", -1.0),
    )
    out = convert(tensors, [move], {"x": x})
    for i in range(L):
        same(out[f"l{i}"], (x[:, i] - np.float32(1)).astype("bfloat16"))


def test_experts_apart_and_a_slice_that_goes_nowhere():
    x = random((X, L, E, F))
    table = numbered(L, X)
    table[1, 2] = -1
    table[table > 6] -= 1
    tensors = [Tensor(f"t{n}", (F, E), "bfloat16") for n in range(L * X - 1)]
    move = Move(
        leaf("x", x, (2, L, 7, F)),
        (("x",), ("l",), ("e",), ("f",)),
        {"x": X, "l": L, "e": E, "f": F},
        (("f",), ("e",)),
        (0, 0),
        (1, 1),
        ("l", "x"),
        table,
    )
    out = convert(tensors, [move], {"x": x}, max_shard_size=3000)
    for (i, e), n in np.ndenumerate(table):
        if n >= 0:
            same(out[f"t{n}"], x[e, i].T)


def test_not_finite_values_are_counted():
    x = random((5, 4), "float32")
    x[1, 2], x[3, 3], x[0, 0] = np.nan, np.inf, -np.inf
    move = Move(
        leaf("x", x, (2, 4)),
        (("a",), ("b",)),
        {"a": 5, "b": 4},
        (("a",), ("b",)),
        (0, 0),
        (1, 1),
        (),
        np.array(0, np.int32),
    )
    plan = Plan("hf", "test", "Test", [Tensor("w", (5, 4), "bfloat16")], [move])
    results = run(plan, layout(plan.tensors, None, {}), opener({"x": x}), Files())
    assert (results[0].nans, results[0].infs) == (1, 2)
