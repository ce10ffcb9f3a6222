"""Values against numpy written by hand: square matrices (which hide transposes), rotary pairs, scales and roundings."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from data_files import arrays, raw_tensors
from make_run import write_step

from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.plans import Op, arithmetic

BF16 = np.dtype(ml_dtypes.bfloat16)
P = "params.params.decoder."


def numbered(*shape: int, start: int = 0) -> np.ndarray:
    """Distinct numbers that float32 holds exactly."""
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def llama(tmp_path: Path, layers: int, embed: int, heads: int, kv: int, dim: int, ffn: int, **more: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": embed, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "intermediate_size": ffn, "vocab_size": embed,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def tree(layers: int, embed: int, heads: int, kv: int, dim: int, ffn: int) -> dict[str, np.ndarray]:
    """A scanned Llama of MaxText in float32; everything is numbered."""
    found: dict[str, np.ndarray] = {
        "params.params.token_embedder.embedding": numbered(embed, embed, start=1),
        f"{P}decoder_norm.scale": numbered(embed, start=2),
        f"{P}logits_dense.kernel": numbered(embed, embed, start=3),
    }
    for n, (name, shape) in enumerate(
        {
            "self_attention.query.kernel": (embed, layers, heads, dim),
            "self_attention.key.kernel": (embed, layers, kv, dim),
            "self_attention.value.kernel": (embed, layers, kv, dim),
            "self_attention.out.kernel": (heads, layers, dim, embed),
            "mlp.wi_0.kernel": (embed, layers, ffn),
            "mlp.wi_1.kernel": (embed, layers, ffn),
            "mlp.wo.kernel": (ffn, layers, embed),
            "pre_self_attention_layer_norm.scale": (embed, layers),
            "post_self_attention_layer_norm.scale": (embed, layers),
        }.items()
    ):
        found[f"{P}layers.{name}"] = numbered(*shape, start=100 * n)
    return found


def halves_of(w: np.ndarray, heads: int, dim: int) -> np.ndarray:
    """Rows of each head as Hugging Face wants them: row i and row i + dim/2 are a rotary pair, which MaxText keeps at 2i
    and 2i + 1. Loops, on purpose."""
    out = np.empty_like(w)
    for h in range(heads):
        for i in range(dim // 2):
            out[h * dim + i] = w[h * dim + 2 * i]
            out[h * dim + dim // 2 + i] = w[h * dim + 2 * i + 1]
    return out


@pytest.mark.parametrize("dim", [2, 4, 6, 8])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rope", ["interleaved", "half"])
def test_square_llama_of_any_head(tmp_path: Path, dim: int, heads: int, kv: int, rope: str) -> None:
    """embed == heads * dim == ffn == vocab, and as many layers as heads: no shape can betray a transposed axis."""
    embed = layers_embed = heads * dim
    layers = heads
    found = tree(layers, embed, heads, kv, dim, layers_embed)
    step = write_step(tmp_path / "0", found)
    config = str(llama(tmp_path, layers, embed, heads, kv, dim, embed))
    for layout in ("hf", "canonical"):
        convert(str(step), str(tmp_path / layout), hf_config=config, layout=layout, dtype="float32", rope=rope)
    hf, canonical = arrays(tmp_path / "hf"), arrays(tmp_path / "canonical" / "canonical")
    assert len(hf) == 3 + 9 * layers
    for n in range(layers):
        one = {k.removeprefix(f"{P}layers."): np.take(v, n, 1) for k, v in found.items() if ".layers." in k}
        q = one["self_attention.query.kernel"].reshape(embed, -1).T * np.float32(np.sqrt(np.float32(dim)))
        k = one["self_attention.key.kernel"].reshape(embed, -1).T
        if rope == "interleaved":
            q, k = halves_of(q, heads, dim), halves_of(k, kv, dim)
        v = one["self_attention.value.kernel"].reshape(embed, -1).T
        expected = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": one["self_attention.out.kernel"].reshape(-1, embed).T,
            "mlp.gate_proj": one["mlp.wi_0.kernel"].T, "mlp.up_proj": one["mlp.wi_1.kernel"].T,
            "mlp.down_proj": one["mlp.wo.kernel"].T,
            "input_layernorm": one["pre_self_attention_layer_norm.scale"],
            "post_attention_layernorm": one["post_self_attention_layer_norm.scale"],
        }  # fmt: skip
        for name, values in expected.items():
            np.testing.assert_array_equal(hf[f"model.layers.{n}.{name}.weight"], values, err_msg=name)
        at = f"model.layers.{n}."
        np.testing.assert_array_equal(canonical[f"{at}self_attn.qkv_proj.weight"], np.concatenate([q, k, v]))
        np.testing.assert_array_equal(
            canonical[f"{at}mlp.gate_up_proj.weight"],
            np.concatenate([expected["mlp.gate_proj"], expected["mlp.up_proj"]]),
        )
        np.testing.assert_array_equal(canonical[f"{at}self_attn.o_proj.weight"], expected["self_attn.o_proj"])
    np.testing.assert_array_equal(hf["lm_head.weight"], found[f"{P}logits_dense.kernel"].T)
    np.testing.assert_array_equal(hf["model.embed_tokens.weight"], found["params.params.token_embedder.embedding"])
    head = canonical["lm_head.weight"]
    assert head.shape[0] % 64 == 0
    np.testing.assert_array_equal(head[:embed], found[f"{P}logits_dense.kernel"].T)
    assert not head[embed:].any()


@pytest.mark.parametrize("dim", [2, 4, 6, 8])
def test_rotating_halves_is_rotating_neighbours_after_the_permutation(dim: int) -> None:
    """The permutation by what it is for: scores of rotated queries and keys are the same numbers in either convention."""
    rng = np.random.default_rng(dim)
    q, k = rng.standard_normal((2, dim))
    angles = rng.uniform(0, 6, dim // 2)

    def neighbours(x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        for i, a in enumerate(angles):
            out[2 * i] = x[2 * i] * np.cos(a) - x[2 * i + 1] * np.sin(a)
            out[2 * i + 1] = x[2 * i] * np.sin(a) + x[2 * i + 1] * np.cos(a)
        return out

    def halves(x: np.ndarray) -> np.ndarray:
        rotated = np.concatenate([-x[dim // 2 :], x[: dim // 2]])
        return x * np.tile(np.cos(angles), 2) + rotated * np.tile(np.sin(angles), 2)

    moved = [halves_of(x.reshape(dim, 1), 1, dim)[:, 0] for x in (q, k)]
    np.testing.assert_allclose(neighbours(q) @ k, halves(moved[0]) @ moved[1], rtol=1e-12)


def test_the_convention_is_chosen_by_the_config_and_recorded(tmp_path: Path) -> None:
    sizes = (2, 8, 2, 2, 4, 8)
    step = write_step(tmp_path / "0", tree(*sizes))
    for rope_type, expected in (("llama3", "interleaved"), ("default", "half")):
        config = str(llama(tmp_path, *sizes, rope_scaling={"rope_type": rope_type}))
        for given in (None, "interleaved", "half"):
            convert(str(step), str(tmp_path / "out"), hf_config=config, rope=given, overwrite=True)
            conventions = json.loads((tmp_path / "out/mtx2vllm.json").read_text())["conventions"]
            assert conventions["rope"] == (given or expected)
            assert ("--rope" in conventions["rope_chosen_by"]) == (given is not None)


def nearest_even(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 by its bits, to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_one_rounding_at_the_end(tmp_path: Path) -> None:
    """float32 weights, scaled, to bf16: multiplied in float32 and rounded once; plain ones rounded once."""
    sizes = (2, 12, 4, 2, 6, 20)
    rng = np.random.default_rng(7)
    found = {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in tree(*sizes).items()}
    config = llama(tmp_path, *sizes)
    step = write_step(tmp_path / "1", found)
    convert(str(step), str(tmp_path / "out"), hf_config=str(config), layout="hf")
    written = raw_tensors(tmp_path / "out")
    for n in range(2):
        q = found[f"{P}layers.self_attention.query.kernel"][:, n].reshape(12, 24).T
        scaled = (q.astype(np.float64) * np.float64(np.float32(np.sqrt(6)))).astype(
            np.float32
        )  # exact product, rounded to f32
        assert written[f"model.layers.{n}.self_attn.q_proj.weight"][2] == nearest_even(scaled).tobytes()
        up = found[f"{P}layers.mlp.wi_1.kernel"][:, n].T
        assert written[f"model.layers.{n}.mlp.up_proj.weight"][2] == nearest_even(np.ascontiguousarray(up)).tobytes()


def test_bf16_to_float32_leaves_products_unrounded(tmp_path: Path) -> None:
    sizes = (1, 12, 4, 2, 6, 20)
    rng = np.random.default_rng(8)
    found = {k: rng.standard_normal(v.shape).astype(BF16) for k, v in tree(*sizes).items()}
    step = write_step(tmp_path / "0", found)
    convert(str(step), str(tmp_path / "out"), hf_config=str(llama(tmp_path, *sizes)), layout="hf", dtype="float32")
    written = arrays(tmp_path / "out")
    q = found[f"{P}layers.self_attention.query.kernel"][:, 0].reshape(12, 24).T.astype(np.float32) * np.float32(
        np.sqrt(6)
    )
    assert written["model.layers.0.self_attn.q_proj.weight"].tobytes() == np.ascontiguousarray(q).tobytes()
    assert len(np.unique(q.view(np.uint32) & 0xFFFF)) > 1, "the products need more bits than bf16 has"
    norm = found[f"{P}decoder_norm.scale"].astype(np.float32)
    assert written["model.norm.weight"].tobytes() == norm.tobytes()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_dtype_source_keeps_each_leaf_as_it_is(tmp_path: Path, kind: str) -> None:
    sizes = (2, 8, 2, 2, 4, 8)
    found = {k: v.astype(kind) for k, v in tree(*sizes).items()}
    found[f"{P}decoder_norm.scale"] = found[f"{P}decoder_norm.scale"].astype(np.float32)
    step = write_step(tmp_path / "0", found)
    convert(str(step), str(tmp_path / "out"), hf_config=str(llama(tmp_path, *sizes)), layout="hf", dtype="source")
    written = {n: d for n, (d, _, _) in raw_tensors(tmp_path / "out").items()}
    assert written.pop("model.norm.weight") == "F32"
    assert set(written.values()) == {{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[kind]}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == kind


def test_fused_parts_of_different_widths_keep_every_bit(tmp_path: Path) -> None:
    sizes = (1, 8, 2, 2, 4, 8)
    found = {k: v.astype(BF16) for k, v in tree(*sizes).items()}
    key = f"{P}layers.self_attention.key.kernel"
    found[key] = np.random.default_rng(1).standard_normal(found[key].shape).astype(np.float32)
    step = write_step(tmp_path / "0", found)
    convert(str(step), str(tmp_path / "out"), hf_config=str(llama(tmp_path, *sizes)), dtype="source")
    qkv = arrays(tmp_path / "out/canonical")["model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv.dtype == np.float32
    np.testing.assert_array_equal(qkv[8:16], found[key][:, 0].reshape(8, 8).T)


@pytest.mark.parametrize("kind", ["multiply", "divide", "add"])
def test_arithmetic_is_float32_and_rounds_once(kind: Any) -> None:
    values = np.random.default_rng(3).standard_normal(5000).astype(BF16)
    number = 11.313708498984761
    x, by = values.astype(np.float32).astype(np.float64), np.float64(np.float32(number))
    exact = {"multiply": x * by, "divide": x / by, "add": x + by}[kind]
    expected = nearest_even(exact.astype(np.float32))
    assert arithmetic(Op(kind, number), values, BF16).tobytes() == expected.tobytes()


def test_square_experts(tmp_path: Path) -> None:
    """Mixtral with embed == ffn == experts == layers: every axis of the experts has the same length."""
    n = 4
    found = {k: v for k, v in tree(n, n, 2, 2, 2, n).items() if ".mlp." not in k}
    for at, name in enumerate(("wi_0", "wi_1", "wo")):
        found[f"{P}layers.MoeBlock_0.{name}"] = numbered(n, n, n, n, start=1000 * at)
    found[f"{P}layers.MoeBlock_0.gate.kernel"] = numbered(n, n, n, start=7)
    config = llama(
        tmp_path, n, n, 2, 2, 2, n, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=n
    )
    step = write_step(tmp_path / "0", found)
    for layout in ("hf", "canonical"):
        convert(str(step), str(tmp_path / layout), hf_config=str(config), layout=layout, dtype="float32")
    hf, canonical = arrays(tmp_path / "hf"), arrays(tmp_path / "canonical/canonical")
    gate, up, down = (found[f"{P}layers.MoeBlock_0.{name}"] for name in ("wi_0", "wi_1", "wo"))
    for layer in range(n):
        block = f"model.layers.{layer}.block_sparse_moe."
        router = found[f"{P}layers.MoeBlock_0.gate.kernel"][:, layer].T
        np.testing.assert_array_equal(hf[f"{block}gate.weight"], router)
        for x in range(n):
            np.testing.assert_array_equal(hf[f"{block}experts.{x}.w1.weight"], gate[x, layer].T)
            np.testing.assert_array_equal(hf[f"{block}experts.{x}.w3.weight"], up[x, layer].T)
            np.testing.assert_array_equal(hf[f"{block}experts.{x}.w2.weight"], down[x, layer].T)
            w13 = canonical[f"{block}experts.routed_experts.w13_weight"][x]
            np.testing.assert_array_equal(w13, np.concatenate([gate[x, layer].T, up[x, layer].T]))
            np.testing.assert_array_equal(canonical[f"{block}experts.routed_experts.w2_weight"][x], down[x, layer].T)
