"""The Hugging Face side of a version: where its config is found, and the files beside the weights."""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.storage import Store, basename, join, parent, store_for
from mtx2vllm.schemas.model import text_config
from mtx2vllm.schemas.rules import Schema

CONFIG = "config.json"
# What `transformers` and vLLM look for beside config.json; anything else in a source directory is not ours to copy.
SIDE_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "tekken.json",
)  # fmt: skip
_PARENTS = 4
_MOST_BYTES = 16 << 20  # a real one has a few KB


@dataclass(frozen=True)
class HfSource:
    """A config and the directory it lies in (None for a lone file)."""

    config: dict[str, Any]
    directory: str | None
    where: str


def find_config(given: str | None, checkpoint: str | None) -> HfSource | None:
    """Look for config.json as given, else in the checkpoint, else in its parents; None where none is found.

    Raises:
        InputError: what was given does not exist or is not a config.
    """
    if given is not None:
        return _given(given)
    where = local_path(checkpoint) if checkpoint else None
    for _ in range(_PARENTS):
        if not where:
            break
        store = store_for(where)
        if store.stat(join(where, CONFIG)):
            return HfSource(_load(store, join(where, CONFIG)), where, join(where, CONFIG))
        above = parent(where)
        if above == where:
            break
        where = above
    return None


def _given(given: str) -> HfSource:
    store = store_for(given)
    if store.stat(given):
        directory = parent(given) if basename(given) == CONFIG else None
        return HfSource(_load(store, given), directory, given)
    if store.stat(join(given, CONFIG)):
        return HfSource(_load(store, join(given, CONFIG)), given, join(given, CONFIG))
    if store.listdir(given):
        raise InputError(f"{given} has no {CONFIG}; --hf-config wants a config.json, a directory with one, or a Hub id")
    if given.count("/") <= 1 and not given.startswith((".", "/", "gs://")):
        return _from_hub(given)
    raise InputError(f"--hf-config {given} does not exist; give a config.json, a directory with one, or a Hub id")


def _from_hub(name: str) -> HfSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(name, allow_patterns=[CONFIG, *SIDE_FILES])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"--hf-config {name} is neither a path here nor a model that the Hugging Face Hub gives "
            f"({type(error).__name__}); check the spelling, or download its config.json and name that"
        ) from None
    return HfSource(_load(store_for(path), join(path, CONFIG)), path, f"Hub: {name}")


def _load(store: Store, path: str) -> dict[str, Any]:
    stat = store.stat(path)
    if stat is not None and stat.size > _MOST_BYTES:
        raise InputError(
            f"{path} has {stat.size:,} bytes, far more than a config; --hf-config wants a Hugging Face config.json"
        )
    try:
        config = json.loads(store.read(path))
    except (ValueError, RecursionError, FileNotFoundError) as error:
        raise InputError(f"{path} is not JSON ({error}); --hf-config wants a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a Hugging Face config: a JSON object was expected")
    return config


def written_config(
    config: Mapping[str, Any], schema: Schema, architecture: str, dtype: str, *, whole: bool
) -> tuple[dict[str, Any], list[str]]:
    """config.json of what is written, and what was changed, in words.

    Args:
        config: the source's.
        schema: the family.
        architecture: the class that is written.
        dtype: of the weights.
        whole: keep a multimodal config as it is (the weights are its wrapper's); else write the text model's alone.
    """
    changes: list[str] = []
    out = copy.deepcopy(dict(config) if whole else text_config(config))
    if not whole and "text_config" in config:
        changes.append(f"text model only: {architecture}")
        for key in ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"):
            if key not in out and key in config:
                out[key] = config[key]
        out["model_type"] = schema.model_type
    if out.get("architectures") != [architecture]:
        changes.append(f"architectures: {architecture}")
    out["architectures"] = [architecture]
    text = out.get("text_config") if whole else None
    changes += _removed([out, text])
    for target in (out, text):
        if isinstance(target, dict):
            old = target.pop("torch_dtype", None) or target.get("dtype")
            if old != dtype and target is out:
                changes.append(f"dtype: {dtype}")
            target["dtype"] = dtype
    body = text if isinstance(text, dict) else out
    for key, value in schema.fixed.items():
        if key not in body:
            body[key] = value
            changes.append(f"{key}: {value}, which vLLM needs")
    return out, changes


_UNWANTED = {
    "quantization_config": "the weights are not quantized",
    "compression_config": "the weights are not quantized",
    "auto_map": "code is never taken over",
}


def _removed(configs: list[Any]) -> list[str]:
    found = [config for config in configs if isinstance(config, dict)]
    gone = [key for key in _UNWANTED if [config.pop(key) for config in found if key in config]]
    return [f"{key} removed: {_UNWANTED[key]}" for key in gone]


def side_files(source: HfSource | None) -> dict[str, str]:
    """Names of files to copy beside the weights -> where they are."""
    if source is None or source.directory is None:
        return {}
    store = store_for(source.directory)
    names = {e.name for e in store.listdir(source.directory) if not e.is_dir}
    return {name: join(source.directory, name) for name in SIDE_FILES if name in names}


def local_path(location: str) -> str:
    """An absolute form for records; remote locations stay as they are."""
    return location if "://" in location else os.path.abspath(location)  # noqa: PTH100
