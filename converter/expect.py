"""What leaves a family's table asks for: paths, axes and shapes, with the layer axes of a scanned tree put in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.plans import Leaf
from mtx2vllm.schemas.rules import Dims, Model, Rule, Schema, Stack, parse_axes

LAYER = "{layer}"
_AXIS = "layer"  # layer axes are named layer0, layer1


@dataclass(frozen=True)
class Expected:
    """One leaf that a family's table asks for: its path and the axes of each dimension, layer axes included."""

    path: str
    source: Dims
    sizes: Mapping[str, int]
    rule: Rule

    @property
    def shape(self) -> tuple[int, ...]:
        """What a config predicts for the leaf."""
        return tuple(prod(self.sizes[a] for a in dim) for dim in self.source)

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """The axes that stand for layers, in the order of the leaf's dimensions."""
        return tuple(a for dim in self.source for a in dim if is_layer(dim))


@dataclass(frozen=True)
class Unit:
    """Layers that are laid out alike and stand in the same leaves: a scanned stack, one unscanned layer, or the top
    (`layers` None). `base` is where they lie in the tree, `prefix` how their Hugging Face names begin."""

    base: str
    leaves: tuple[Expected, ...]
    layers: NDArray[np.int64] | None
    prefix: str


def is_layer(dim: tuple[str, ...]) -> bool:
    """Whether a dimension of a leaf counts layers."""
    return dim[0].startswith(_AXIS)


def units(schema: Schema, model: Model, scanned: bool) -> list[Unit]:
    """All that a family's table says of a model: the top first, then layer stacks."""
    top = tuple(_expected(r.source, r, model, ()) for r in schema.top if r.holds(model.flags))
    found = [Unit("", top, None, "")]
    for stack in schema.stacks(model):
        found += _scanned(stack, model) if scanned else _unscanned(stack, model)
    return found


def _scanned(stack: Stack, model: Model) -> Iterator[Unit]:
    if stack.layers.size:
        yield _unit(stack.scanned, stack, stack.layers, model)


def _unscanned(stack: Stack, model: Model) -> Iterator[Unit]:
    for at in np.ndindex(stack.layers.shape):
        yield _unit(stack.unscanned.format(stack.numbers[at]), stack, np.asarray(stack.layers[at]), model)


def _unit(base: str, stack: Stack, layers: NDArray[np.int64], model: Model) -> Unit:
    rules = [r for r in stack.rules if r.holds(model.flags)]
    leaves = tuple(_expected(f"{base}.{r.source}", r, model, layers.shape) for r in rules)
    return Unit(base, leaves, layers, f"model.layers.{LAYER}.")


def _expected(path: str, rule: Rule, model: Model, layers: tuple[int, ...]) -> Expected:
    source, _ = parse_axes(rule.axes)
    names = tuple(f"{_AXIS}{i}" for i in range(len(layers)))
    sizes = {a: model.sizes[a] for dim in source for a in dim} | dict(zip(names, layers, strict=True))
    at = min(rule.layer_axis, len(source))
    return Expected(path, (*source[:at], *((n,) for n in names), *source[at:]), sizes, rule)


def iter_expected(found: Sequence[Unit]) -> Iterator[Expected]:
    """All leaves of all units."""
    for unit in found:
        yield from unit.leaves


def predict(found: Sequence[Unit], dtype: str = "bfloat16") -> dict[str, Leaf]:
    """The leaves of a checkpoint that nobody has written yet: one chunk each."""
    return {e.path: Leaf(e.path, e.path, e.shape, dtype, e.shape) for e in iter_expected(found)}


def is_scanned(schema: Schema, model: Model, leaves: Mapping[str, Leaf]) -> bool:
    """Whether layers are stacked: by the keys below `decoder`, since a checkpoint's own metadata can be absent."""
    begins = tuple({f"{stack.scanned}." for stack in schema.stacks(model)})
    return any(path.startswith(begins) for path in leaves)
