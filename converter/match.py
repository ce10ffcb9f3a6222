"""Does a checkpoint fit a config? Leaves against what the family's table asks for; every disagreement is found, and
those that differ only in the leaf are said once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.expect import Expected, Unit, is_layer, iter_expected
from mtx2vllm.converter.infer import alike
from mtx2vllm.converter.plans import Drop, Leaf
from mtx2vllm.schemas.rules import Model, Schema

_HEAD = "decoder.logits_dense.kernel"
_FLOATS = {"bfloat16", "float16", "float32"}
# One layer (or pair) of an unscanned tree, or one of a scanned tree's remainder.
_MODULE = re.compile(r"decoder\.(?:layers_remainder\.\w+|(?:dense_|moe_)?layers_\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A sentence. Problems of the same `kind` are said once; `layers`: it is about how many layers there are."""

    kind: str
    text: str
    layers: bool = False


def matched(
    schema: Schema, model: Model, found: Sequence[Unit], leaves: Mapping[str, Leaf], text_only: bool
) -> tuple[list[Unit], list[Drop]]:
    """The units as the checkpoint has them (a vocabulary that training padded has its own size there), and what is
    left out on purpose.

    Raises:
        InputError: leaves are missing, left over, or do not fit the config; every problem is named.
    """
    wanted = {e.path for e in iter_expected(found)}
    extra = [path for path in leaves if path not in wanted]
    drops: list[Drop] = []
    problems: list[Problem] = []
    for path in extra:
        outcome = _unexpected(schema, leaves[path], text_only)
        if isinstance(outcome, Drop):
            drops.append(outcome)
        else:
            problems.append(outcome)
    problems += [_missing(schema, path, leaves) for path in dict.fromkeys(e.path for e in iter_expected(found))
                 if path not in leaves]  # fmt: skip
    fitted = [replace(u, leaves=tuple(_fit(e, leaves, model, problems, drops) for e in u.leaves)) for u in found]
    if problems and (others := alike(leaves)) and schema.family not in others:
        raise InputError(_other_family(schema, others, problems))
    have = count_layers(found, leaves)
    if have != model.layers and any(p.layers for p in problems):
        problems = [p for p in problems if not p.layers]
        problems.append(
            Problem("layers", f"the checkpoint has {have} layers and config.json says {model.layers} (num_hidden_layers); "
                    "pass the config of the model that was trained with --hf-config")
        )  # fmt: skip
    if problems:
        raise InputError(_summary(problems))
    return fitted, list(dict.fromkeys(drops))


def count_layers(found: Sequence[Unit], leaves: Mapping[str, Leaf]) -> int:
    """How many layers a checkpoint has, whatever the config says that `found` was made from."""
    total = 0
    for unit in found:
        sizes = (_layers_in(e, leaves) for e in unit.leaves)
        total += 0 if unit.layers is None else next((n for n in sizes if n is not None), 0)
    known = [unit.base for unit in found]
    surplus = {m[0] for path in leaves if (m := _MODULE.match(path))} - set(known)
    pair = max((known.count(base) for base in set(known)), default=1)  # Gemma 2 has two layers in one module
    return total + pair * len(surplus)


def _layers_in(expected: Expected, leaves: Mapping[str, Leaf]) -> int | None:
    leaf = leaves.get(expected.path)
    if leaf is None or len(leaf.shape) != len(expected.source):
        return None
    return prod(n for n, dim in zip(leaf.shape, expected.source, strict=True) if is_layer(dim))


def _unexpected(schema: Schema, leaf: Leaf, text_only: bool) -> Drop | Problem:
    path = leaf.path
    reason = next((why for pattern, why in schema.drops if re.fullmatch(pattern, path)), None)
    if reason:
        return Drop(path, reason)
    if path.startswith("vision"):
        if text_only:
            return Drop(path, "vision weights are left out (--text-only)")
        return Problem(
            "vision", f"vision leaf {path} cannot be converted, only text is; pass --text-only to leave vision out"
        )
    if path == _HEAD:
        return Problem(
            path,
            f"leaf {path} is a head of its own, but config.json says that {schema.family}'s is tied to the embedding "
            "(tie_word_embeddings); serving would ignore it: use the config of the model that was trained",
        )
    return Problem(
        f"extra {_alike(path)}",
        f"leaf {path} {list(leaf.shape)} is not known to family {schema.family}; the checkpoint is of another model than "
        "config.json, or the family's table lacks it",
        layers=_MODULE.match(path) is not None,
    )


def _missing(schema: Schema, path: str, leaves: Mapping[str, Leaf]) -> Problem:
    module = _MODULE.match(path)
    whole = module is not None and not any(other.startswith(f"{module[0]}.") for other in leaves)
    hint = "; was the model trained with tied embeddings?" if path == _HEAD else ""
    return Problem(
        f"missing {_alike(path)}",
        f"leaf {path} is missing from the checkpoint, though config.json ({schema.family}) asks for it{hint}",
        layers=whole,
    )


def _alike(path: str) -> str:
    return re.sub(r"layers_\d+", "layers_*", path)


def _fit(
    expected: Expected, leaves: Mapping[str, Leaf], model: Model, problems: list[Problem], drops: list[Drop]
) -> Expected:
    """Check a leaf's type and shape; a vocabulary that training has padded is taken at its own size."""
    leaf = leaves.get(expected.path)
    if leaf is None:
        return expected
    if leaf.dtype not in _FLOATS:
        problems.append(
            Problem(f"dtype {leaf.dtype}", f"leaf {leaf.path} is {leaf.dtype}, and only floating-point weights can be "
                    "converted; save the checkpoint without quantization")
        )  # fmt: skip
    expected = _layers_in_place(expected, leaf)
    if len(expected.shape) != len(leaf.shape):
        text = f"leaf {leaf.path} has shape {list(leaf.shape)}, and config.json implies {list(expected.shape)}"
        problems.append(Problem(f"rank {_alike(leaf.path)}", text))
        return expected
    sizes = dict(expected.sizes)
    for dim, want, have in zip(expected.source, expected.shape, leaf.shape, strict=True):
        if dim == ("vocab",) and have > want:
            sizes["vocab"] = have
            drops.append(Drop(f"{leaf.path}[{want}:{have}]", f"padding beyond the config's vocabulary of {want}"))
        elif want != have:
            problems.append(_misfit(dim, want, have, leaf, model))
    return replace(expected, sizes=sizes)


def _layers_in_place(expected: Expected, leaf: Leaf) -> Expected:
    """Where scanning put the layer axis of a leaf that MaxText has kept in two collections: first in the one of its
    own, second among the parameters. The shape decides where it can; else the collection does."""
    if expected.rule.layer_axis != 0 or not expected.layer_axes:
        return expected
    rest = [d for d in expected.source if not is_layer(d)]
    layers = [d for d in expected.source if is_layer(d)]
    second = replace(expected, source=(*rest[:1], *layers, *rest[1:]))
    among_parameters = leaf.key.startswith("params.params.")
    first, other = (second, expected) if among_parameters else (expected, second)
    return other if leaf.shape == other.shape != first.shape else first


def _misfit(dim: tuple[str, ...], want: int, have: int, leaf: Leaf, model: Model) -> Problem:
    layers = is_layer(dim)
    axis = "layer" if layers else " x ".join(dim)
    keys = "num_hidden_layers" if layers else ", ".join(model.origin.get(a, a) for a in dim)
    said = f"axis {axis} is {have} in the checkpoint and {want} by config.json ({keys})"
    return Problem(said, f"{said}, first seen in leaf {leaf.path} {list(leaf.shape)}", layers)


def _other_family(schema: Schema, others: Sequence[str], problems: Sequence[Problem]) -> list[str]:
    """The config is of another family: the single leaves say nothing beyond that."""
    kinds = [problem.kind.partition(" ")[0] for problem in problems]
    lacks, other = kinds.count("missing"), sum(kind in {"axis", "rank", "dtype"} for kind in kinds)
    extra = len(kinds) - lacks - other
    counts = {"are missing": lacks, "have another shape or type": other, "are unknown": extra}
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return [
        f"the checkpoint looks like {' or '.join(others)} by its keys and shapes, but config.json says {schema.family}; pass "
        "the config of the model that was trained with --hf-config",
        f"compared with {schema.family}, of the leaves {told}",
    ]


def _summary(problems: Sequence[Problem]) -> list[str]:
    """One line for problems of one kind."""
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem)
    return [
        same[0].text + (f" (and {len(same) - 1} more leaves alike)" if len(same) > 1 else "") for same in kinds.values()
    ]
