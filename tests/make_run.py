"""Checkpoints written by TensorStore as MaxText's look, from arrays that a test makes up."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorstore as ts
from numpy.typing import NDArray


def write_step(
    step: Path,
    arrays: Mapping[str, NDArray[Any]],
    *,
    zarr3: bool = True,
    ocdbt: bool = True,
    chunks: Mapping[str, tuple[int, ...]] | None = None,
    custom: Mapping[str, Any] | None = None,
) -> Path:
    """A step directory; keys are dotted (`params.params.decoder...`). `chunks` by key; one chunk an array otherwise."""
    items = step / "items"
    items.mkdir(parents=True)
    tree = {}
    for key, values in arrays.items():
        parts = key.split(".")
        tree[str(tuple(parts))] = {
            "key_metadata": [{"key": part, "key_type": 2} for part in parts],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        kvstore: dict[str, Any] = {"driver": "file", "path": f"{items}/{key}/"}
        if ocdbt:
            kvstore = {"driver": "ocdbt", "base": f"file://{items}/", "path": f"{key}/"}
        shape = (chunks or {}).get(key, values.shape)
        layout = {"chunk_layout": ts.ChunkLayout(chunk_shape=[max(1, n) for n in shape])} if shape else {}
        store = ts.open(
            {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore},
            create=True, dtype=ts.dtype(values.dtype.name), shape=values.shape, **layout,
        ).result()  # fmt: skip
        store.write(values).result()
    metadata = {"tree_metadata": tree, "use_ocdbt": ocdbt, "use_zarr3": zarr3}
    (items / "_METADATA").write_text(json.dumps(metadata))
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": dict(custom or {})}))
    (step / "commit_success.txt").touch()
    return step


def read_step(step: Path) -> dict[str, NDArray[Any]]:
    """Every array of a step that has metadata, by dotted key."""
    items = step / "items"
    metadata = json.loads((items / "_METADATA").read_text())
    found = {}
    for entry in metadata["tree_metadata"].values():
        if entry["value_metadata"].get("skip_deserialize"):
            continue
        key = ".".join(str(part["key"]) for part in entry["key_metadata"])
        kvstore: dict[str, Any] = {"driver": "file", "path": f"{items}/{key}/"}
        if metadata["use_ocdbt"]:
            kvstore = {"driver": "ocdbt", "base": f"file://{items}/", "path": f"{key}/"}
        driver = "zarr3" if metadata["use_zarr3"] else "zarr"
        found[key] = ts.open({"driver": driver, "kvstore": kvstore}, open=True, read=True).result().read().result()
    return found
