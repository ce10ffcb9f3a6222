"""The vocabulary of a family's table: rules, stacks, and the model that a config describes. Sizes only, no data.

A `Rule` carries one leaf of MaxText's tree into one tensor of the Hugging Face layout. `axes` is one einops-like
string, and it is the whole structural operation:

    "embed heads head_dim -> (heads head_dim) embed"

Left are the dimensions of the leaf as they stand in one unscanned layer, right those of the tensor. Parentheses join
axes, outermost first. An axis that stands on the left only is an index in the tensor's name ("expert" where the target
has `{expert}`). Layer axes never appear: `Stack` says where a layer lies, scanned or not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Dims = tuple[tuple[str, ...], ...]


class ConfigError(ValueError):
    """The config is unknown, lacks something or asks for what no table covers; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Value:
    """Arithmetic on every element, in float32: `multiply`, `divide` or `add` with a number that the model gives."""

    kind: Literal["multiply", "divide", "add"]
    number: Callable[["Model"], float]


@dataclass(frozen=True, slots=True)
class Rule:
    """One leaf (or one part of it) to one tensor. `join` names the target axis along which the rules with the same
    target are concatenated, in table order; `weave` the one along which they alternate. `part` takes a named range
    (`Model.parts`) of a source axis. `when` is a flag of the model, or `!flag`."""

    source: str
    target: str
    axes: str
    value: Value | None = None
    join: str | None = None
    weave: str | None = None
    part: tuple[str, str] | None = None  # (axis, name of the range)
    when: str | None = None
    layer_axis: int = 1  # where scanning inserts the layer axes (MaxText's param_scan_axis)

    def holds(self, flags: frozenset[str]) -> bool:
        """Whether the rule applies to a model with these flags."""
        if self.when is None:
            return True
        return (self.when.removeprefix("!") in flags) != self.when.startswith("!")


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that share their rules. `layers` holds Hugging Face layer numbers, with one dimension for each layer axis
    of the scanned leaves (none where a layer stands alone). `unscanned` is the path of one layer of an unscanned tree,
    numbered by `numbers` (same shape)."""

    scanned: str
    unscanned: str
    layers: NDArray[np.int64]
    numbers: NDArray[np.int64]
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Model:
    """What a config says, in the words of the rules. `origin` names where each size stands, for messages."""

    sizes: Mapping[str, int]
    flags: frozenset[str]
    layers: int
    config: Mapping[str, Any]
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Schema:
    """One family. `architectures` are the Hugging Face classes it reads, `text` the class of the text model alone."""

    family: str
    architectures: tuple[str, ...]
    text: str
    model_type: str  # of the text-only config
    sizes: Mapping[str, str]  # axis -> key of the (text) config
    stacks: Callable[[Model], tuple[Stack, ...]]
    top: tuple[Rule, ...]
    flags: Callable[[Mapping[str, Any]], frozenset[str]]
    derive: Callable[[dict[str, int], Mapping[str, Any]], dict[str, tuple[int, int]]] | None = None
    wrapper: str | None = None  # class of the multimodal model whose text side this is
    # In the wrapper's Hugging Face names: what stands for `model.`, and what before every other text tensor.
    wrapper_names: tuple[str, str] = ("model.", "")
    drops: tuple[tuple[str, str], ...] = ()  # (path pattern, reason)
    float32: tuple[str, ...] = ()  # tensor name endings that vLLM keeps in float32
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys that config.json needs for vLLM, when absent
    ambiguous: str | None = None  # why keys and shapes alone cannot tell this family apart


def parse_axes(axes: str) -> tuple[Dims, Dims]:
    """Split an axes string into the axes of every source dimension and of every target dimension.

    Raises:
        ValueError: it is malformed (a schema's mistake, found by its test).
    """
    left, arrow, right = axes.partition("->")
    if not arrow:
        raise ValueError(f"axes {axes!r} lack '->'")
    source, target = _dims(left), _dims(right)
    names, there = ([a for dim in side for a in dim] for side in (source, target))
    if len(set(names)) != len(names) or len(set(there)) != len(there) or not set(there) <= set(names):
        raise ValueError(f"axes {axes!r} repeat an axis or make one up")
    return source, target


def _dims(side: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in side.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            dims.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append((token,))
    return tuple(dims)


def stack(scanned: str, unscanned: str, layers: Any, rules: tuple[Rule, ...], numbers: Any = None) -> Stack:
    """A stack; `numbers` defaults to the Hugging Face layer numbers."""
    array = np.asarray(layers, np.int64)
    return Stack(scanned, unscanned, array, array if numbers is None else np.asarray(numbers, np.int64), rules)


def need(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A whole number that a config must hold.

    Raises:
        ConfigError: it is missing, no whole number, or below `least`.
    """
    value = config.get(key)
    if type(value) is not int or value < least:
        found = (
            "is missing" if value is None else f"is {value!r}, where a whole number of at least {least} was expected"
        )
        raise ConfigError(f"{key} {found}")
    return value


def expect_pattern(config: Mapping[str, Any], pattern: Sequence[str], why: str) -> None:
    """Refuse a config whose kinds of layers do not repeat as MaxText builds them: the wrong rules would be applied.

    Raises:
        ConfigError: names the first layer that is of another kind.
    """
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return
    for number, kind in enumerate(kinds):
        if kind != (wanted := pattern[number % len(pattern)]):
            raise ConfigError(
                f"layer_types[{number}] is {kind!r}, and {why} makes it {wanted!r}; no other order is supported"
            )


def plain(rules: tuple[Rule, ...]) -> Callable[[Model], tuple[Stack, ...]]:
    """One homogeneous stack below `decoder.layers`."""
    return lambda model: (stack("decoder.layers", "decoder.layers_{}", range(model.layers), rules),)


def cycle(
    rules: Callable[[Model, int], tuple[Rule, ...]], length: int, name: str = "layers_"
) -> Callable[[Model], tuple[Stack, ...]]:
    """Layers that repeat with period `length`: the position k is in the name, the block is the axis; a remainder of
    layers lies below `decoder.layers_remainder` without a layer axis."""

    def stacks(model: Model) -> tuple[Stack, ...]:
        blocks, rest = divmod(model.layers, length)
        full = [
            stack(f"decoder.layers.{name}{k}", "decoder.layers_{}", np.arange(blocks) * length + k, rules(model, k))
            for k in range(length)
            if blocks
        ]
        tail = [
            stack(f"decoder.layers_remainder.{name}{k}", "decoder.layers_{}", blocks * length + k, rules(model, k))
            for k in range(rest)
        ]
        return (*full, *tail)

    return stacks
