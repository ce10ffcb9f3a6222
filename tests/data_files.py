"""Where the real checkpoints lie, and how tests look at written tensors without this project's own readers."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
_NUMPY = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "I64": "int64"}


def raw_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes) of a safetensors file or a directory of them, by the format's own definition."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in files:
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + at for at in entry["data_offsets"])
            found[name] = (entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return found


def arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The same as numpy arrays."""
    return {n: np.frombuffer(b, _NUMPY[d]).reshape(s) for n, (d, s, b) in raw_tensors(path).items()}


def digests(path: Path) -> dict[str, dict[str, Any]]:
    """name -> {dtype, shape, sha256}, as the oracle files of tests/data hold them."""
    return {
        n: {"dtype": d, "shape": list(s), "sha256": hashlib.sha256(b).hexdigest()}
        for n, (d, s, b) in raw_tensors(path).items()
    }


def oracle(path: Path) -> dict[str, dict[str, Any]]:
    """A digests file of tests/data."""
    loaded: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return loaded


def folded(name: str) -> str:
    """A text tensor's name without its multimodal wrapper."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def is_text(name: str) -> bool:
    """Whether a tensor belongs to the text model."""
    return not any(word in name for word in ("visual.", "vision_", "multi_modal_projector", "embed_vision"))
