"""From a Hugging Face config to a `Model`: sizes in the words of the rules, and a schema."""

from collections.abc import Mapping
from typing import Any

from mtx2vllm.schemas import FAMILIES, SCHEMAS
from mtx2vllm.schemas.rules import Model, Schema


class ConfigError(ValueError):
    """The config is unknown or lacks something; the message is one sentence."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part of a config; a tie flag that stands at the top is carried along."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    merged = dict(text)
    if "tie_word_embeddings" not in merged and "tie_word_embeddings" in config:
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    return merged


def schema_of(config: Mapping[str, Any]) -> Schema:
    """The family of a config, by `architectures`, else by `model_type`.

    Raises:
        ConfigError: none is known.
    """
    names = list(config.get("architectures") or ())
    for name in names:
        if name in SCHEMAS:
            return SCHEMAS[name]
    kind = str(config.get("model_type", "")).removesuffix("_text")
    if not names:
        for schema in FAMILIES:
            if kind in {schema.model_type.removesuffix("_text"), "mistral" if schema.family == "llama" else None}:
                return schema
    known = ", ".join(sorted({schema.family for schema in FAMILIES}))
    raise ConfigError(
        f"config.json describes {names[0] if names else f'model type {kind!r}'}, which is not one of the supported "
        f"families ({known})"
    )


def architecture_of(config: Mapping[str, Any], schema: Schema) -> str:
    """The architecture that a config names, or the one that its model type stands for."""
    for name in config.get("architectures") or ():
        if name in schema.architectures:
            return str(name)
    if "text_config" in config and schema.wrapper:
        return schema.wrapper
    return "MistralForCausalLM" if config.get("model_type") == "mistral" else schema.text


def model_of(config: Mapping[str, Any], schema: Schema, rope: str | None = None) -> Model:
    """Sizes, flags and layer count of a config.

    Args:
        config: config.json's content, whole.
        schema: its family.
        rope: `interleaved` or `half` where the family leaves a choice; None takes the default.

    Raises:
        ConfigError: keys that the family needs are missing or not positive integers (all are named).
    """
    text = text_config(config)
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    bad: list[str] = []
    for axis, keys in {**schema.sizes, "layers": "num_hidden_layers"}.items():
        found = next((k for k in keys.split("|") if text.get(k) is not None), None)
        value = text.get(found) if found else _default(axis, text)
        origin[axis] = found or keys.split("|")[0]
        if not isinstance(value, int) or value <= 0:
            bad.append(f"{origin[axis]} is {value!r}" if found else f"{origin[axis]} is missing")
        else:
            sizes[axis] = value
    bad += [f"{key} is not supported" for key in _unsupported(text)]
    if bad:
        raise ConfigError(
            f"config.json does not describe a {schema.family} model that can be converted: {'; '.join(bad)}"
        )
    layers = sizes.pop("layers")
    try:
        parts = schema.derive(sizes, text) if schema.derive else {}
        flags = set(schema.flags(text))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"config.json lacks {error} which {schema.family} needs") from None
    if schema.family == "llama" and (rope or default_rope(text)) == "interleaved":
        flags.add("interleaved")
    return Model(sizes, frozenset(flags), layers, text, parts, origin)


def default_rope(text: Mapping[str, Any]) -> str:
    """`interleaved` for rope type llama3 (llama3.1), `half` otherwise."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    return "interleaved" if kind == "llama3" else "half"


def _default(axis: str, text: Mapping[str, Any]) -> int | None:
    heads, embed = text.get("num_attention_heads"), text.get("hidden_size")
    if axis == "kv_heads":
        return heads
    if axis == "head_dim" and isinstance(heads, int) and isinstance(embed, int) and heads > 0:
        return embed // heads
    return None


def _unsupported(text: Mapping[str, Any]) -> list[str]:
    """Variants of known families that MaxText's trees here do not cover; better refused than guessed."""
    checks = {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "decoder_sparse_step": 1,
        "moe_layer_freq": 1,
    }
    found = [f"{key}={text[key]}" for key, plain in checks.items() if text.get(key) not in (None, plain)]
    if text.get("mlp_only_layers"):
        found.append(f"mlp_only_layers={text['mlp_only_layers']}")
    return found
