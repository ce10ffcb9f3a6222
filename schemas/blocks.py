"""Rules that several families share: the top of the tree, attention, and the feed-forward block."""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

import ml_dtypes
import numpy as np

from mtx2vllm.schemas.rules import ConfigError, Rule, Value

NORM_MINUS_ONE = Value("add", lambda _: -1.0)  # MaxText's Gemma norms hold 1 + w
# MaxText folds 1/sqrt(head_dim) into the query's kernel.
QUERY_SCALE = Value("multiply", lambda model: sqrt(model.sizes["head_dim"]))
# MaxText's embedding table of Gemma 2 and 4 is multiplied by sqrt(hidden size), of Gemma 3 by its bfloat16 rounding.
EMBED_SCALE = Value("divide", lambda model: sqrt(model.sizes["embed"]))
EMBED_SCALE_BF16 = Value(
    "divide", lambda model: float(np.float32(sqrt(model.sizes["embed"])).astype(ml_dtypes.bfloat16))
)


def norm(source: str, target: str, axis: str = "embed", value: Value | None = None, when: str | None = None) -> Rule:
    """A norm's scale, as it is."""
    return Rule(f"{source}.scale", f"{target}.weight", f"{axis} -> {axis}", value, when=when)


def linear(source: str, target: str, axes: str, when: str | None = None) -> Rule:
    """A kernel (in, out), transposed to (out, in)."""
    return Rule(f"{source}.kernel", f"{target}.weight", axes, when=when)


def top(value: Value | None = None, norm_value: Value | None = None, head: bool = True) -> tuple[Rule, ...]:
    """Embedding, final norm, and the head where it is not tied."""
    rules = (
        Rule("token_embedder.embedding", "model.embed_tokens.weight", "vocab embed -> vocab embed", value),
        norm("decoder.decoder_norm", "model.norm", value=norm_value),
    )
    if not head:
        return rules
    return (*rules, Rule("decoder.logits_dense.kernel", "lm_head.weight", "embed vocab -> vocab embed", when="!tied"))


def attention(
    source: str = "self_attention",
    query: Value | None = None,
    interleaved: str | None = None,
    kv: str = "kv_heads",
    dim: str = "head_dim",
    value: bool = True,
) -> tuple[Rule, ...]:
    """q, k, v (unless `value` is False: keys serve as values) and o. Where the flag `interleaved` holds, q and k are
    de-interleaved: MaxText rotates neighbours (2i, 2i+1), Hugging Face rotates halves, so the rows of each head become
    [even; odd]."""
    rules = []
    for name, axis, scale in (("query", "heads", query), ("key", kv, None)):
        rows = f"embed {axis} {dim} -> ({axis} {dim}) embed"
        rule = Rule(f"{source}.{name}.kernel", f"self_attn.{name[0]}_proj.weight", rows, scale)
        if interleaved is None:
            rules.append(rule)
        else:
            pairs = f"embed {axis} (half two) -> ({axis} two half) embed"
            rules += [replace(rule, when=f"!{interleaved}"), replace(rule, axes=pairs, when=interleaved)]
    if value:
        rules.append(linear(f"{source}.value", "self_attn.v_proj", f"embed {kv} {dim} -> ({kv} {dim}) embed"))
    return (*rules, linear(f"{source}.out", "self_attn.o_proj", f"heads {dim} embed -> embed (heads {dim})"))


def qk_norm(source: str = "self_attention", value: Value | None = None, dim: str = "head_dim") -> tuple[Rule, ...]:
    """Norms of every query and key head."""
    return (
        norm(f"{source}.query_norm", "self_attn.q_norm", dim, value),
        norm(f"{source}.key_norm", "self_attn.k_norm", dim, value),
    )


def qkv_bias(source: str = "self_attention", when: str | None = None) -> tuple[Rule, ...]:
    """Biases of q, k and v, flattened."""
    return tuple(
        Rule(
            f"{source}.{name}.bias", f"self_attn.{letter}_proj.bias", f"{axis} head_dim -> ({axis} head_dim)", when=when
        )
        for name, letter, axis in (("query", "q", "heads"), ("key", "k", "kv_heads"), ("value", "v", "kv_heads"))
    )


def mlp(source: str = "mlp", target: str = "mlp", ffn: str = "ffn", when: str | None = None) -> tuple[Rule, ...]:
    """A gated feed-forward block: wi_0 is the gate, wi_1 up, wo down."""
    return (
        linear(f"{source}.wi_0", f"{target}.gate_proj", f"embed {ffn} -> {ffn} embed", when),
        linear(f"{source}.wi_1", f"{target}.up_proj", f"embed {ffn} -> {ffn} embed", when),
        linear(f"{source}.wo", f"{target}.down_proj", f"{ffn} embed -> embed {ffn}", when),
    )


def experts(
    source: str, target: str = "mlp.experts", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Rule, ...]:
    """Experts, one tensor each."""
    gate, up, down = (f"{target}.{{expert}}.{name}.weight" for name in names)
    return (
        Rule(f"{source}.wi_0", gate, "expert embed expert_ffn -> expert_ffn embed"),
        Rule(f"{source}.wi_1", up, "expert embed expert_ffn -> expert_ffn embed"),
        Rule(f"{source}.wo", down, "expert expert_ffn embed -> embed expert_ffn"),
    )


def router(source: str, target: str = "mlp.gate") -> Rule:
    """The router's kernel, transposed."""
    return linear(source, target, "embed expert -> expert embed")


PRE_POST_NORMS = (
    norm("pre_self_attention_layer_norm", "input_layernorm"),
    norm("post_self_attention_layer_norm", "post_attention_layernorm"),
)

DENSE_SIZES: Mapping[str, str] = {
    "embed": "hidden_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
}


def tied(config: Mapping[str, Any]) -> frozenset[str]:
    """The flag `tied`, by Hugging Face's key."""
    return frozenset({"tied"} if config.get("tie_word_embeddings") else ())


def halves(sizes: dict[str, int], _: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The axes of an interleaved rotary head."""
    if sizes["head_dim"] % 2:
        raise ConfigError(f"head_dim is {sizes['head_dim']}, and a rotary head needs an even one")
    sizes.update(half=sizes["head_dim"] // 2, two=2)
    return {}
