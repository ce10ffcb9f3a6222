"""Two directories, tensor by tensor: the same model to the bit?

Either side is a version in either layout, or a plain Hugging Face directory. Both are seen as canonical tensors with
folded names (see `pieces`), so wrappers and the fusing of experts make no difference; only text tensors count.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.errors import InputError, NotCommitted
from mtx2vllm.converter.storage import Store, join, store_for
from mtx2vllm.converter.version.header import LAYOUT_KEY, Stored, read_header
from mtx2vllm.converter.version.pieces import DTYPES, Recipe, Typed, as_rows, head_of, read_rows, recipes, row_blocks
from mtx2vllm.converter.version.verify import CHUNK, Differing, Progress, Verification, load_manifest

_THREADS = 4
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.embedding.weight")


@dataclass(frozen=True)
class Side:
    """One directory: its tensors, where each lies, and how canonical tensors come from them."""

    location: str
    store: Store
    tensors: Mapping[str, Typed]
    places: Mapping[str, tuple[str, int]]  # tensor -> (path, offset)
    recipes: Mapping[str, Recipe]

    def read(self, source: str, offset: int, out: memoryview) -> None:
        """Bytes of a source tensor."""
        path, start = self.places[source]
        try:
            self.store.read_into(path, start + offset, out)
        except (FileNotFoundError, EOFError) as error:
            raise InputError(f"{self.location} changed while it was read: {error}.") from None

    def rows(self, recipe: Recipe, lo: int, hi: int) -> NDArray[Any]:
        """Rows of a canonical tensor."""
        return read_rows(recipe, (lo, hi), self.tensors, self.read)


def open_side(location: str, family: str | None = None) -> Side:
    """A version, or a plain Hugging Face directory; `family` serves where the latter has no config.json.

    Raises:
        InputError: no weights there, an unreadable header, or a family that cannot be told.
    """
    store = store_for(location)
    try:
        manifest, _ = load_manifest(location, store)
    except NotCommitted:
        return _plain_side(location, store, family)
    places = {name: (join(location, entry.file), entry.offset) for name, entry in manifest.tensors.items()}
    found = recipes(manifest.tensors, manifest.layout, manifest.family, head_of(manifest.conventions))
    return Side(location, store, manifest.tensors, places, found)


def _plain_side(location: str, store: Store, family: str | None) -> Side:
    names = [e.name for e in store.listdir(location) if not e.is_dir and e.name.endswith(".safetensors")]
    if not names:
        raise InputError(f"{location} holds neither a manifest nor *.safetensors files: there is nothing to compare.")
    tensors: dict[str, Stored] = {}
    places: dict[str, tuple[str, int]] = {}
    for name in names:
        path = join(location, name)
        stat = store.stat(path)
        header = read_header(store, path, stat.size if stat else 0)
        if header.metadata.get(LAYOUT_KEY, "hf") != "hf":
            raise InputError(f"{path} has the canonical layout, but no manifest lies beside it: not a whole version.")
        doubled = sorted(tensors.keys() & header.tensors.keys())
        if doubled:
            raise InputError(f"{path}: tensor {doubled[0]!r} ({len(doubled)} in all) also lies in another file there.")
        tensors |= header.tensors
        places |= {key: (path, stored.offset) for key, stored in header.tensors.items()}
    said, head = _described(location, store)
    return Side(location, store, tensors, places, recipes(tensors, "hf", said or family or "", head))


def _described(location: str, store: Store) -> tuple[str | None, int | None]:
    """Family and head size, as far as a config.json there says."""
    from mtx2vllm.schemas.model import ConfigError, model_of, schema_of

    try:
        config = json.loads(store.read(join(location, "config.json")))
        schema = schema_of(config)
    except (FileNotFoundError, ValueError, ConfigError):
        return None, None
    try:
        return schema.family, model_of(config, schema).sizes.get("head_dim")
    except ConfigError:
        return schema.family, None


def compare(location: str, against: str, progress: Progress | None = None) -> Verification:
    """Compare the text tensors of two directories bit by bit (where types differ: the exact values).

    Raises:
        InputError: one of them cannot be read.
    """
    manifest, _ = load_manifest(location)
    ours, theirs = open_side(location), open_side(against, manifest.family)
    pairs, problems = _pairs(ours, theirs)

    def one(item: tuple[str, tuple[Recipe, Recipe]]) -> Differing | None:
        name, (mine, other) = item
        found = _differing(name, mine, other, ours, theirs)
        if progress is not None:
            progress(mine.nbytes)
        return found

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="mtx2vllm-compare") as pool:
        differing = [found for found in pool.map(one, sorted(pairs.items())) if found is not None]
    total = len(ours.recipes.keys() | theirs.recipes.keys())
    ok = not differing and not problems
    return Verification(ok, total, len(pairs) - len(differing), differing, problems)


def _pairs(ours: Side, theirs: Side) -> tuple[dict[str, tuple[Recipe, Recipe]], list[str]]:
    """What can be compared, and sentences on what cannot."""
    a, b = _with_head(ours.recipes, theirs.recipes), _with_head(theirs.recipes, ours.recipes)
    problems = [f"{name} is in {ours.location} only." for name in sorted(a.keys() - b.keys())]
    problems += [f"{name} is in {theirs.location} only." for name in sorted(b.keys() - a.keys())]
    pairs = {}
    for name in a.keys() & b.keys():
        if a[name].shape == b[name].shape:
            pairs[name] = (as_rows(a[name]), as_rows(b[name]))
        else:
            problems.append(
                f"{name} is {list(a[name].shape)} in {ours.location}, but {list(b[name].shape)} in {theirs.location}."
            )
    return pairs, problems


def _with_head(mine: Mapping[str, Recipe], other: Mapping[str, Recipe]) -> Mapping[str, Recipe]:
    """A tied model may have its head written out or not: where only the other side has one, the embedding is ours."""
    if _HEAD in mine or _HEAD not in other:
        return mine
    embedding = next((mine[name] for name in _EMBEDDINGS if name in mine), None)
    return mine if embedding is None else {**mine, _HEAD: embedding}


def _differing(name: str, mine: Recipe, other: Recipe, ours: Side, theirs: Side) -> Differing | None:
    count, largest, finite = 0, 0.0, True
    for lo, hi in row_blocks(mine, CHUNK):
        x, y = ours.rows(mine, lo, hi), theirs.rows(other, lo, hi)
        unequal = _unequal(x, y)
        if not unequal.any():
            continue
        count += int(unequal.sum())
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(x[unequal].astype(np.float64) - y[unequal].astype(np.float64))
        finite = finite and bool(np.isfinite(gap).all())
        largest = max(largest, float(gap.max()))
    if count == 0:
        return None
    return Differing(name, count, prod(mine.shape), largest if finite else None)


def _unequal(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.bool_]:
    if x.dtype == y.dtype:
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
        different: NDArray[np.bool_] = x.view(bits) != y.view(bits)
        return different
    wide = DTYPES["F64"]  # holds every float of up to 32 bits exactly
    p, q = x.astype(wide), y.astype(wide)
    differs: NDArray[np.bool_] = (p != q) & ~(np.isnan(p) & np.isnan(q))
    return differs
