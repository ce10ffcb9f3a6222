"""From a Hugging Face config to a `Model`: sizes in the words of the rules, and a schema."""

from collections.abc import Mapping
from typing import Any

from mtx2vllm.schemas import FAMILIES, SCHEMAS
from mtx2vllm.schemas.rules import ConfigError, Model, Schema

# Far above any model, and far below what would exhaust the memory while planning.
_MOST = {"layers": 4096, "expert": 1 << 16}
_MOST_ELSE = 1 << 32


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
    names = _architectures(config)
    for name in names:
        if name in SCHEMAS:
            return SCHEMAS[name]
    kind = str(config.get("model_type", "")).removesuffix("_text")
    if not names:
        for schema in FAMILIES:
            if kind in {schema.model_type.removesuffix("_text"), "mistral" if schema.family == "llama" else None}:
                return schema
    known = ", ".join(sorted({schema.family for schema in FAMILIES}))
    if not names and not kind:
        raise ConfigError(f"it has neither architectures nor model_type, so no family can be told (known: {known})")
    what = names[0] if names else f"model type {kind!r}"
    raise ConfigError(f"it describes {what}, which is not one of the supported families ({known})")


def architecture_of(config: Mapping[str, Any], schema: Schema) -> str:
    """The architecture that a config names, or the one that its model type stands for."""
    for name in _architectures(config):
        if name in schema.architectures:
            return name
    if "text_config" in config and schema.wrapper:
        return schema.wrapper
    return "MistralForCausalLM" if config.get("model_type") == "mistral" else schema.text


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    if isinstance(names, str):
        return [names]
    return [str(name) for name in names] if isinstance(names, list) else []


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
        most = _MOST.get(axis, _MOST_ELSE)
        if value is None:
            bad.append(f"{origin[axis]} is missing")
        elif type(value) is not int or value <= 0 or value > most:
            bad.append(f"{origin[axis]} is {value!r:.80}, where a whole number from 1 to {most} was expected")
        else:
            sizes[axis] = value
    bad += [f"{key} is not supported" for key in _unsupported(text, schema)]
    if bad:
        raise ConfigError(_misfit(schema, bad))
    layers = sizes.pop("layers")
    try:
        parts = schema.derive(sizes, text) if schema.derive else {}
        flags = set(schema.flags(text))
        if schema.family == "llama" and (rope or default_rope(text)) == "interleaved":
            flags.add("interleaved")
        model = Model(sizes, frozenset(flags), layers, text, parts, origin)
        schema.stacks(model)
    except ConfigError as error:
        raise ConfigError(_misfit(schema, [str(error)])) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(_misfit(schema, [f"{error} (missing, or not of the type that was expected)"])) from None
    return model


def _misfit(schema: Schema, bad: list[str]) -> str:
    return f"it does not describe a {schema.family} model that can be converted: {'; '.join(bad)}"


def default_rope(text: Mapping[str, Any]) -> str:
    """`interleaved` for rope type llama3 (llama3.1), `half` otherwise."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    return "interleaved" if kind == "llama3" else "half"


def _default(axis: str, text: Mapping[str, Any]) -> int | None:
    heads, embed = text.get("num_attention_heads"), text.get("hidden_size")
    if type(heads) is not int or heads <= 0:
        return None
    if axis == "kv_heads":
        return heads
    if axis == "head_dim" and type(embed) is int:
        return embed // heads
    return None


_BIASED = {"gpt_oss", "qwen2"}  # their tables hold attention biases
_PLAIN = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "decoder_sparse_step": 1, "moe_layer_freq": 1}


def _unsupported(text: Mapping[str, Any], schema: Schema) -> list[str]:
    """Variants of known families that MaxText's trees here do not cover; better refused than guessed."""
    found = [f"{key}={text[key]!r:.80}" for key, plain in _PLAIN.items() if text.get(key) not in (None, plain)]
    unwanted = ["mlp_only_layers", "mlp_bias", *(() if schema.family in _BIASED else ("attention_bias", "qkv_bias"))]
    return found + [f"{key}={text[key]!r:.80}" for key in unwanted if text.get(key)]


__all__ = ["ConfigError", "architecture_of", "default_rope", "model_of", "schema_of", "text_config"]
