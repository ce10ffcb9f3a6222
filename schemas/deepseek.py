"""DeepSeek V3: multi-head latent attention (MLA), the first layers dense, then experts with a shared one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mtx2vllm.schemas import blocks
from mtx2vllm.schemas.rules import ConfigError, Model, Rule, Schema, Stack, need, stack

_MLA = (
    *blocks.PRE_POST_NORMS,
    blocks.linear("self_attention.wq_a", "self_attn.q_a_proj", "embed q_rank -> q_rank embed"),
    blocks.norm("self_attention.q_norm", "self_attn.q_a_layernorm", "q_rank"),
    blocks.linear("self_attention.wq_b", "self_attn.q_b_proj", "q_rank heads qk -> (heads qk) q_rank"),
    blocks.linear("self_attention.wkv_a", "self_attn.kv_a_proj_with_mqa", "embed kv_a -> kv_a embed"),
    blocks.norm("self_attention.kv_norm", "self_attn.kv_a_layernorm", "kv_rank"),
    blocks.linear("self_attention.wkv_b", "self_attn.kv_b_proj", "kv_rank heads kv -> (heads kv) kv_rank"),
    blocks.linear("self_attention.out", "self_attn.o_proj", "heads v embed -> embed (heads v)"),
)
_BLOCK = "DeepSeekMoeBlock_0"
_MOE = (
    blocks.router(f"{_BLOCK}.MoeBlock_0.gate"),
    # A scanned MoEBiasVar has its layer axis first; older trees hold the bias among the parameters, layer axis 1.
    Rule(f"{_BLOCK}.MoeBlock_0.gate.bias", "mlp.gate.e_score_correction_bias", "expert -> expert", layer_axis=0),
    *blocks.experts(f"{_BLOCK}.MoeBlock_0"),
    *blocks.mlp(f"{_BLOCK}.shared_experts", "mlp.shared_experts", "shared_ffn"),
)


def _stacks(model: Model) -> tuple[Stack, ...]:
    dense = need(model.config, "first_k_dense_replace", 0)
    if dense > model.layers:
        raise ConfigError(f"first_k_dense_replace is {dense}, more than num_hidden_layers ({model.layers})")
    moe = np.arange(model.layers - dense)
    return (
        stack("decoder.dense_layers", "decoder.dense_layers_{}", np.arange(dense), (*_MLA, *blocks.mlp())),
        stack("decoder.moe_layers", "decoder.moe_layers_{}", dense + moe, (*_MLA, *_MOE), numbers=moe),
    )


def _derive(sizes: dict[str, int], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    nope, rope = need(config, "qk_nope_head_dim"), need(config, "qk_rope_head_dim")
    sizes.update(
        qk=nope + rope,
        kv_a=sizes["kv_rank"] + rope,
        kv=nope + sizes["v"],
        shared_ffn=sizes["expert_ffn"] * need(config, "n_shared_experts"),
    )
    return {}


DEEPSEEK3 = Schema(
    family="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    text="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    sizes={
        "embed": "hidden_size",
        "vocab": "vocab_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "q_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "v": "v_head_dim",
        "expert": "n_routed_experts",
        "expert_ffn": "moe_intermediate_size",
    },
    derive=_derive,
    stacks=_stacks,
    top=blocks.top(),
    flags=blocks.tied,
    float32=("mlp.gate.e_score_correction_bias",),
    drops=((r"(decoder\.)?mtp_block\..*", "the multi-token prediction head is not part of the served model"),),
    # transformers leaves these out of config.json; without them vLLM makes no score-correction bias.
    fixed={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ambiguous="where DeepSeek's head size splits cannot be told from shapes",
)
