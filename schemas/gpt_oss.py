"""gpt-oss: biases everywhere, attention sinks, and experts whose gate and up columns alternate."""

from collections.abc import Mapping
from typing import Any

from mtx2vllm.schemas import blocks
from mtx2vllm.schemas.rules import Rule, Schema, cycle, expect_pattern

_A, _M = "GptOssAttention", "GptOssMlp"

_LAYER = (
    *blocks.PRE_POST_NORMS,
    *blocks.attention(_A),
    *blocks.qkv_bias(_A),
    Rule(f"{_A}.out.bias", "self_attn.o_proj.bias", "embed -> embed"),
    Rule(f"{_A}.sinks", "self_attn.sinks", "heads -> heads"),
    blocks.router(f"{_M}.gate", "mlp.router"),
    Rule(f"{_M}.gate.bias", "mlp.router.bias", "expert -> expert"),
    *(
        Rule(f"{_M}.{wi}", "mlp.experts.gate_up_proj", "expert embed ffn -> expert embed ffn", weave="ffn")
        for wi in ("wi_0", "wi_1")
    ),
    *(
        Rule(f"{_M}.{wi}_bias", "mlp.experts.gate_up_proj_bias", "expert ffn -> expert ffn", weave="ffn")
        for wi in ("wi_0", "wi_1")
    ),
    Rule(f"{_M}.wo", "mlp.experts.down_proj", "expert ffn embed -> expert ffn embed"),
    Rule(f"{_M}.wo_bias", "mlp.experts.down_proj_bias", "expert embed -> expert embed"),
)


def _derive(_: dict[str, int], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    expect_pattern(config, ("sliding_attention", "full_attention"), "MaxText's pairs of layers")
    return {}


GPT_OSS = Schema(
    family="gpt_oss",
    architectures=("GptOssForCausalLM",),
    text="GptOssForCausalLM",
    model_type="gpt_oss",
    sizes={**blocks.DENSE_SIZES, "expert": "num_local_experts|num_experts"},
    derive=_derive,
    stacks=cycle(lambda *_: _LAYER, 2),
    top=blocks.top(),
    flags=blocks.tied,
)
