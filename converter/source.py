"""Read what an Orbax checkpoint of MaxText is, from its metadata alone: leaves, dtypes, shapes, chunks.

Formats (facts read off MaxText 0.2.5 with Orbax 0.12): `items/_METADATA` is JSON with the tree's keys; shape and dtype
stand in each array's zarr metadata, within OCDBT or a directory. Neither MaxText nor Orbax is imported.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.locate import METADATA, locate
from mtx2vllm.converter.plans import Drop, Leaf
from mtx2vllm.converter.storage import Store, join, parent, store_for
from mtx2vllm.converter.storage.retry import looked_at_twice

# What TensorStore and its dtypes raise for arrays that it cannot open.
_REFUSALS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError)


@dataclass(frozen=True)
class Checkpoint:
    """One step. `leaves` are the model's parameters by normalized path; `drops` what else the tree holds."""

    items: str  # location of the directory with _METADATA
    step: int | None
    leaves: dict[str, Leaf]
    drops: tuple[Drop, ...]
    zarr: str  # TensorStore's driver: zarr or zarr3
    ocdbt: bool
    custom: dict[str, Any]  # Orbax's custom_metadata

    def spec(self, leaf: Leaf) -> dict[str, Any]:
        """The TensorStore spec of a leaf. A missing chunk is an error, not zeros."""
        return _spec(self.items, leaf.key, self.zarr, self.ocdbt)


def open_checkpoint(checkpoint: str, step: int | None = None, allow_uncommitted: bool = False) -> Checkpoint:
    """Read the metadata of a step.

    Raises:
        InputError: as `locate`; unreadable metadata; data files of the index that are missing.
    """
    items, number = locate(checkpoint, step, allow_uncommitted)
    if step is not None and number is not None and step != number:
        raise InputError(f"{checkpoint} is step {number}, not step {step}; drop --step or name the run")
    store = store_for(items)
    metadata, keys = _tree(store, items)
    zarr = "zarr3" if metadata.get("use_zarr3") else "zarr"
    ocdbt = bool(metadata.get("use_ocdbt", False))
    wanted, drops = _parameters(keys, items)
    if not wanted:
        raise InputError(f"{items} holds no parameters ({METADATA} names {len(keys)} other entries): not a model")
    leaves = _open(items, wanted, zarr, ocdbt)
    return Checkpoint(items, number, leaves, tuple(drops), zarr, ocdbt, _custom(store, items))


def _tree(store: Store, items: str) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """The metadata, and the keys of every array."""
    path = join(items, METADATA)
    try:
        metadata = json.loads(store.read(path))
        keys = [
            tuple(str(k["key"]) for k in entry["key_metadata"])
            for entry in metadata["tree_metadata"].values()
            if not entry["value_metadata"].get("skip_deserialize")
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, FileNotFoundError) as error:
        raise InputError(
            f"{path} cannot be read as Orbax metadata ({type(error).__name__}: {error}); the checkpoint is damaged or half "
            "copied, copy it again"
        ) from None
    if () in keys:
        raise InputError(f"{path} names an array without a key; the checkpoint is damaged, copy it again")
    return metadata, keys


def _custom(store: Store, items: str) -> dict[str, Any]:
    try:
        found = json.loads(store.read(join(parent(items), "_CHECKPOINT_METADATA"))).get("custom_metadata") or {}
    except (FileNotFoundError, ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parameters(keys: list[tuple[str, ...]], items: str) -> tuple[dict[str, str], list[Drop]]:
    """Normalized path -> key in the store, for parameters; the rest is dropped by name, one line a kind."""
    wanted: dict[str, str] = {}
    dropped: dict[str, str] = {}
    problems = []
    for key in keys:
        reason = _not_a_parameter(key)
        path, name = normalize(key), ".".join(key)
        if reason:
            dropped.setdefault(key[0] if key[0] in {"opt_state", "nnx_aux"} else name, reason)
        elif {"", ".", ".."} & set(key) or "/" in name:
            problems.append(f"{items} names the impossible key {key!r}; the checkpoint is damaged, copy it again")
        elif path in wanted:
            problems.append(
                f"leaf {path} is in {items} twice, as {wanted[path]} and as {name}; save the parameters alone, since nobody "
                "can know which is meant"
            )
        else:
            wanted[path] = name
    if problems:
        raise InputError(problems)
    return wanted, [Drop(path, reason) for path, reason in dropped.items()]


def _not_a_parameter(key: tuple[str, ...]) -> str | None:
    if key[0] == "opt_state":
        return "optimizer state is not served"
    if key[0] == "nnx_aux" or any(part == "rngs" or part.endswith("_rngs") for part in key):
        return "random number generators are not weights"
    if key in {("step",), ("step", "value")}:
        return "the step counter is not a weight"
    return None


def normalize(key: tuple[str, ...]) -> str:
    """Strip wrappers: `params/params/...`, `params/MoEBiasVar/...`, `base/...`, a trailing `value`; fold an NNX list's
    numbers (`layers/0` becomes `layers_0`)."""
    parts = list(key)
    if parts[-1] == "value":
        parts.pop()
    while parts and parts[0] in {"params", "base", "model", "MoEBiasVar"}:
        parts.pop(0)
    folded: list[str] = []
    for part in parts:
        if part.isdigit() and folded:
            folded[-1] += f"_{part}"
        else:
            folded.append(part)
    return ".".join(folded)


def open_leaf(checkpoint: Checkpoint, leaf: Leaf) -> Any:
    """The leaf's array as a tensorstore.TensorStore, for reading.

    Raises:
        InputError: it cannot be opened any more.
    """
    import tensorstore as ts

    try:
        return looked_at_twice(lambda: ts.open(checkpoint.spec(leaf), open=True, read=True))
    except _REFUSALS as error:
        raise InputError(_unopened(checkpoint.items, _cause(error), [leaf.path])) from None


def _spec(items: str, key: str, zarr: str, ocdbt: bool) -> dict[str, Any]:
    store = store_for(items)
    if ocdbt:
        base = store.kvstore(items + "/")
        kvstore: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": key + "/"}
    else:
        kvstore = store.kvstore(join(items, key) + "/")
    return {"driver": zarr, "kvstore": kvstore, "fill_missing_data_reads": False}


def _open(items: str, wanted: dict[str, str], zarr: str, ocdbt: bool) -> dict[str, Leaf]:
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    starts = {
        path: partial(ts.open, _spec(items, key, zarr, ocdbt), open=True, read=True, context=context)
        for path, key in wanted.items()
    }
    futures = {path: start() for path, start in starts.items()}
    leaves: dict[str, Leaf] = {}
    failed: dict[str, list[str]] = {}
    for path, future in futures.items():
        try:
            array = looked_at_twice(starts[path], future)
            dtype = array.dtype.numpy_dtype.name
        except _REFUSALS as error:
            failed.setdefault(_cause(error), []).append(path)
            continue
        chunks = array.chunk_layout.read_chunk.shape or array.shape
        shape = tuple(int(n) for n in array.shape)
        leaves[path] = Leaf(path, wanted[path], shape, dtype, tuple(int(n or 1) for n in chunks))
    if failed:
        raise InputError(_unopened(items, cause, paths) for cause, paths in failed.items())
    return leaves


def _unopened(items: str, cause: str, paths: list[str]) -> str:
    shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    whose = "leaves" if len(paths) > 1 else "leaf"
    return f"{whose} {shown} of {items} cannot be opened: {cause}; copy the checkpoint again from where it was written"


def _cause(error: Exception) -> str:
    """Words for TensorStore's errors (the kinds are told apart by the message's beginning)."""
    kind = str(error).split(":", 1)[0]
    cause = {
        "NOT_FOUND": "the index or a data file is missing",
        "OUT_OF_RANGE": "a data file is truncated",
        "DATA_LOSS": "a data file is damaged or missing",
        "FAILED_PRECONDITION": "a data file is damaged or missing",
        "PERMISSION_DENIED": "permission is denied",
    }.get(kind, f"its metadata are damaged, or of a kind that is not supported ({str(error)[:200]})")
    return f"{cause} ({kind})" if kind.isupper() and " " not in kind else cause
