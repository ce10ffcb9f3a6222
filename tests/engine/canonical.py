"""Canonical tensors of a fixture family, proven to be vLLM's own bits before any test uses them."""

import hashlib
import json
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.version.compare import open_side
from mtx2vllm.converter.version.pieces import fold

from .variants import DATA, VARIANTS, directory

_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}

Tensors = dict[str, NDArray[Any]]


def canonical(family: str) -> Tensors:
    """Every canonical tensor and loaded buffer of `family`'s hf/ directory, each with the digest that vLLM's dump has. Of a
    variant there is no dump: its names and types are the plan's."""
    if family in VARIANTS:
        return _planned(family)
    folder = DATA / family
    digests = json.loads((folder / "canonical_digests.json").read_text())
    buffers = folder / "canonical_buffer_digests.json"
    if buffers.exists():
        digests |= json.loads(buffers.read_text())
    side = open_side(str(folder / "hf"))
    tensors: Tensors = {}
    for name, entry in digests.items():
        recipe = side.recipes[fold(name)]
        values = side.rows(recipe, 0, recipe.shape[0]).reshape(entry["shape"]).astype(_DTYPES[entry["dtype"]])
        values = np.ascontiguousarray(values)
        if hashlib.sha256(values.tobytes()).hexdigest() != entry["sha256"]:
            raise AssertionError(f"{family}: {name} is not what vLLM holds; the oracle and the source disagree")
        tensors[name] = values
    return tensors


def _planned(family: str) -> Tensors:
    from mtx2vllm.converter.job import plan

    folder = directory(family)
    side = open_side(str(folder))
    tensors: Tensors = {}
    for tensor in plan(str(folder), layout="canonical").tensors:
        values = side.rows(side.recipes[fold(tensor.name)], 0, tensor.shape[0])
        tensors[tensor.name] = np.ascontiguousarray(values.astype(tensor.dtype))
    return tensors


def other(tensors: Tensors, seed: int = 1) -> Tensors:
    """A second set of weights of the same shapes: every tensor's own values in another order, so that the model
    stays as well conditioned as the first and no tensor keeps its bits."""
    draw = np.random.default_rng(seed)
    return {name: draw.permutation(x.reshape(-1)).reshape(x.shape) for name, x in tensors.items()}
