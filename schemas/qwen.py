"""Qwen 2.5, Qwen 3 and Qwen 3 MoE."""

from mtx2vllm.schemas import blocks
from mtx2vllm.schemas.rules import Schema, plain

_ATTENTION = (*blocks.PRE_POST_NORMS, *blocks.attention())

QWEN2 = Schema(
    family="qwen2",
    architectures=("Qwen2ForCausalLM",),
    text="Qwen2ForCausalLM",
    model_type="qwen2",
    sizes=blocks.DENSE_SIZES,
    stacks=plain((*_ATTENTION, *blocks.qkv_bias(), *blocks.mlp())),
    top=blocks.top(),
    flags=blocks.tied,
)

QWEN3 = Schema(
    family="qwen3",
    architectures=("Qwen3ForCausalLM",),
    text="Qwen3ForCausalLM",
    model_type="qwen3",
    sizes=blocks.DENSE_SIZES,
    stacks=plain((*_ATTENTION, *blocks.qk_norm(), *blocks.mlp())),
    top=blocks.top(),
    flags=blocks.tied,
)

QWEN3_MOE = Schema(
    family="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    text="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    sizes={
        **blocks.DENSE_SIZES,
        "expert": "num_experts|num_local_experts",
        "expert_ffn": "moe_intermediate_size",
    },
    stacks=plain((*_ATTENTION, *blocks.qk_norm(), blocks.router("moe_block.gate"), *blocks.experts("moe_block"))),
    top=blocks.top(),
    flags=blocks.tied,
)
