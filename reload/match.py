"""Does a version fit the engine, and which of its tensors must be read? Pure: names, types and digests only."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.version.pieces import DTYPES, Recipe, fold, head_of, recipes
from mtx2vllm.reload.engine import TensorSpec
from mtx2vllm.schemas.manifest import Manifest, digest

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_HEAD, _EMBEDDINGS = "lm_head.weight", ("model.embed_tokens.weight", "model.embedding.weight")
_SHOWN = 8  # names in one sentence


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that the engine wants. `key` says its content: equal keys are equal bytes."""

    name: str  # the engine's
    folded: str  # the recipe's
    recipe: Recipe
    dtype: str  # safetensors' name of the engine's type
    key: str

    @property
    def nbytes(self) -> int:
        """Bytes as the engine gets them."""
        return self.recipe.nbytes // DTYPES[self.recipe.dtype].itemsize * DTYPES[self.dtype].itemsize

    @property
    def as_stored(self) -> bool:
        """Whether the bytes in the version's file are already those that the engine gets."""
        return self.recipe.identity and self.recipe.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Fit:
    """A version that fits: every tensor that the engine wants, and those of the version that it has no use for."""

    targets: Mapping[str, Target]  # by the engine's name
    ignored: tuple[str, ...]

    @property
    def keys(self) -> dict[str, str]:
        """What the engine holds once this version is in: name to content."""
        return {name: target.key for name, target in self.targets.items()}


def fit(manifest: Manifest, specs: Mapping[str, TensorSpec], untouched: Collection[str] = ()) -> Fit:
    """Match a version with the engine. Either may wrap the text model (`language_model.`) or not.

    Raises:
        InputError: with everything that does not fit.
    """
    found = dict(recipes(manifest.tensors, manifest.layout, manifest.family, head_of(manifest.conventions)))
    wanted = {fold(name): name for name in specs}
    foreign = {fold(name) for name in untouched}
    problems: list[str] = []
    if len(wanted) != len(specs):
        problems.append("the engine has two tensors whose names differ by the text model's wrapper only.")
    used = {piece.source for recipe in found.values() for piece in recipe.pieces}
    aside = sorted(manifest.tensors.keys() - used)
    strange = [n for n in aside if manifest.layout == "canonical" and fold(n) not in foreign and fold(n) not in wanted]
    problems += _tied_head(found, wanted, manifest)
    problems += _listing(
        sorted(found.keys() - wanted.keys() - foreign) + strange,
        "tensors that the engine does not have",
        "the version is of another model, or of another vLLM release",
    )
    problems += _listing(
        sorted(wanted.keys() - found.keys()),
        "tensors of the engine are missing in the version",
        "they would keep other values than the rest: convert the whole model",
    )
    targets: dict[str, Target] = {}
    mismatches: list[str] = []
    for folded, name in wanted.items():
        if folded in found:
            target = _target(name, folded, found[folded], specs[name], manifest)
            mismatches += [target] if isinstance(target, str) else []
            if isinstance(target, Target):
                targets[name] = target
    problems += _listing(
        mismatches,
        "tensors have another shape or type than in the engine",
        "the engine was started with another model or dtype; convert with its config and --dtype",
    )
    if problems:
        raise InputError(problems)
    return Fit(targets, tuple(aside))


def _tied_head(found: dict[str, Recipe], wanted: Mapping[str, str], manifest: Manifest) -> list[str]:
    """A tied engine has no head of its own; some exporters write one all the same, with the embedding's values."""
    if _HEAD not in found or _HEAD in wanted:
        return []
    embedding = next((found[name] for name in _EMBEDDINGS if name in found), None)
    head = found.pop(_HEAD)
    if embedding is not None and _key(head, head.dtype, manifest) == _key(embedding, embedding.dtype, manifest):
        return []
    return [
        "the engine ties its output head to the embedding, but the version's lm_head.weight has other values: set "
        "tie_word_embeddings to false in the config that the engine was started with."
    ]


def _target(name: str, folded: str, recipe: Recipe, spec: TensorSpec, manifest: Manifest) -> Target | str:
    dtype = _NAMES.get(spec.dtype)
    # vLLM's own loader casts what a Hugging Face file holds to the model's type; canonical files are past that.
    castable = manifest.layout == "hf" and {dtype, recipe.dtype} <= _FLOATS
    if dtype is None or tuple(spec.shape) != recipe.shape or (dtype != recipe.dtype and not castable):
        return (
            f"{name} is {recipe.dtype} {list(recipe.shape)}, the engine wants {dtype or spec.dtype} {list(spec.shape)}"
        )
    return Target(name, folded, recipe, dtype, _key(recipe, dtype, manifest))


def _key(recipe: Recipe, dtype: str, manifest: Manifest) -> str:
    """The content of a canonical tensor, known without reading it: the stored tensor's own digest where it is taken as
    it is (so that both layouts agree), a digest over how it is made otherwise."""
    if recipe.identity and recipe.dtype == dtype:
        return manifest.tensors[recipe.pieces[0].source].blake3
    made = [(manifest.tensors[p.source].blake3, p.shape, p.permute, p.start, p.slot, p.head) for p in recipe.pieces]
    return digest(json.dumps([recipe.shape, recipe.dtype, dtype, made], separators=(",", ":")).encode())


def _listing(names: Iterable[str], what: str, cause: str) -> list[str]:
    names = list(names)
    if not names:
        return []
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {'; '.join(names[:_SHOWN])}{rest} ({cause})."]


def changed(targets: Mapping[str, Target], loaded: Mapping[str, str]) -> dict[str, Target]:
    """The targets whose content the engine does not hold yet."""
    return {name: target for name, target in targets.items() if loaded.get(name) != target.key}
