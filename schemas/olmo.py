"""OLMo 3: post-norms only, and query and key norms over the full width."""

from collections.abc import Mapping
from typing import Any

from mtx2vllm.schemas import blocks
from mtx2vllm.schemas.rules import Schema, cycle, expect_pattern

_LAYER = (
    *blocks.attention("attention"),
    blocks.norm("attention.query_norm", "self_attn.q_norm", "width"),
    blocks.norm("attention.key_norm", "self_attn.k_norm", "kv_width"),
    *blocks.mlp(),
    blocks.norm("post_self_attention_layer_norm", "post_attention_layernorm"),
    blocks.norm("post_mlp_layer_norm", "post_feedforward_layernorm"),
)


def _derive(sizes: dict[str, int], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    expect_pattern(config, (*["sliding_attention"] * 3, "full_attention"), "MaxText's cycle of 4 layers")
    sizes.update(width=sizes["heads"] * sizes["head_dim"], kv_width=sizes["kv_heads"] * sizes["head_dim"])
    return {}


OLMO3 = Schema(
    family="olmo3",
    architectures=("Olmo3ForCausalLM",),
    text="Olmo3ForCausalLM",
    model_type="olmo3",
    sizes=blocks.DENSE_SIZES,
    derive=_derive,
    stacks=cycle(lambda *_: _LAYER, 4),
    top=blocks.top(),
    flags=blocks.tied,
)
