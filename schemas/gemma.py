"""Gemma 2, 3 and 4. MaxText's Gemma 2 and 3 norms hold 1 + w; embeddings are stored multiplied by sqrt(hidden size)."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np

from mtx2vllm.schemas import blocks
from mtx2vllm.schemas.rules import (
    ConfigError,
    Model,
    Rule,
    Schema,
    Stack,
    Value,
    cycle,
    expect_pattern,
    need,
    stack,
)

_MINUS = blocks.NORM_MINUS_ONE


def _norms(value: Value | None, suffix: str = "") -> tuple[Rule, ...]:
    return tuple(
        blocks.norm(source + suffix, target, value=value)
        for source, target in (
            ("pre_self_attention_norm", "input_layernorm"),
            ("post_self_attention_norm", "post_attention_layernorm"),
            ("pre_ffw_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        )
    )


# Attention's scale 1/sqrt(query_pre_attn_scalar) is folded into the query; for the 27b size (144, head_dim 128) this is
# the factor that keeps the function.
_GEMMA2_QUERY = Value("multiply", lambda model: sqrt(model.config["query_pre_attn_scalar"]))


def _gemma2_derive(_: dict[str, int], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    expect_pattern(config, ("sliding_attention", "full_attention"), "MaxText's pairs of layers")
    scalar = config.get("query_pre_attn_scalar")
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or not 0 < scalar < float("inf"):
        raise ConfigError(f"query_pre_attn_scalar is {scalar!r:.80}, where a positive number was expected")
    return {}


def _gemma2_stacks(model: Model) -> tuple[Stack, ...]:
    if model.layers % 2:
        raise ConfigError(f"num_hidden_layers is {model.layers}, and MaxText's Gemma 2 has its layers in pairs")
    pairs = np.arange(model.layers // 2)
    return tuple(
        stack(
            "decoder.layers",
            "decoder.layers_{}",
            2 * pairs + k,
            (
                *_norms(_MINUS, kind),
                *blocks.attention(f"self_attention{kind}", query=_GEMMA2_QUERY),
                *blocks.mlp(f"mlp{kind}"),
            ),
            numbers=pairs,
        )
        for k, kind in enumerate(("_local", "_global"))
    )


GEMMA2 = Schema(
    family="gemma2",
    architectures=("Gemma2ForCausalLM",),
    text="Gemma2ForCausalLM",
    model_type="gemma2",
    sizes=blocks.DENSE_SIZES,
    derive=_gemma2_derive,
    stacks=_gemma2_stacks,
    top=blocks.top(blocks.EMBED_SCALE, _MINUS, head=False),
    flags=lambda _: frozenset({"tied"}),
    ambiguous="Gemma 2's query_pre_attn_scalar stands in its config alone",
)

_FIVE_TO_ONE = (*["sliding_attention"] * 5, "full_attention")


def _gemma3_derive(_: dict[str, int], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    expect_pattern(config, _FIVE_TO_ONE, "MaxText's cycle of 6 layers")
    return {}


GEMMA3 = Schema(
    family="gemma3",
    architectures=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    text="Gemma3ForCausalLM",
    wrapper="Gemma3ForConditionalGeneration",
    model_type="gemma3_text",
    sizes=blocks.DENSE_SIZES,
    derive=_gemma3_derive,
    stacks=cycle(lambda *_: (*_norms(_MINUS), *blocks.attention(), *blocks.qk_norm(value=_MINUS), *blocks.mlp()), 6),
    top=blocks.top(blocks.EMBED_SCALE_BF16, _MINUS, head=False),
    flags=lambda _: frozenset({"tied"}),
    wrapper_names=("language_model.model.", ""),
)

_GEMMA4_CYCLE = 6
_SCALAR = Rule("layer_scalar", "layer_scalar", "one -> one")
_MOE = "mlp.moe_block.MoeBlock_0"
_GEMMA4_MOE = (
    *blocks.mlp("mlp.moe_block.shared_experts"),
    blocks.router(f"{_MOE}.gate", "router.proj"),
    Rule("mlp.pre_forward_scale_2", "router.scale", "embed -> embed"),
    Rule(f"{_MOE}.per_expert_scale", "router.per_expert_scale", "expert -> expert"),
    *(
        Rule(
            f"{_MOE}.{wi}",
            "experts.gate_up_proj",
            "expert embed expert_ffn -> expert expert_ffn embed",
            join="expert_ffn",
        )
        for wi in ("wi_0", "wi_1")
    ),
    Rule(f"{_MOE}.wo", "experts.down_proj", "expert expert_ffn embed -> expert embed expert_ffn"),
    *(
        blocks.norm(f"mlp.{name}", name)
        for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    ),
)


def _gemma4_layer(model: Model, full: bool) -> tuple[Rule, ...]:
    kv, dim = ("global_kv_heads", "global_head_dim") if full else ("kv_heads", "head_dim")
    return (
        *_norms(None),
        _SCALAR,
        *blocks.attention(kv=kv, dim=dim, value=not (full and "k_eq_v" in model.flags)),
        *blocks.qk_norm(dim=dim),
        *(_GEMMA4_MOE if "moe" in model.flags else blocks.mlp()),
    )


def _gemma4_stacks(model: Model) -> tuple[Stack, ...]:
    count, rest = divmod(model.layers, _GEMMA4_CYCLE)
    first = np.arange(count)[:, None] * _GEMMA4_CYCLE
    name = "decoder.layers_{}"
    local, full = _gemma4_layer(model, False), _gemma4_layer(model, True)
    tail = (
        ()
        if not rest
        else (stack("decoder.layers_remainder.local_layers", name, count * _GEMMA4_CYCLE + np.arange(rest), local),)
    )
    return (
        stack("decoder.scanned_blocks.local_layers", name, first + np.arange(_GEMMA4_CYCLE - 1), local),
        stack("decoder.scanned_blocks.global_layer", name, first[:, 0] + _GEMMA4_CYCLE - 1, full),
        *tail,
    )


def _gemma4_flags(config: Mapping[str, Any]) -> frozenset[str]:
    flags = {"tied"}
    if config.get("attention_k_eq_v"):
        flags.add("k_eq_v")
    if config.get("enable_moe_block"):
        flags.add("moe")
    return frozenset(flags)


def _gemma4_derive(sizes: dict[str, int], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Full-attention layers have their own head size and KV heads: in `per_layer_config` (keyed by layer number) as
    recent transformers write it, or in `global_head_dim` and `num_global_key_value_heads`."""
    expect_pattern(config, _FIVE_TO_ONE, "MaxText's cycle of 6 layers")
    layers = list(dict(config.get("per_layer_config") or {}).values())
    own = {key: value for key, value in (layers[0] if layers else {}).items() if value is not None}
    if config.get("global_head_dim") is not None:
        own.setdefault("head_dim", config["global_head_dim"])
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        own.setdefault("num_key_value_heads", config["num_global_key_value_heads"])
    sizes.update(
        one=1,
        global_head_dim=need(own, "head_dim") if "head_dim" in own else sizes["head_dim"],
        global_kv_heads=need(own, "num_key_value_heads") if "num_key_value_heads" in own else sizes["kv_heads"],
    )
    if config.get("enable_moe_block"):
        sizes.update(expert=need(config, "num_experts"), expert_ffn=need(config, "moe_intermediate_size"))
    return {}


GEMMA4 = Schema(
    family="gemma4",
    architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
    text="Gemma4ForCausalLM",
    wrapper="Gemma4ForConditionalGeneration",
    model_type="gemma4_text",
    sizes=blocks.DENSE_SIZES,
    derive=_gemma4_derive,
    stacks=_gemma4_stacks,
    top=blocks.top(blocks.EMBED_SCALE, head=False),
    flags=_gemma4_flags,
    wrapper_names=("model.language_model.", ""),
    ambiguous="Gemma 4's layer types stand in its config alone",
)
