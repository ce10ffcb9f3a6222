"""Versions made with the safetensors library and a manifest by hand, so that no reader meets only our writer."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from blake3 import blake3
from safetensors.numpy import save_file

BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays(seed: int, layers: int = 2, rows: int = 8, columns: int = 6, dtype: Any = BF16) -> dict[str, np.ndarray]:
    """A toy text model in canonical names."""
    rng = np.random.default_rng(seed)
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{i}.mlp.down_proj.weight" for i in range(layers)]
    names += [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(layers)]
    return {n: rng.standard_normal((64 if "embed" in n else rows, columns)).astype(dtype) for n in names}


def header_of(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The raw header (length included) and its content."""
    data = path.read_bytes()
    raw = data[: 8 + int.from_bytes(data[:8], "little")]
    return raw, json.loads(raw[8:])


def hexdigest(data: bytes) -> str:
    return blake3(data).hexdigest()


def manifest_for(directory: Path, layout: str, step: int | None, family: str) -> dict[str, Any]:
    """A manifest of whatever lies in the directory."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != "mtx2vllm.json"):
        name, data = path.relative_to(directory).as_posix(), path.read_bytes()
        if path.suffix != ".safetensors":
            files[name] = {"size": len(data), "digest": hexdigest(data), "shard": False}
            continue
        raw, header = header_of(path)
        files[name] = {"size": len(data), "digest": hexdigest(raw), "shard": True}
        for key, entry in header.items():
            if key != "__metadata__":
                begin, end = (len(raw) + n for n in entry["data_offsets"])
                tensors[key] = {
                    "file": name, "offset": begin, "dtype": entry["dtype"], "shape": entry["shape"],
                    "blake3": hexdigest(data[begin:end]),
                }  # fmt: skip
    return {
        "format": 1, "layout": layout, "family": family, "architecture": "Qwen3ForCausalLM",
        "source": {"uri": "run", "step": step}, "tool": "test", "created": "2026-01-01T00:00:00Z",
        "files": files, "tensors": tensors,
    }  # fmt: skip


def write_version(
    directory: Path, tensors: dict[str, np.ndarray], layout: str = "canonical", shards: int = 2, commit: bool = True,
    family: str = "qwen3", created: str = "2026-01-01T00:00:00Z",
) -> Path:  # fmt: skip
    """Shards, an index, a config and, last, the manifest."""
    home = directory / "canonical" if layout == "canonical" else directory
    home.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in part}, str(home / file), {"format": "pt", "layout": layout})
        weight_map |= dict.fromkeys(part, file)
    (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    if commit:
        write_manifest(directory, layout, family, created)
    return directory


def write_manifest(
    directory: Path, layout: str = "canonical", family: str = "qwen3", created: str = "2026-01-01T00:00:00Z"
) -> None:
    """Commit the directory, as a writer does: the manifest appears whole."""
    step = int(directory.name) if directory.name.isdigit() else None
    content = manifest_for(directory, layout, step, family) | {"created": created}
    temporary = directory / ".mtx2vllm-test"
    temporary.write_text(json.dumps(content))
    temporary.rename(directory / "mtx2vllm.json")
