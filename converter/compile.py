"""From a family's table to a plan: rules x (leaves of a checkpoint, or those that a config predicts) -> moves.

Pure: sizes only. Every leaf is used by a rule or dropped by a named one, every tensor is filled exactly once, and every
disagreement between checkpoint and config is found and reported together.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.plan import Drop, Leaf, Move, Op, Plan, Tensor
from mtx2vllm.schemas.fused import EXPERT, Fused, fuse, padded, rename
from mtx2vllm.schemas.rules import Dims, Model, Rule, Schema, Stack, parse_axes

LAYER = "{layer}"


@dataclass(frozen=True)
class Expected:
    """One leaf that a family's table asks for: its path and the axes of each dimension, layer axes included."""

    path: str
    source: Dims
    sizes: Mapping[str, int]
    rule: Rule


@dataclass(frozen=True)
class Unit:
    """Layers that are laid out alike and stand in the same leaves: a scanned stack, one unscanned layer, or the top
    (`layers` None). `prefix` is the Hugging Face name's beginning."""

    leaves: tuple[Expected, ...]
    layers: NDArray[np.int64] | None
    prefix: str


@dataclass(frozen=True)
class Flow:
    """A rule's elements within a Hugging Face tensor: axes of each dimension, and where the block lies in it."""

    expected: Expected
    target: Dims
    start: tuple[int, ...]
    step: tuple[int, ...]
    window: Mapping[str, tuple[int, int]]


def units(schema: Schema, model: Model, scanned: bool) -> list[Unit]:
    """All that a family's table says of a model: the top first, then layer stacks."""
    top = [r for r in schema.top if r.holds(model.flags)]
    found = [Unit(tuple(_expected(r.source, r, model, ()) for r in top), None, "")]
    for stack in schema.stacks(model):
        rules = [r for r in stack.rules if r.holds(model.flags)]
        if scanned:
            if stack.layers.size:
                leaves = (_expected(f"{stack.scanned}.{r.source}", r, model, stack.layers.shape) for r in rules)
                found.append(Unit(tuple(leaves), stack.layers, f"model.layers.{LAYER}."))
            continue
        for at in np.ndindex(stack.layers.shape):
            base = stack.unscanned.format(stack.numbers[at])
            leaves = (_expected(f"{base}.{r.source}", r, model, ()) for r in rules)
            found.append(Unit(tuple(leaves), stack.layers[at], f"model.layers.{LAYER}."))
    return found


def _expected(path: str, rule: Rule, model: Model, layers: tuple[int, ...]) -> Expected:
    source, _ = parse_axes(rule.axes)
    names = tuple(f"layer{i}" for i in range(len(layers)))
    sizes = {a: model.sizes[a] for dim in source for a in dim} | dict(zip(names, layers, strict=True))
    at = min(rule.layer_axis, len(source))
    return Expected(path, (*source[:at], *((n,) for n in names), *source[at:]), sizes, rule)


def shape_of(expected: Expected) -> tuple[int, ...]:
    """The shape that a config predicts for a leaf."""
    return tuple(prod(expected.sizes[a] for a in dim) for dim in expected.source)


def predict(found: Sequence[Unit], dtype: str = "bfloat16") -> dict[str, Leaf]:
    """The leaves of a checkpoint that nobody has written yet: one chunk each."""
    leaves = {}
    for unit in found:
        for e in unit.leaves:
            shape = shape_of(e)
            leaves[e.path] = Leaf(e.path, e.path, shape, dtype, shape)
    return leaves


def compile_plan(
    schema: Schema,
    model: Model,
    leaves: Mapping[str, Leaf],
    *,
    layout: str,
    scanned: bool,
    architecture: str,
    dtype: str = "bfloat16",
    prefix: str | None = None,
    text_only: bool = False,
    conventions: Mapping[str, str] | None = None,
) -> Plan:
    """The plan for a checkpoint.

    Args:
        schema, model: the family and what the config says.
        leaves: source arrays by normalized path.
        layout: `canonical` or `hf`.
        scanned: whether the tree stacks layers.
        architecture: the class to write for.
        dtype: `bfloat16`, `float32`, or `source` (each tensor as its leaf is).
        prefix: what stands for `model.` in names (a wrapper's), None for the text model alone.
        text_only: drop a vision tower instead of refusing it.

    Raises:
        InputError: leaves are missing, left over, or do not fit the config; every problem is named.
    """
    found = units(schema, model, scanned)
    drops, problems = _match(schema, found, leaves, text_only)
    fitted = [replace(u, leaves=tuple(_fit(e, leaves, model, problems) for e in u.leaves)) for u in found]
    if problems:
        raise InputError(_summary(problems))
    build = _Build(schema, layout, leaves, dtype, prefix)
    for unit in fitted:
        build.unit(unit, model)
    plan = Plan(
        layout="canonical" if layout == "canonical" else "hf",
        family=schema.family,
        architecture=architecture,
        tensors=tuple(build.tensors),
        moves=tuple(build.moves),
        drops=tuple(drops),
        conventions=dict(conventions or {}),
    )
    check(plan)
    return plan


def _match(
    schema: Schema, found: Sequence[Unit], leaves: Mapping[str, Leaf], text_only: bool
) -> tuple[list[Drop], list[str]]:
    wanted = {e.path for u in found for e in u.leaves}
    drops: list[Drop] = []
    problems: list[str] = []
    for path in leaves:
        if path in wanted:
            continue
        reason = next((why for pattern, why in schema.drops if re.fullmatch(pattern, path)), None)
        if reason is None and path.startswith("vision"):
            reason = "vision weights are left out (--text-only)" if text_only else None
            if reason is None:
                problems.append(
                    f"vision leaf {path} cannot be converted, only text is; pass --text-only to leave it out"
                )
                continue
        if reason:
            drops.append(Drop(path, reason))
        elif path == "decoder.logits_dense.kernel":
            problems.append(
                f"leaf {path} is a head of its own, but config.json says that {schema.family}'s is tied to the embedding "
                "(tie_word_embeddings); serving would ignore it: use the config of the model that was trained"
            )
        else:
            problems.append(
                f"leaf {path} {list(leaves[path].shape)} is not known to family {schema.family}; the checkpoint is of "
                "another model than config.json, or the family's table lacks it"
            )
    problems += [
        f"leaf {path} is missing from the checkpoint, though config.json ({schema.family}) asks for it"
        for path in dict.fromkeys(e.path for u in found for e in u.leaves)
        if path not in leaves
    ]
    return drops, problems


def _fit(expected: Expected, leaves: Mapping[str, Leaf], model: Model, problems: list[str]) -> Expected:
    """Check a leaf's shape; a vocabulary that training has padded is taken at its own size."""
    leaf = leaves.get(expected.path)
    if leaf is None:
        return expected
    if expected.rule.layer_axis == 0 and "MoEBiasVar" not in leaf.key and leaf.shape != shape_of(expected):
        moved = tuple(d for d in expected.source if not d[0].startswith("layer"))
        layer = tuple(d for d in expected.source if d[0].startswith("layer"))
        expected = replace(expected, source=(*moved[:1], *layer, *moved[1:]))
    shape = shape_of(expected)
    if len(shape) != len(leaf.shape):
        problems.append(f"leaf {leaf.path} has shape {list(leaf.shape)}, config.json implies {list(shape)}")
        return expected
    sizes = dict(expected.sizes)
    for dim, want, have in zip(expected.source, shape, leaf.shape, strict=True):
        if want == have:
            continue
        axis = "layer" if dim[0].startswith("layer") else " x ".join(dim)
        if dim == ("vocab",) and have > want:
            sizes["vocab"] = have
            continue
        keys = "num_hidden_layers" if axis == "layer" else ", ".join(model.origin.get(a, a) for a in dim)
        problems.append(
            f"axis {axis} is {have} in the checkpoint and {want} by config.json ({keys}), first seen in leaf {leaf.path} "
            f"{list(leaf.shape)}"
        )
    return replace(expected, sizes=sizes)


def _summary(problems: Sequence[str]) -> list[str]:
    """One line for problems that differ in the leaf only."""
    grouped: dict[str, list[str]] = {}
    for p in problems:
        head = (
            p.split(", first seen in leaf ")[0]
            if ", first seen in leaf " in p
            else re.sub(r"layers_\d+", "layers_*", p)
        )
        grouped.setdefault(head, []).append(p)
    return [
        same[0] + (f" (and {len(same) - 1} more leaves alike)" if len(same) > 1 else "") for same in grouped.values()
    ]


class _Build:
    """Collects tensors and moves, unit by unit."""

    def __init__(self, schema: Schema, layout: str, leaves: Mapping[str, Leaf], dtype: str, prefix: str | None) -> None:
        self.schema, self.layout, self.leaves, self.dtype, self.prefix = schema, layout, leaves, dtype, prefix
        self.tensors: list[Tensor] = []
        self.moves: list[Move] = []

    def unit(self, unit: Unit, model: Model) -> None:
        flows: dict[str, list[Flow]] = {}
        for expected in unit.leaves:
            flows.setdefault(expected.rule.target, []).append(_flow(expected, model))
        _arrange(flows)
        if self.layout == "hf":
            for target, parts in flows.items():
                self._hugging_face(unit, target, parts, model)
            return
        shapes = {target: _shape(parts) for target, parts in flows.items()}
        for fused in fuse(shapes, self.schema.family, model.sizes.get("expert", 0)):
            self._canonical(unit, fused, flows, model)

    def _hugging_face(self, unit: Unit, target: str, flows: Sequence[Flow], model: Model) -> None:
        experts = model.sizes["expert"] if EXPERT in target else None
        numbers = self._add(unit, target, _shape(flows), experts, flows)
        for flow in flows:
            index = ("expert",) if experts else ()
            self._move(flow, flow.target, flow.start, flow.step, index, numbers, model)

    def _canonical(self, unit: Unit, fused: Fused, flows: Mapping[str, Sequence[Flow]], model: Model) -> None:
        everything = [f for part in fused.parts for f in flows[part.name]]
        shape = fused.shape
        if everything[0].expected.rule.target in {"model.embed_tokens.weight", "lm_head.weight"}:
            shape = (padded(shape[0]), *shape[1:])
        numbers = self._add(unit, fused.target, shape, None, everything)
        for part in fused.parts:
            for flow in flows[part.name]:
                target = tuple(flow.target[d] for d in part.permute)
                start = [flow.start[d] for d in part.permute]
                step = [flow.step[d] for d in part.permute]
                start[0] += part.start
                if part.stacked:
                    target, start, step = (("expert",), *target), [0, *start], [1, *step]
                self._move(flow, target, tuple(start), tuple(step), (), numbers, model)

    def _add(
        self, unit: Unit, target: str, shape: tuple[int, ...], experts: int | None, flows: Sequence[Flow]
    ) -> NDArray[np.int32]:
        """Number new tensors, by layer axes (and expert)."""
        template = self._name(unit, target)
        dtype = self._dtype(target, flows)
        rows = sum(f.start[0] == 0 for f in flows)
        pad = (
            shape[0] - _shape(flows)[0]
            if rows and target.endswith(("embed_tokens.weight", "embedding.weight", "lm_head.weight"))
            else 0
        )
        layers = np.zeros((), np.int64) if unit.layers is None else np.asarray(unit.layers)
        numbers = np.empty((*layers.shape, *((experts,) if experts else ())), np.int32)
        for at in np.ndindex(numbers.shape):
            name = template.replace(LAYER, str(layers[at[: layers.ndim]]))
            if experts:
                name = name.replace(EXPERT, str(at[-1]))
            numbers[at] = len(self.tensors)
            self.tensors.append(Tensor(name, shape, dtype, pad))
        return numbers

    def _name(self, unit: Unit, target: str) -> str:
        name = unit.prefix + target
        if self.layout == "canonical":
            name = rename(self.schema.family, name)
            return name if self.prefix is None else "language_model." + name
        if self.prefix is None:
            return name
        if name.startswith("model."):
            return self.prefix + name.removeprefix(
                "model."
                if self.prefix.endswith(("model.", "language_model.")) and self.prefix != "language_model."
                else ""
            )
        return name if self.prefix != "language_model." else "language_model." + name

    def _dtype(self, target: str, flows: Sequence[Flow]) -> str:
        """vLLM keeps a few tensors in float32; a Hugging Face file holds them as wide as training did."""
        source = self.leaves[flows[0].expected.path].dtype
        if target.endswith(self.schema.float32 or ("\0",)):
            return (
                "float32"
                if self.layout == "canonical" or source == "float32" or self.dtype == "float32"
                else "bfloat16"
            )
        return source if self.dtype == "source" else self.dtype

    def _move(
        self,
        flow: Flow,
        target: Dims,
        start: tuple[int, ...],
        step: tuple[int, ...],
        index: tuple[str, ...],
        numbers: NDArray[np.int32],
        model: Model,
    ) -> None:
        layers = tuple(a for dim in flow.expected.source for a in dim if a.startswith("layer"))
        value = flow.expected.rule.value
        self.moves.append(
            Move(
                leaf=self.leaves[flow.expected.path],
                source=flow.expected.source,
                sizes=flow.expected.sizes,
                target=target,
                start=start,
                step=step,
                index=(*layers, *index),
                tensors=numbers,
                window=flow.window,
                op=None if value is None else Op(value.kind, value.number(model)),
            )
        )


def _flow(expected: Expected, model: Model) -> Flow:
    _, target = parse_axes(expected.rule.axes)
    window: dict[str, tuple[int, int]] = {}
    if expected.rule.part:
        axis, part = expected.rule.part
        window[axis] = model.parts[part]
    if expected.sizes.get("vocab", 0) > model.sizes["vocab"]:
        window["vocab"] = (0, model.sizes["vocab"])
    return Flow(expected, target, (0,) * len(target), (1,) * len(target), window)


def _extents(flow: Flow) -> tuple[int, ...]:
    def extent(axis: str) -> int:
        begin, end = flow.window.get(axis, (0, flow.expected.sizes[axis]))
        return end - begin

    return tuple(prod(extent(a) for a in dim) for dim in flow.target)


def _arrange(flows: dict[str, list[Flow]]) -> None:
    """Give flows with the same target their places: one after another (join) or alternating (weave)."""
    for target, parts in flows.items():
        placed: list[Flow] = []
        offset = 0
        for i, flow in enumerate(parts):
            rule, start, step = flow.expected.rule, list(flow.start), list(flow.step)
            if rule.join or rule.weave:
                d = next(d for d, dim in enumerate(flow.target) if (rule.join or rule.weave) in dim)
                start[d], step[d] = (offset, 1) if rule.join else (i, len(parts))
                offset += _extents(flow)[d]
            placed.append(replace(flow, start=tuple(start), step=tuple(step)))
        flows[target] = placed


def _shape(flows: Sequence[Flow]) -> tuple[int, ...]:
    """The Hugging Face tensor that flows fill together."""
    ends = [tuple(s + (n - 1) * k + 1 for s, n, k in zip(f.start, _extents(f), f.step, strict=True)) for f in flows]
    return tuple(max(column) for column in zip(*ends, strict=True))


def check(plan: Plan) -> None:
    """Every element of every tensor is written exactly once, and names are unique.

    Raises:
        InputError: the family's table is wrong for this model; names the tensors.
    """
    written = np.zeros(len(plan.tensors), np.int64)
    for move in plan.moves:
        np.add.at(written, move.tensors[move.tensors >= 0].ravel(), prod(move.block))
    problems = []
    for tensor, count in zip(plan.tensors, written.tolist(), strict=True):
        need = prod((tensor.shape[0] - tensor.pad_rows, *tensor.shape[1:])) if tensor.shape else 1
        if count != need:
            problems.append(f"tensor {tensor.name} {list(tensor.shape)} would receive {count} of {need} elements")
    names = [t.name for t in plan.tensors]
    if len(set(names)) != len(names):
        problems.append("two tensors of the plan have the same name")
    if problems:
        raise InputError(problems)


def iter_expected(found: Sequence[Unit]) -> Iterator[Expected]:
    """All leaves of all units."""
    for unit in found:
        yield from unit.leaves


def is_scanned(schema: Schema, model: Model, leaves: Mapping[str, Leaf]) -> bool:
    """Whether layers are stacked: by the keys below `decoder`, since a checkpoint's own metadata can be absent."""
    stacks: tuple[Stack, ...] = schema.stacks(model)
    begins = tuple({f"{s.scanned}." for s in stacks})
    return any(path.startswith(begins) for path in leaves)
