"""Qwen 3.5 MoE and Qwen 3 Next: three layers of gated delta net (GDN), then one of full attention.

In MaxText both hold q, k, v, z of one key head side by side (`in_proj_qkvz`, columns (key head, [q, k, v, z])). Qwen 3
Next keeps that order in Hugging Face; Qwen 3.5 has [all q; all k; all v] and z apart. r = value heads per key head.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mtx2vllm.schemas import blocks
from mtx2vllm.schemas.rules import ConfigError, Model, Rule, Schema, Stack, cycle, expect_pattern, stack

CYCLE = 4

_NORMS = (
    blocks.norm("input_layernorm", "input_layernorm"),
    blocks.norm("post_attention_layernorm", "post_attention_layernorm"),
)
_MOE = (
    blocks.router("mlp.routed_experts.gate"),
    *blocks.experts("mlp.routed_experts"),
    *blocks.mlp("mlp.shared_expert", "mlp.shared_expert", "shared_ffn"),
    blocks.linear("mlp.shared_expert_gate", "mlp.shared_expert_gate", "embed one -> one embed"),
)
_FULL = (
    *_NORMS,
    blocks.linear("attention.attention.query", "self_attn.q_proj", "embed heads gated -> (heads gated) embed"),
    blocks.linear(
        "attention.attention.key", "self_attn.k_proj", "embed kv_heads head_dim -> (kv_heads head_dim) embed"
    ),
    blocks.linear(
        "attention.attention.value", "self_attn.v_proj", "embed kv_heads head_dim -> (kv_heads head_dim) embed"
    ),
    blocks.linear("attention.attention.out", "self_attn.o_proj", "(heads head_dim) embed -> embed (heads head_dim)"),
    *blocks.qk_norm("attention.attention"),
    *_MOE,
)
_LINEAR = (
    *_NORMS,
    Rule("attention.A_log", "linear_attn.A_log", "nv -> nv"),
    Rule("attention.dt_bias", "linear_attn.dt_bias", "nv -> nv"),
    Rule("attention.conv1d.kernel", "linear_attn.conv1d.weight", "k one channel -> channel one k"),
    blocks.norm("attention.norm.rms_norm", "linear_attn.norm", "dv"),
    blocks.linear("attention.out_proj", "linear_attn.out_proj", "value embed -> embed value"),
    *_MOE,
)
_QKVZ = ("attention.in_proj_qkvz.kernel", "embed (nk chunk) -> (nk chunk) embed")
_BA = ("attention.in_proj_ba.kernel", "embed (nk pair) -> (nk pair) embed")
_SPLIT = (
    *(
        Rule(_QKVZ[0], "linear_attn.in_proj_qkv.weight", _QKVZ[1], join="chunk", part=("chunk", part))
        for part in ("q", "k", "v")
    ),
    Rule(_QKVZ[0], "linear_attn.in_proj_z.weight", _QKVZ[1], part=("chunk", "z")),
    Rule(_BA[0], "linear_attn.in_proj_b.weight", _BA[1], part=("pair", "b")),
    Rule(_BA[0], "linear_attn.in_proj_a.weight", _BA[1], part=("pair", "a")),
)
_WHOLE = (
    Rule(_QKVZ[0], "linear_attn.in_proj_qkvz.weight", "embed (nk chunk) -> (nk chunk) embed"),
    Rule(_BA[0], "linear_attn.in_proj_ba.weight", "embed (nk pair) -> (nk pair) embed"),
)
_SIZES = {
    **{axis: key for axis, key in blocks.DENSE_SIZES.items() if axis != "ffn"},
    "expert": "num_experts|num_local_experts",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
    "nk": "linear_num_key_heads",
    "nv": "linear_num_value_heads",
    "dk": "linear_key_head_dim",
    "dv": "linear_value_head_dim",
    "k": "linear_conv_kernel_dim",
}


def _derive(sizes: dict[str, int], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    expect_pattern(config, (*["linear_attention"] * (CYCLE - 1), "full_attention"), "MaxText's cycle of 4 layers")
    if (interval := config.get("full_attention_interval")) not in (None, CYCLE):
        raise ConfigError(f"full_attention_interval is {interval!r}, and MaxText's cycle has {CYCLE} layers")
    nk, nv, dk, dv = (sizes[a] for a in ("nk", "nv", "dk", "dv"))
    if nv % nk:
        raise ConfigError(f"linear_num_value_heads ({nv}) is no multiple of linear_num_key_heads ({nk})")
    r = nv // nk
    sizes.update(
        one=1,
        gated=2 * sizes["head_dim"],
        value=nv * dv,
        channel=2 * nk * dk + nv * dv,
        chunk=2 * dk + 2 * r * dv,
        pair=2 * r,
    )
    return {
        "q": (0, dk),
        "k": (dk, 2 * dk),
        "v": (2 * dk, 2 * dk + r * dv),
        "z": (2 * dk + r * dv, 2 * dk + 2 * r * dv),
        "b": (0, r),
        "a": (r, 2 * r),
    }


def _next_stacks(model: Model) -> tuple[Stack, ...]:
    blocks_, rest = divmod(model.layers, CYCLE)
    first = np.arange(blocks_)[:, None] * CYCLE
    linear = (*_LINEAR, *_WHOLE)
    name = "decoder.layers_{}"
    tail = (
        ()
        if not rest
        else (stack("decoder.layers_remainder.local_layers", name, blocks_ * CYCLE + np.arange(rest), linear),)
    )
    return (
        stack("decoder.layers.local_layers", name, first + np.arange(CYCLE - 1), linear),
        stack("decoder.layers.global_layer", name, first[:, 0] + CYCLE - 1, _FULL),
        *tail,
    )


QWEN3_5_MOE = Schema(
    family="qwen3_5_moe",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    text="Qwen3_5MoeForCausalLM",
    wrapper="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe_text",
    sizes=_SIZES,
    derive=_derive,
    stacks=cycle(lambda _, k: _FULL if k == CYCLE - 1 else (*_LINEAR, *_SPLIT), CYCLE, "layer_"),
    top=blocks.top(),
    flags=blocks.tied,
    float32=("linear_attn.A_log",),
    wrapper_names=("model.language_model.", ""),
    ambiguous="how many key heads Qwen 3.5's linear attention has cannot be told from shapes",
)

QWEN3_NEXT = Schema(
    family="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    text="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    sizes=_SIZES,
    derive=_derive,
    stacks=_next_stacks,
    top=blocks.top(),
    flags=blocks.tied,
    float32=("linear_attn.A_log",),
    ambiguous="an unscanned Qwen 3 Next tree has the same keys as Qwen 3.5",
)
