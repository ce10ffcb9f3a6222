"""From a family's table to a plan: rules x (leaves of a checkpoint, or those that a config predicts) -> moves.

Pure: sizes only. Every leaf is used by a rule or dropped by a named one, every tensor is filled exactly once, and every
disagreement between checkpoint and config is found and reported together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.expect import LAYER, Expected, Unit, units
from mtx2vllm.converter.match import matched
from mtx2vllm.converter.plans import Leaf, Move, Op, Plan, Tensor
from mtx2vllm.schemas.fused import EXPERT, Fused, fuse, padded
from mtx2vllm.schemas.rules import Dims, Model, Schema, parse_axes

TEXT = ("model.", "")  # names of the text model alone


@dataclass(frozen=True)
class Flow:
    """A rule's elements within a Hugging Face tensor: axes of each dimension, and where the block lies in it."""

    expected: Expected
    target: Dims
    start: tuple[int, ...]
    step: tuple[int, ...]
    window: Mapping[str, tuple[int, int]]


def compile_plan(
    schema: Schema,
    model: Model,
    leaves: Mapping[str, Leaf],
    *,
    layout: str,
    scanned: bool,
    architecture: str,
    dtype: str = "bfloat16",
    names: tuple[str, str] = TEXT,
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
        names: what stands for `model.` in that class, and what before every other name.
        text_only: drop a vision tower instead of refusing it.

    Raises:
        InputError: leaves are missing, left over, or do not fit the config; every problem is named.
    """
    fitted, drops = matched(schema, model, units(schema, model, scanned), leaves, text_only)
    build = _Build(schema, model, layout == "canonical", leaves, dtype, names)
    for unit in fitted:
        build.unit(unit)
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


class _Build:
    """Collects tensors and moves, unit by unit."""

    def __init__(
        self,
        schema: Schema,
        model: Model,
        canonical: bool,
        leaves: Mapping[str, Leaf],
        dtype: str,
        names: tuple[str, str],
    ) -> None:
        self.schema, self.model, self.canonical = schema, model, canonical
        self.leaves, self.dtype, self.names = leaves, dtype, names
        self.tensors: list[Tensor] = []
        self.moves: list[Move] = []

    def unit(self, unit: Unit) -> None:
        flows: dict[str, list[Flow]] = {}
        for expected in unit.leaves:
            flows.setdefault(expected.rule.target, []).append(_flow(expected, self.model))
        _arrange(flows)
        if not self.canonical:
            for target, parts in flows.items():
                self._hugging_face(unit, target, parts)
            return
        shapes = {target: _shape(parts) for target, parts in flows.items()}
        for fused in fuse(shapes, self.schema.family, self.model.sizes.get("expert", 0)):
            self._canonical(unit, fused, flows)

    def _hugging_face(self, unit: Unit, target: str, flows: Sequence[Flow]) -> None:
        index = ("expert",) if EXPERT in target else ()
        tensor = Tensor(self._name(unit, target), _shape(flows), self._dtype(target, flows))
        numbers = self._add(unit, tensor, index)
        for flow in flows:
            self._move(flow, flow.target, flow.start, flow.step, index, numbers)

    def _canonical(self, unit: Unit, fused: Fused, flows: Mapping[str, Sequence[Flow]]) -> None:
        everything = [f for part in fused.parts for f in flows[part.name]]
        rows = fused.shape[0]
        pad = padded(rows) - rows if "vocab" in everything[0].target[0] else 0
        dtype = self._dtype(fused.target, everything)
        tensor = Tensor(self._name(unit, fused.target), (rows + pad, *fused.shape[1:]), dtype, pad)
        numbers = self._add(unit, tensor, ())
        for part in fused.parts:
            for flow in flows[part.name]:
                target = tuple(flow.target[d] for d in part.permute)
                if part.halves:
                    *outer, half, two = target[0]
                    target = ((*outer, two, half), *target[1:])
                start = [flow.start[d] for d in part.permute]
                step = [flow.step[d] for d in part.permute]
                start[0] += part.start
                if part.stacked:
                    target, start, step = (("expert",), *target), [0, *start], [1, *step]
                self._move(flow, target, tuple(start), tuple(step), (), numbers)

    def _add(self, unit: Unit, like: Tensor, index: tuple[str, ...]) -> NDArray[np.int32]:
        """Number a tensor for every layer (and expert); `like` has their places in its name."""
        layers = np.zeros((), np.int64) if unit.layers is None else unit.layers
        numbers = np.empty((*layers.shape, *(self.model.sizes[a] for a in index)), np.int32)
        for at in np.ndindex(numbers.shape):
            name = like.name.replace(LAYER, str(layers[at[: layers.ndim]]))
            numbers[at] = len(self.tensors)
            self.tensors.append(replace(like, name=name.replace(EXPERT, str(at[-1])) if index else name))
        return numbers

    def _name(self, unit: Unit, target: str) -> str:
        name = unit.prefix + target
        model, rest = self.names
        return model + name.removeprefix("model.") if name.startswith("model.") else rest + name

    def _dtype(self, target: str, flows: Sequence[Flow]) -> str:
        """vLLM keeps a few tensors in float32; a Hugging Face file holds them as wide as training did."""
        have = {self.leaves[f.expected.path].dtype for f in flows}
        source = have.pop() if len(have) == 1 else "float32"  # which holds every narrower type exactly
        if target.endswith(self.schema.float32 or ("\0",)) and (self.canonical or source == "float32"):
            return "float32"
        return source if self.dtype == "source" else self.dtype

    def _move(
        self,
        flow: Flow,
        target: Dims,
        start: tuple[int, ...],
        step: tuple[int, ...],
        index: tuple[str, ...],
        numbers: NDArray[np.int32],
    ) -> None:
        value = flow.expected.rule.value
        self.moves.append(
            Move(
                leaf=self.leaves[flow.expected.path],
                source=flow.expected.source,
                sizes=flow.expected.sizes,
                target=target,
                start=start,
                step=step,
                index=(*flow.expected.layer_axes, *index),
                tensors=numbers,
                window=flow.window,
                op=None if value is None else Op(value.kind, value.number(self.model)),
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
