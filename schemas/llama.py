"""Llama 2, 3, 3.1, 3.3 and Mistral; Mixtral; Llama 4.

MaxText's rotary embedding interleaves neighbours for llama3.1 only (its attention asks whether the model's name starts
with "llama3.1"); llama2, llama3, llama3.3 and mistral rotate halves, as Hugging Face does. A checkpoint does not tell.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any

from mtx2vllm.schemas import blocks
from mtx2vllm.schemas.rules import ConfigError, Model, Rule, Schema, Stack, cycle, need, plain

INTERLEAVED = "interleaved"
_ATTENTION = (*blocks.PRE_POST_NORMS, *blocks.attention(query=blocks.QUERY_SCALE, interleaved=INTERLEAVED))
_AMBIGUOUS = "Llama's rotary convention (interleaved in llama3.1, halves elsewhere) cannot be told from keys and shapes"

LLAMA = Schema(
    family="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    text="LlamaForCausalLM",
    model_type="llama",
    sizes=blocks.DENSE_SIZES,
    derive=blocks.halves,
    stacks=plain((*_ATTENTION, *blocks.mlp())),
    top=blocks.top(),
    flags=blocks.tied,
    ambiguous=_AMBIGUOUS,
)

MIXTRAL = Schema(
    family="mixtral",
    architectures=("MixtralForCausalLM",),
    text="MixtralForCausalLM",
    model_type="mixtral",
    sizes={**blocks.DENSE_SIZES, "expert": "num_local_experts", "expert_ffn": "intermediate_size"},
    derive=blocks.halves,
    stacks=plain(
        (
            *_ATTENTION,
            blocks.router("MoeBlock_0.gate", "block_sparse_moe.gate"),
            *blocks.experts("MoeBlock_0", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        )
    ),
    top=blocks.top(),
    flags=blocks.tied,
)

# Hugging Face holds Llama 4's experts fused and not transposed: gate_up_proj (expert, embed, [gate, up]).
# Both sides rotate neighbours; a head's rows are spelled out as pairs because vLLM's own layout has halves (see fused).
_LLAMA4_ATTENTION = (
    *blocks.PRE_POST_NORMS,
    *(
        replace(rule, axes=f"embed {axis} (half two) -> ({axis} half two) embed")
        for rule, axis in zip(blocks.attention()[:2], ("heads", "kv_heads"), strict=True)
    ),
    *blocks.attention()[2:],
)
_LLAMA4_MOE = (
    blocks.router("Llama4MoEBlock_0.MoeBlock_0.gate", "feed_forward.router"),
    Rule(
        "Llama4MoEBlock_0.MoeBlock_0.wi_0",
        "feed_forward.experts.gate_up_proj",
        "expert embed expert_ffn -> expert embed expert_ffn",
        join="expert_ffn",
    ),
    Rule(
        "Llama4MoEBlock_0.MoeBlock_0.wi_1",
        "feed_forward.experts.gate_up_proj",
        "expert embed expert_ffn -> expert embed expert_ffn",
        join="expert_ffn",
    ),
    Rule(
        "Llama4MoEBlock_0.MoeBlock_0.wo",
        "feed_forward.experts.down_proj",
        "expert expert_ffn embed -> expert expert_ffn embed",
    ),
    *blocks.mlp("Llama4MoEBlock_0.shared_experts", "feed_forward.shared_expert", "expert_ffn"),
)


def _llama4_step(config: Mapping[str, Any]) -> int:
    step = need({"interleave_moe_layer_step": 1} | dict(config), "interleave_moe_layer_step")
    listed = config.get("moe_layers")
    if isinstance(listed, list) and any((n + 1) % step for n in listed):
        raise ConfigError(f"moe_layers {listed!r:.80} do not follow interleave_moe_layer_step {step}")
    return step


def _nope_interval(config: Mapping[str, Any]) -> int:
    """Every how many layers one has no rotary embedding (MaxText's nope_layer_interval), by the list where there is one:
    a config may carry the default interval beside a list that says otherwise."""
    listed = config.get("no_rope_layers")
    if isinstance(listed, list) and 0 in listed:
        every = listed.index(0) + 1
        if any(bool(rope) == ((n + 1) % every == 0) for n, rope in enumerate(listed)):
            raise ConfigError(f"no_rope_layers {listed!r:.80} has no period, and MaxText knows no such model")
        return every
    return need({"no_rope_layer_interval": 4} | dict(config), "no_rope_layer_interval")


def _llama4_stacks(model: Model) -> tuple[Stack, ...]:
    """MaxText scans blocks of layers after which both patterns repeat: rotary or not, experts or dense."""
    return cycle(_llama4_rules, lcm(_nope_interval(model.config), _llama4_step(model.config)))(model)


def _llama4_rules(model: Model, layer: int) -> tuple[Rule, ...]:
    if (layer + 1) % _llama4_step(model.config) == 0:
        return (*_LLAMA4_ATTENTION, *_LLAMA4_MOE)
    return (*_LLAMA4_ATTENTION, *blocks.mlp(target="feed_forward"))


LLAMA4 = Schema(
    family="llama4",
    architectures=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    text="Llama4ForCausalLM",
    wrapper="Llama4ForConditionalGeneration",
    model_type="llama4_text",
    sizes={
        **blocks.DENSE_SIZES,
        "ffn": "intermediate_size_mlp",
        "expert": "num_local_experts",
        "expert_ffn": "intermediate_size",
    },
    derive=blocks.halves,
    stacks=_llama4_stacks,
    top=blocks.top(),
    flags=blocks.tied,
    wrapper_names=("language_model.model.", "language_model."),
    ambiguous="the interleaving of Llama 4's dense and expert layers stands in its config alone",
)
