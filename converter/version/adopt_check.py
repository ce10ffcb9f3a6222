"""Is a directory that somebody else wrote a whole Hugging Face model? Names, shapes and types; no weight is read."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.fleet.places import is_trainers
from mtx2vllm.converter.hf_files import CONFIG, SIDE_FILES
from mtx2vllm.converter.job import plan
from mtx2vllm.converter.plans import Plan
from mtx2vllm.converter.storage import Stat, Store, join, parent, store_for
from mtx2vllm.converter.version.header import LAYOUT_KEY, Header, Stored, read_header
from mtx2vllm.converter.version.pieces import fold, head_of, is_text, recipes

INDEX = "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32", "F64")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_IGNORED = ("rotary_emb.inv_freq",)  # recomputed by every reader
_SHOWN = 8


@dataclass(frozen=True)
class Found:
    """A whole model: its files with what they were when looked at, headers of the shards, and where each tensor lies.
    `tied_head` is a written head that must equal the embedding. `aside` are weights that do not belong to it."""

    location: str
    config: dict[str, Any]
    plan: Plan
    shards: Mapping[str, Header]
    stats: Mapping[str, Stat]
    tensors: Mapping[str, tuple[str, Stored]]
    tied_head: tuple[str, str] | None
    aside: tuple[str, ...]
    notes: tuple[str, ...]


def look(location: str) -> Found:
    """Check a directory.

    Raises:
        InputError: with every problem: no config, files of the index that are missing, damaged headers, tensors that
            are missing, of another shape, quantized, or of no known model.
    """
    store = store_for(location)
    _refuse_file(store, location)
    entries = {e.name for e in store.listdir(location) if not e.is_dir}
    if not any(name.endswith(".safetensors") for name in entries) and is_trainers(location):
        raise InputError(
            f"{location} is a MaxText checkpoint, not a Hugging Face directory; convert it: mtx2vllm convert {location} OUT"
        )
    if not entries and (below := sorted(e.name for e in store.listdir(location))):
        raise InputError(
            f"{location} holds directories only ({', '.join(below[:3])}{', ...' if len(below) > 3 else ''}); give one with "
            "config.json and *.safetensors"
        )
    if not entries:
        raise InputError(f"{location} does not exist or is empty; give a directory with config.json and *.safetensors")
    config = _config(store, location)
    expected = plan(config, layout="hf")
    listed = _index(store, location) if INDEX in entries else None
    names = sorted(set(listed.values()) if listed else {n for n in entries if n.endswith(".safetensors")})
    if not names:
        other = sorted(n for n in entries if n.endswith((".bin", ".pt", ".pth")))
        hint = f"; {other[0]} is a pickle, which is never loaded: save it as safetensors first" if other else ""
        raise InputError(f"{location} holds no *.safetensors files{hint}")
    shards, stats, problems = _headers(store, location, names)
    tensors: dict[str, tuple[str, Stored]] = {}
    for file, header in shards.items():
        for name, stored in header.tensors.items():
            if name in tensors:
                problems.append(f"tensor {name} lies in {tensors[name][0]} and in {file}")
            tensors[name] = (file, stored)
    if listed is not None and len(shards) == len(names):
        problems += _index_problems(listed, tensors)
    if problems:
        raise InputError(f"{location}: {text}" for text in problems)
    notes, problems = _model_problems({n: s for n, (_, s) in tensors.items()}, config, expected)
    if problems:
        raise InputError(f"{location}: {text}" for text in problems)
    for name in (CONFIG, INDEX, *SIDE_FILES):
        if name in entries and (stat := store.stat(join(location, name))):
            stats[name] = stat
    aside = tuple(sorted(n for n in entries if n.endswith(_OTHER_WEIGHTS) and n not in stats))
    return Found(location, config, expected, shards, stats, tensors, _tied_head(tensors, expected), aside, tuple(notes))


def _refuse_file(store: Store, location: str) -> None:
    if store.stat(location):
        raise InputError(
            f"{location} is a file; give the directory with config.json and *.safetensors: mtx2vllm adopt {parent(location)}"
        )


def _config(store: Store, location: str) -> dict[str, Any]:
    path = join(location, CONFIG)
    try:
        config = json.loads(store.read(path))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: without it nobody knows which model the weights are") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a Hugging Face config: a JSON object was expected")
    return config


def _index(store: Store, location: str) -> dict[str, str]:
    path = join(location, INDEX)
    try:
        found = json.loads(store.read(path))["weight_map"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} has no weight_map: it is not an index; write the model anew, or remove it") from None
    if not isinstance(found, dict) or not all(isinstance(f, str) and "/" not in f for f in found.values()):
        raise InputError(f"{path}: weight_map must name files beside it; write the model anew, or remove the index")
    return found


def _headers(store: Store, location: str, names: Iterable[str]) -> tuple[dict[str, Header], dict[str, Stat], list[str]]:
    headers: dict[str, Header] = {}
    stats: dict[str, Stat] = {}
    problems: list[str] = []
    for name in names:
        path = join(location, name)
        stat = store.stat(path)
        if stat is None:
            problems.append(f"{name} is missing, though {INDEX} lists it: the directory was not copied whole")
            continue
        try:
            header = read_header(store, path, stat.size)
        except InputError as error:
            problems += error.problems
            continue
        if header.metadata.get(LAYOUT_KEY, "hf") != "hf":
            problems.append(f"{name} has layout {header.metadata[LAYOUT_KEY]}; only Hugging Face files can be adopted")
        headers[name], stats[name] = header, stat
    return headers, stats, problems


def _index_problems(listed: Mapping[str, str], tensors: Mapping[str, tuple[str, Stored]]) -> list[str]:
    problems = _listing(listed.keys() - tensors.keys(), f"tensors of {INDEX} are in no file")
    problems += _listing(tensors.keys() - listed.keys(), f"tensors of the files are not in {INDEX}")
    moved = [n for n in listed.keys() & tensors.keys() if listed[n] != tensors[n][0]]
    return problems + _listing(moved, f"tensors lie in another file than {INDEX} says")


def _model_problems(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], expected: Plan
) -> tuple[list[str], list[str]]:
    """Notes, and what tells the tensors from the model that the config describes. One tensor at a time where the names
    are those that `transformers` writes; as canonical tensors, too, which knows the experts' other spellings."""
    text = {fold(n): s for n, s in tensors.items() if is_text(fold(n)) and not n.endswith(_IGNORED)}
    aside = len(tensors) - len(text)
    notes = [f"{aside} tensors beside the text model (vision tower, or other things that are not trained)"] * bool(
        aside
    )
    odd = {n: s.dtype for n, s in text.items() if s.dtype not in _FLOATS}
    if "quantization_config" in config or odd:
        first = next(iter(odd), None)
        what = f"{first} is {odd[first]}" if first else "config.json has a quantization_config"
        return notes, [f"the weights are quantized ({what}); adopt the model in bfloat16, float16 or float32"]
    wanted = {fold(t.name): t.shape for t in expected.tensors}
    problems = _misshapen({n: s.shape for n, s in text.items() if n in wanted}, wanted)
    if not problems:
        used = {n: s for n, s in tensors.items() if fold(n) in text}
        canonical = {n: r.shape for n, r in recipes(used, "hf", expected.family, head_of(expected.conventions)).items()}
        whole = {fold(t.name): t.shape for t in plan(config, layout="canonical").tensors}
        extra = canonical.keys() - whole.keys() - {_HEAD}
        problems += _listing(whole.keys() - canonical.keys(), "tensors that config.json asks for are missing")
        problems += _listing(extra, f"text tensors are not of the {expected.family} model that config.json describes")
        problems += _misshapen({n: s for n, s in canonical.items() if n in whole}, whole)
    return notes, problems


def _misshapen(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    wrong = [
        f"{n} is {list(shape)}, config.json implies {list(wanted[n])}"
        for n, shape in found.items()
        if shape != wanted[n]
    ]
    return _listing(wrong, "tensors have another shape than config.json implies")


def _listing(names: Collection[str], what: str) -> list[str]:
    if not names:
        return []
    shown = "; ".join(sorted(names)[:_SHOWN])
    return [f"{len(names)} {what}: {shown}{'; ...' if len(names) > _SHOWN else ''}"]


def _tied_head(tensors: Mapping[str, object], expected: Plan) -> tuple[str, str] | None:
    """Head and embedding where a tied model has its head written out."""
    names = {fold(name): name for name in tensors}
    if _HEAD in {fold(t.name) for t in expected.tensors} or _HEAD not in names or _EMBEDDING not in names:
        return None
    return names[_HEAD], names[_EMBEDDING]
