"""A version in either layout, seen as canonical tensors: where the rows of each come from.

`recipes` is pure: names, shapes and dtypes in, `Recipe`s out. `read_rows` then makes any rows of a canonical tensor
from the source's bytes. Staging, and the comparison of two directories, are loops over these two.

Names are folded, so that one text model has one set of names whatever stands around it: `language_model.model.x` and
`model.language_model.x` become `model.x`, and the experts' module is always `experts.routed_experts`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.errors import InputError
from mtx2vllm.schemas import fused

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip

_WRAPPERS = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_TEXT = re.compile(r"^(lm_head\.|model\.(layers\.\d+\.|embed_tokens\.|embedding\.|norm\.))")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class Typed(Protocol):
    """A tensor's type: a manifest's entry, or one read off a header."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A source tensor's place: its dimensions permuted, at row `start`. `slot` is the index in a leading dimension
    that the source has not (an expert's), None where the rows are those of the target. `head`: in every so many rows
    neighbours (2i, 2i+1) become halves [even; odd]; 1 leaves the order."""

    source: str
    shape: tuple[int, ...]
    permute: tuple[int, ...]
    start: int
    slot: int | None = None
    head: int = 1

    @property
    def end(self) -> int:
        """The row behind its last one."""
        return self.start + self.shape[self.permute[0]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A canonical tensor. Rows that no piece fills (the end of a padded vocabulary) are zero."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def identity(self) -> bool:
        """Whether its bytes are those of its one source."""
        piece = self.pieces[0]
        plain = piece.slot is None and piece.head == 1 and piece.permute == tuple(range(len(piece.shape)))
        return len(self.pieces) == 1 and plain and piece.shape == self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def fold(name: str) -> str:
    """A tensor's name without what wraps the text model, and with today's name of the experts' module."""
    for prefix, plain in _WRAPPERS:
        if name.startswith(prefix):
            name = plain + name[len(prefix) :]
            break
    return re.sub(r"\.experts\.(w13|w2)_(weight|bias)$", r".experts.routed_experts.\1_\2", name)


def is_text(name: str) -> bool:
    """Whether a folded name belongs to the text model."""
    return _TEXT.match(name) is not None


def recipes(tensors: Mapping[str, Typed], layout: str, family: str, head: int | None = None) -> dict[str, Recipe]:
    """Every canonical tensor of the text model, by folded name.

    Args:
        tensors: the source's tensors; what is not of the text model is left out.
        layout: `canonical` or `hf`.
        family: a schema's name, for the fusions.
        head: rows of an attention head; the `hf` layout of Llama 4 needs it.

    Raises:
        InputError: two tensors fold to one name, experts are missing or of different types, or `head` is.
    """
    problems: list[str] = []
    names: dict[str, str] = {}
    for name in tensors:
        folded = fold(name)
        if is_text(folded) and folded in names:
            problems.append(f"{name!r} and {names[folded]!r} are the same tensor {folded!r} of the text model.")
        elif is_text(folded):
            names[folded] = name
    if problems:
        raise InputError(problems)
    if layout == "canonical":
        return {folded: _whole(name, tensors[name]) for folded, name in names.items()}
    if fused.reorders(family) and (head is None or head % 2):
        raise InputError(
            f"canonical {family} weights have the rows of each attention head in another order, and the head size is "
            "not known: the manifest's conventions, or config.json, must say head_dim."
        )
    return _fused(names, tensors, family, head or 1)


def head_of(conventions: Mapping[str, str]) -> int | None:
    """Rows of an attention head, where a manifest records them."""
    said = conventions.get("head_dim", "")
    return int(said) if said.isdecimal() else None


def _whole(name: str, tensor: Typed, rows: int | None = None) -> Recipe:
    shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    return Recipe(shape, tensor.dtype, (Piece(name, tensor.shape, tuple(range(len(tensor.shape))), 0),))


def _fused(names: Mapping[str, str], tensors: Mapping[str, Typed], family: str, head: int) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    layers: dict[str, dict[str, dict[int, str]]] = {}  # layer -> ending -> expert (-1: not an expert's) -> source
    for folded, name in names.items():
        layer = _LAYER.match(folded)
        if layer is None:
            rows = fused.padded(tensors[name].shape[0]) if folded in _VOCABULARY else None
            found[fused.rename(family, folded)] = _whole(name, tensors[name], rows)
            continue
        expert = _EXPERT.search(layer[2])
        ending = _EXPERT.sub(fused.EXPERT, layer[2])
        layers.setdefault(layer[1], {}).setdefault(ending, {})[int(expert[0]) if expert else -1] = name
    problems: list[str] = []
    for layer_number, endings in layers.items():
        prefix = f"model.layers.{layer_number}."
        wrong = _expert_problems(prefix, endings, tensors)
        if wrong:
            problems += wrong
            continue
        found |= {prefix + target: recipe for target, recipe in _layer(endings, tensors, family, head)}
    if problems:
        raise InputError(problems)
    return found


def _expert_problems(prefix: str, endings: Mapping[str, Mapping[int, str]], tensors: Mapping[str, Typed]) -> list[str]:
    groups = {ending: sources for ending, sources in endings.items() if -1 not in sources}
    count = max((len(sources) for sources in groups.values()), default=0)
    problems = []
    for ending, sources in groups.items():
        missing = sorted(set(range(count)) - sources.keys())
        if missing:
            problems.append(f"{prefix}{ending}: {len(missing)} of {count} experts are missing, {missing[0]} first.")
        if len({(tensors[name].dtype, tensors[name].shape) for name in sources.values()}) > 1:
            problems.append(f"{prefix}{ending}: the experts are not all of one shape and type.")
    return problems


def _layer(
    endings: Mapping[str, Mapping[int, str]], tensors: Mapping[str, Typed], family: str, head: int
) -> Iterator[tuple[str, Recipe]]:
    first = {ending: tensors[next(iter(sources.values()))] for ending, sources in endings.items()}
    experts = max((len(sources) for sources in endings.values() if -1 not in sources), default=0)
    for target in fused.fuse({ending: tensor.shape for ending, tensor in first.items()}, family, experts):
        pieces = tuple(
            Piece(
                source,
                tensors[source].shape,
                part.permute,
                part.start,
                slot if part.stacked else None,
                head if part.halves else 1,
            )
            for slot in (range(experts) if target.parts[0].stacked else (-1,))
            for part in target.parts
            for source in (endings[part.name][slot],)
        )
        yield target.target, Recipe(target.shape, first[target.parts[0].name].dtype, pieces)


ReadBytes = Callable[[str, int, memoryview], None]  # source name, offset within its bytes, where to


def read_rows(
    recipe: Recipe, rows: tuple[int, int], sources: Mapping[str, Typed], read: ReadBytes, dtype: str | None = None
) -> NDArray[Any]:
    """Rows `lo` to `hi` (`rows`) of a canonical tensor, C-contiguous, cast to `dtype` (rounding to nearest even, once).

    Sources are read front to back when the rows are asked for in order, so that they can be hashed on the way.
    """
    kind, (lo, hi) = DTYPES[dtype or recipe.dtype], rows
    out = np.zeros((hi - lo, *recipe.shape[1:]), kind)
    for piece in recipe.pieces:
        held = DTYPES[sources[piece.source].dtype]
        if piece.slot is not None:
            if lo <= piece.slot < hi:
                into = out[piece.slot - lo, piece.start : piece.end]
                _copy(into, _read(piece, 0, piece.end - piece.start, held, read), held)
            continue
        a, b = max(lo, piece.start), min(hi, piece.end)
        if a < b:
            _copy(out[a - lo : b - lo], _read(piece, a - piece.start, b - piece.start, held, read), held)
    return out


def bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integers that are as wide. numpy copies bfloat16 an element at a time, its bits several times faster."""
    return np.dtype(f"u{dtype.itemsize}")


def _copy(into: NDArray[Any], raw: NDArray[Any], held: np.dtype[Any]) -> None:
    if into.dtype == held:
        into.view(raw.dtype)[...] = raw
    else:
        into[...] = raw.view(held)


def _read(piece: Piece, lo: int, hi: int, held: np.dtype[Any], read: ReadBytes) -> NDArray[Any]:
    """Rows of one permuted source, as the bits of its type. Rows are contiguous where the first dimension stays first,
    as it does everywhere today; elsewhere the whole source is read. Heads whose rows change their order are read whole."""
    if piece.head > 1:
        first, last = lo // piece.head * piece.head, -(-hi // piece.head) * piece.head
        pairs = _read(replace(piece, head=1), first, last, held, read)
        pairs = pairs.reshape(-1, piece.head // 2, 2, *pairs.shape[1:])
        return pairs.swapaxes(1, 2).reshape(last - first, *piece.shape[1:])[lo - first : hi - first]
    stays = piece.permute[0] == 0
    first, last = (lo, hi) if stays else (0, piece.shape[0])
    part = np.empty((last - first, *piece.shape[1:]), bits(held))
    row = prod(piece.shape[1:]) * held.itemsize
    if part.nbytes:
        read(piece.source, first * row, memoryview(part.reshape(-1).view(np.uint8)))
    turned = part.transpose(piece.permute)
    return turned if stays else turned[lo:hi]


def row_blocks(recipe: Recipe, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about `limit` bytes; at least one row each, and whole heads where their order changes, so that
    sources are read front to back. A scalar has none: see `as_rows`."""
    rows, head = recipe.shape[0], max(piece.head for piece in recipe.pieces)
    step = max(1, limit // max(1, recipe.nbytes // max(1, rows)) // head) * head
    for lo in range(0, rows, step):
        yield lo, min(rows, lo + step)


def as_rows(recipe: Recipe) -> Recipe:
    """The same bytes with at least one dimension."""
    if recipe.shape:
        return recipe
    return Recipe((1,), recipe.dtype, tuple(Piece(p.source, (1,), (0,), 0, p.slot) for p in recipe.pieces))
