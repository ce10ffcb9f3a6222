"""Which family a checkpoint is of, from its keys and shapes alone, where there is no config.json.

Every family whose table explains all leaves is a candidate. Sizes are solved from the shapes, rule by rule. What only a
config says (a rotary convention, a scale) makes a family ambiguous, and ambiguity is an error that names `--hf-config`.
"""

import re
from collections.abc import Mapping
from math import prod

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.expect import Unit, is_layer, iter_expected, units
from mtx2vllm.converter.plans import Leaf
from mtx2vllm.schemas import FAMILIES
from mtx2vllm.schemas.rules import Model, Schema, parse_axes

_MARKS = {  # words that no other family's tree has, of families that a config must settle
    "gemma2": "self_attention_local", "gemma4": "layer_scalar", "deepseek_v3": "wkv_a", "llama4": "Llama4MoEBlock_0",
    "qwen3_5_moe": "in_proj_qkvz", "qwen3_next": "in_proj_qkvz",
}  # fmt: skip
_CONFIG = "pass --hf-config with a Hugging Face config.json, a directory with one, or a Hub id"


def infer(leaves: Mapping[str, Leaf]) -> tuple[Schema, Model]:
    """The one family and model that explain every leaf.

    Raises:
        InputError: none, several, or one that keys and shapes cannot settle.
    """
    found = [(schema, model) for schema in FAMILIES if (model := _solve(schema, leaves)) is not None]
    settled = [pair for pair in found if pair[0].ambiguous is None]
    if len(found) == 1 and settled:
        return settled[0]
    if not found:
        alike = sorted(s.family for s in FAMILIES if s.ambiguous and _looks_like(s, leaves))
        why = f"; it looks like {' or '.join(alike)}, and {_why(alike)}" if alike else ""
        raise InputError(f"no config.json was found, and keys and shapes do not settle the family{why}; {_CONFIG}")
    names = " or ".join(schema.family for schema, _ in found)
    why = "; ".join(schema.ambiguous for schema, _ in found if schema.ambiguous)
    raise InputError(f"no config.json was found, and keys and shapes fit {names}{f': {why}' if why else ''}; {_CONFIG}")


def alike(leaves: Mapping[str, Leaf]) -> tuple[str, ...]:
    """Families that a checkpoint's keys and shapes speak for, whatever its config says; () where they say nothing."""
    text = {path: leaf for path, leaf in leaves.items() if not path.startswith("vision")}
    found = tuple(schema.family for schema in FAMILIES if _solve(schema, text) is not None)
    return found or tuple(s.family for s in FAMILIES if s.family in _MARKS and _looks_like(s, text))


def _why(families: list[str]) -> str:
    return "; ".join(s.ambiguous for s in FAMILIES if s.family in families and s.ambiguous)


def _looks_like(schema: Schema, leaves: Mapping[str, Leaf]) -> bool:
    """Whether the family's most telling words occur in the tree."""
    words = {"llama": "decoder.layers.self_attention.query.kernel"}.get(schema.family)
    mark = words or _MARKS.get(schema.family, "\0")
    return any(mark in re.sub(r"layers_\d+", "layers", path) for path in leaves)


def _solve(schema: Schema, leaves: Mapping[str, Leaf]) -> Model | None:
    """Sizes from shapes: count the layers, then read every dimension that is one unknown axis (or one unknown factor)."""
    if schema.ambiguous and schema.family != "llama":
        return None
    layers = _count_layers(leaves)
    tied = "decoder.logits_dense.kernel" not in leaves
    for count in layers:
        model = Model(_Sizes(), frozenset({"tied"} if tied else ()), count, {})
        for scanned in (True, False):
            try:
                found = units(schema, model, scanned)
            except (KeyError, TypeError, ValueError, ZeroDivisionError):
                return None
            expected = {e.path for u in found for e in u.leaves}
            if expected != set(leaves):
                continue
            sizes = _sizes(found, leaves)
            if sizes is not None:
                return Model(sizes, model.flags, count, {})
    return None


class _Sizes(dict[str, int]):
    """Every axis is 0 until solved."""

    def __missing__(self, _: str) -> int:
        return 0


def _count_layers(leaves: Mapping[str, Leaf]) -> list[int]:
    """Possible layer counts: the largest unscanned number, or what the layer axes of scanned stacks add up to."""
    numbers = [int(m[1]) + 1 for path in leaves if (m := re.match(r"decoder\.layers_(\d+)\.", path))]
    if numbers:
        return [max(numbers)]
    scales = [
        leaf
        for path, leaf in leaves.items()
        if path.endswith(("layer_norm.scale", "_norm.scale")) and len(leaf.shape) == 2
    ]
    blocks = scales[0].shape[1] if scales else 0
    names = {m[1] for path in leaves if (m := re.match(r"decoder\.layers\.(layers?_\d+)\.", path))}
    rest = {m[1] for path in leaves if (m := re.match(r"decoder\.layers_remainder\.(layers?_\d+)\.", path))}
    return [blocks * (len(names) or 1) + len(rest)]


def _sizes(found: list[Unit], leaves: Mapping[str, Leaf]) -> dict[str, int] | None:
    sizes: dict[str, int] = {}
    changed = True
    while changed:
        changed = False
        for expected in iter_expected(found):
            leaf = leaves[expected.path]
            if len(leaf.shape) != len(expected.source):
                return None
            for dim, have in zip(expected.source, leaf.shape, strict=True):
                if is_layer(dim):
                    if expected.sizes[dim[0]] != have:
                        return None
                    continue
                unknown = [a for a in dim if a not in sizes]
                known = prod(sizes[a] for a in dim if a in sizes)
                if len(unknown) == 1 and have % known == 0:
                    sizes[unknown[0]] = have // known
                    changed = True
                elif not unknown and known != have:
                    return None
    wanted = {a for e in iter_expected(found) for side in parse_axes(e.rule.axes) for dim in side for a in dim}
    return sizes if wanted <= sizes.keys() else None
