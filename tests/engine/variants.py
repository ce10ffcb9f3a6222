"""Models of sizes that no fixture has, made for a test: a fixture's config with other numbers, and random weights under
Hugging Face's names. There is no dump of vLLM's for them: a cold start of the same directory is the oracle.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parent.parent / "data"

_PAGES = {"per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 2} for layer in ("05", "11")}}
# name -> (fixture, changes of its text model's config)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # As many linear key heads as TP=4 needs; the fixtures have two.
    "qwen3.5-moe-wide": ("qwen3.5-moe", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    # Pages of one size in both kinds of layers: others make vLLM's unify_kv_cache_spec_page_size stop with an assertion,
    # because it scales the block of tpu-inference's specs and not the page that they were padded to.
    "gemma4-pages": ("gemma4", _PAGES),
    "gemma4-moe-pages": ("gemma4-moe", _PAGES),
    "qwen3-next-wide": ("qwen3-next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
}

QUANTIZED = "qwen3-fp8"


@cache
def directory(family: str) -> Path:
    """The Hugging Face directory of a fixture, or of a variant, made now."""
    if family == QUANTIZED:
        return _quantized("qwen3")
    if family not in VARIANTS:
        return DATA / family / "hf"
    from mtx2vllm.converter.job import plan

    fixture, changes = VARIANTS[family]
    config = json.loads((DATA / fixture / "hf" / "config.json").read_text())
    config.get("text_config", config).update(changes)
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    draw = np.random.default_rng(0)
    prefix = _prefix(DATA / fixture / "hf" / "model.safetensors")
    tensors = {}
    for tensor in plan(config, layout="hf").tensors:
        values = 0.05 * draw.standard_normal(tensor.shape, np.float32)
        name = prefix + tensor.name.removeprefix("model.") if tensor.name.startswith("model.") else tensor.name
        tensors[name] = (values + 1 if len(tensor.shape) == 1 else values).astype(ml_dtypes.bfloat16)
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _prefix(file: Path) -> str:
    """Where the text model lies in the fixture's own file: multimodal models are loaded from its whole names only."""
    with safe_open(str(file), "numpy") as tensors:
        return "model.language_model." if any("language_model." in name for name in tensors.keys()) else "model."  # noqa: SIM118


def _quantized(fixture: str) -> Path:
    """The fixture with its linears in FP8, one scale a tensor, as published FP8 checkpoints are."""
    config = json.loads((DATA / fixture / "hf" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    tensors = {}
    for name, values in load_file(DATA / fixture / "hf" / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = values
            continue
        wide = values.astype(np.float32)
        scale = np.float32(np.abs(wide).max() / 448)
        tensors[name] = (wide / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale"] = np.array(scale)
    folder = Path(tempfile.mkdtemp(prefix=f"{QUANTIZED}-"))
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
