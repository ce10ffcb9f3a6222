"""The tiny models that checkpoints.py makes: for each a Hugging Face config and MaxText's overrides of the same sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, Llama4Config, Llama4TextConfig, LlamaConfig, MistralConfig, PretrainedConfig


@dataclass(frozen=True)
class Model:
    """One fixture.

    maxtext: MaxText's model_name. importer: "llama" (its script llama_or_mistral_ckpt, unscanned llama4: llama4_ckpt_unscanned),
    "to_maxtext", or "init": random weights in MaxText's own tree, where it has no importer. overrides: MaxText's sizes.
    layouts: which of scanned, unscanned to write. logits: {file: more overrides};
    more_configs: {folder: the Hugging Face config that goes with such a file}.
    """

    maxtext: str
    importer: str
    hf: PretrainedConfig
    overrides: Mapping[str, Any]
    layouts: tuple[str, ...] = ("scanned",)
    logits: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"logits": {}})
    more_configs: Mapping[str, PretrainedConfig] = field(default_factory=dict)


def _variant(family: str, **text: Any) -> PretrainedConfig:
    """The config of a family next to this folder, with other sizes."""
    config = AutoConfig.from_pretrained(Path(__file__).parent.parent / family / "hf")
    for name, value in text.items():
        setattr(config.get_text_config(), name, value)
    return config


# The scaling that MaxText has built in where rope_type is llama3.1.
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    config: type[PretrainedConfig], kv_heads: int, theta: float, vocab: int = 256, **more: Any
) -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": theta}
    return config(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=12,
        intermediate_size=64,
        num_hidden_layers=3,
        vocab_size=vocab,
        rms_norm_eps=1e-5,
        max_position_embeddings=more.pop("max_position_embeddings", 512),
        tie_word_embeddings=False,
        architectures=["MistralForCausalLM" if config is MistralConfig else "LlamaForCausalLM"],
        rope_parameters=more.pop("rope", rope),
        **more,
    )


def _llama_sizes(kv_heads: int, vocab: int = 256) -> dict[str, Any]:
    return {
        "base_emb_dim": 48,
        "base_num_query_heads": 4,
        "base_num_kv_heads": kv_heads,
        "head_dim": 12,
        "base_mlp_dim": 64,
        "base_num_decoder_layers": 3,
        "vocab_size": vocab,
    }


def _llama4_text(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_hidden_layers": layers,
        "vocab_size": 256,
        "attention_chunk_size": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        **more,
    }


def _llama4_sizes(layers: int, step: int, nope: int, cycle: int, **more: Any) -> dict[str, Any]:
    return {
        "base_emb_dim": 32,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "head_dim": 8,
        "base_mlp_dim": 48,
        "base_moe_mlp_dim": 16,
        "num_experts": 4,
        "base_num_decoder_layers": layers,
        "vocab_size": 256,
        "chunk_attn_window_size": 8,
        "interleave_moe_layer_step": step,
        "nope_layer_interval": nope,
        "inhomogeneous_layer_cycle_interval": cycle,
        **more,
    }


# Four value heads for each key head, and key and value heads of different sizes: nothing can be mistaken for another.
_GDN = {
    "hidden_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_GDN_SIZES = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 16,
    "base_moe_mlp_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "rope_max_timescale": 10000,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 8,
    "gdn_key_head_dim": 8,
    "gdn_value_head_dim": 16,
    "base_num_decoder_layers": 4,
}


def _qwen35() -> PretrainedConfig:
    config = _variant("qwen3.5-moe", **_GDN)
    config.vision_config.out_hidden_size = 32
    return config


_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}

MODELS: dict[str, Model] = {
    # 272 ids: no multiple of 64, so the canonical layout pads. As many KV heads as heads, as in the real 7B.
    "llama2": Model("llama2-7b", "llama", _llama(LlamaConfig, 4, 1e4, 272), _llama_sizes(4, 272)),
    "llama3": Model("llama3-8b", "llama", _llama(LlamaConfig, 2, 5e5), _llama_sizes(2)),
    # MaxText's llama3.3 rotates halves without scaling; with rope_type=llama3.1 the same weights mean another function.
    "llama3.3": Model(
        "llama3.3-70b",
        "llama",
        _llama(LlamaConfig, 2, 5e5),
        _llama_sizes(2),
        logits={"logits": {}, "logits_rope_llama3.1": {"rope_type": "llama3.1"}},
        more_configs={"hf_rope_llama3.1": _llama(LlamaConfig, 2, 5e5, rope=_SCALED, max_position_embeddings=65536)},
    ),
    "mistral": Model("mistral-7b", "llama", _llama(MistralConfig, 2, 1e6, sliding_window=None), _llama_sizes(2)),
    # Every layer MoE, qk norm, NoPE every fourth: Scout. Its config is the multimodal one, with names `language_model.model.*`.
    "llama4": Model(
        "llama4-17b-16e",
        "llama",
        Llama4Config(
            text_config=_llama4_text(4, rope_parameters=_SCALED, max_position_embeddings=65536), vision_config=_VISION
        ),
        _llama4_sizes(4, 1, 4, 4),
        layouts=("scanned", "unscanned"),
    ),
    # Dense and MoE layers alternate, no qk norm: Maverick. Text-only names `model.*`.
    "llama4-dense": Model(
        "llama4-17b-128e",
        "llama",
        Llama4TextConfig(**_llama4_text(8, interleave_moe_layer_step=2, use_qk_norm=False)),
        _llama4_sizes(8, 2, 4, 4),
    ),
    # MoE every third, NoPE every second layer: the cycle is lcm(2, 3).
    "llama4-cycle6": Model(
        "llama4-17b-128e",
        "llama",
        Llama4TextConfig(**_llama4_text(12, interleave_moe_layer_step=3, no_rope_layer_interval=2, use_qk_norm=False)),
        _llama4_sizes(12, 3, 2, 6),
    ),
    "qwen3-next-gdn": Model(
        "qwen3-next-80b-a3b", "to_maxtext", _variant("qwen3-next", **_GDN), _GDN_SIZES, layouts=("scanned", "unscanned")
    ),
    # Text positions are the same on all three axes of mrope, so the plain rotary is the same function.
    "qwen3.5-moe-gdn": Model(
        "qwen3.5-35b-a3b",
        "to_maxtext",
        _qwen35(),
        {**_GDN_SIZES, "use_mrope": False},
        layouts=("scanned", "unscanned"),
    ),
    # The 27b's trait: query_pre_attn_scalar (12 = hidden / heads) is not head_dim (16).
    "gemma2-27b": Model(
        "gemma2-27b",
        "to_maxtext",
        _variant(
            "gemma2",
            num_attention_heads=4,
            head_dim=16,
            query_pre_attn_scalar=12,
            intermediate_size=64,
            num_hidden_layers=4,
        ),
        {
            "base_emb_dim": 48,
            "base_num_query_heads": 4,
            "base_num_kv_heads": 2,
            "head_dim": 16,
            "base_mlp_dim": 64,
            "base_num_decoder_layers": 2,
            "vocab_size": 256,
        },
    ),
    # Six layers: one block of four and a rest of two, for which MaxText has no importer. Saved by one device.
    "qwen3-next-rest": Model(
        "qwen3-next-80b-a3b",
        "init",
        _variant(
            "qwen3-next",
            **{
                **_GDN,
                "num_hidden_layers": 6,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2,
            },
        ),
        {**_GDN_SIZES, "base_num_decoder_layers": 6},
    ),
}
