"""Read what an Orbax checkpoint of MaxText is, from its metadata alone: leaves, dtypes, shapes, chunks.

Formats (facts read off MaxText 0.2.5 with Orbax 0.12): `items/_METADATA` is JSON with the tree's keys; shape and dtype
stand in each array's zarr metadata, within OCDBT or a directory. Neither MaxText nor Orbax is imported.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from mtx2vllm.converter.errors import InputError, NotCommitted, StorageError
from mtx2vllm.converter.plan import Drop, Leaf
from mtx2vllm.converter.storage import Store, basename, join, parent, store_for

METADATA = "_METADATA"
COMMIT = "commit_success.txt"
_TEMPORARY = ".orbax-checkpoint-tmp"


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


def locate(checkpoint: str, step: int | None = None, allow_uncommitted: bool = False) -> tuple[str, int | None]:
    """The `items/` directory that a user means by a run, a `checkpoints/`, a step or an `items/` directory.

    Returns:
        Its location, and the step's number where a directory is named by it.

    Raises:
        InputError: nothing there, no checkpoint, no such step.
        NotCommitted: the step has no commit marker.
    """
    store = store_for(checkpoint)
    if store.stat(join(checkpoint, METADATA)):
        return _committed(store, checkpoint, parent(checkpoint), allow_uncommitted)
    if store.stat(join(checkpoint, "items", METADATA)):
        return _committed(store, join(checkpoint, "items"), checkpoint, allow_uncommitted)
    names = {e.name for e in store.listdir(checkpoint) if e.is_dir}
    if "checkpoints" in names:
        return locate(join(checkpoint, "checkpoints"), step, allow_uncommitted)
    return _choose(store, checkpoint, steps(checkpoint, allow_uncommitted), step)


def steps(run: str, allow_uncommitted: bool = False) -> list[int]:
    """The committed steps of a `checkpoints/` directory, ascending, compared as numbers.

    Locally a step's name is its commit (Orbax renames); on object stores its commit file is.
    """
    store = store_for(run)
    remote = store.local(run) is None
    found = []
    for entry in store.listdir(run):
        if entry.is_dir and re.fullmatch(r"\d+", entry.name):
            where = join(run, entry.name)
            if allow_uncommitted or not remote or store.stat(join(where, COMMIT)):
                found.append(int(entry.name))
    return sorted(found)


def _choose(store: Store, run: str, known: list[int], step: int | None) -> tuple[str, int | None]:
    if not known:
        raise InputError(_nothing(store, run))
    if step is not None and step not in known:
        raise InputError(f"{run} has no committed step {step}; its steps are {', '.join(map(str, known[-8:]))}")
    chosen = known[-1] if step is None else step
    name = next(e.name for e in store.listdir(run) if e.name.isdigit() and int(e.name) == chosen)
    items = join(run, name, "items")
    if not store.stat(join(items, METADATA)):
        raise InputError(
            f"step {chosen} in {run} has no items/{METADATA}: it is not a checkpoint that MaxText wrote, or half copied"
        )
    return items, chosen


def _nothing(store: Store, where: str) -> str:
    entries = store.listdir(where)
    if any(_TEMPORARY in e.name for e in entries):
        return (
            f"{where} holds only checkpoints that are still being written ({_TEMPORARY}); wait until one is committed"
        )
    waiting = [e.name for e in entries if e.is_dir and e.name.isdigit()]
    if waiting:
        return (
            f"{where} has no committed step: {', '.join(waiting[:5])} lack {COMMIT}. If they were copied from elsewhere and "
            "are whole, pass --allow-uncommitted"
        )
    if entries:
        return f"{where} is no MaxText checkpoint: neither items/{METADATA} nor numbered steps are in it"
    return f"{where} does not exist or is empty; give a run, a checkpoints/ directory, a step, or its items/"


def _committed(store: Store, items: str, step_dir: str, allow: bool) -> tuple[str, int | None]:
    name = basename(step_dir)
    remote = store.local(items) is None
    if not allow:
        if _TEMPORARY in name or _TEMPORARY in basename(items):
            raise NotCommitted(
                f"{step_dir} is still being written ({_TEMPORARY} in its name); wait, or pass --allow-uncommitted"
            )
        if remote and not store.stat(join(step_dir, COMMIT)) and not store.stat(join(items, COMMIT)):
            raise NotCommitted(
                f"{step_dir} lacks {COMMIT}: the trainer has not finished it, or a copy left the marker behind. If it is "
                "whole, pass --allow-uncommitted"
            )
    return items, int(name) if name.isdigit() else None


def open_checkpoint(checkpoint: str, step: int | None = None, allow_uncommitted: bool = False) -> Checkpoint:
    """Read the metadata of a step.

    Raises:
        InputError: as `locate`; unreadable metadata; data files of the index that are missing.
    """
    items, number = locate(checkpoint, step, allow_uncommitted)
    if step is not None and number is not None and step != number:
        raise InputError(f"{checkpoint} is step {number}, not step {step}; drop --step or name the run")
    store = store_for(items)
    try:
        metadata = json.loads(store.read(join(items, METADATA)))
        tree = metadata["tree_metadata"]
        keys = [
            tuple(str(k["key"]) for k in entry["key_metadata"])
            for entry in tree.values()
            if not entry["value_metadata"].get("skip_deserialize")
        ]
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise InputError(
            f"{join(items, METADATA)} cannot be read as Orbax metadata ({error}); the checkpoint is half copied"
        ) from None
    zarr = "zarr3" if metadata.get("use_zarr3") else "zarr"
    ocdbt = bool(metadata.get("use_ocdbt", False))
    wanted, drops = _parameters(keys)
    leaves = _open(items, wanted, zarr, ocdbt)
    return Checkpoint(items, number, leaves, tuple(drops), zarr, ocdbt, _custom(store, items))


def _custom(store: Store, items: str) -> dict[str, Any]:
    try:
        found = json.loads(store.read(join(parent(items), "_CHECKPOINT_METADATA"))).get("custom_metadata") or {}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def _parameters(keys: list[tuple[str, ...]]) -> tuple[dict[str, str], list[Drop]]:
    """Normalized path -> key in the store, for parameters; the rest is dropped by name, one line a kind."""
    wanted: dict[str, str] = {}
    dropped: dict[str, str] = {}
    for key in keys:
        reason = _not_a_parameter(key)
        if reason:
            dropped.setdefault(key[0] if key[0] in {"opt_state", "nnx_aux"} else ".".join(key), reason)
        else:
            wanted[normalize(key)] = ".".join(key)
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
    """The leaf's array as a tensorstore.TensorStore, for reading."""
    import tensorstore as ts

    return ts.open(checkpoint.spec(leaf), open=True, read=True).result()


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
    futures = {
        path: ts.open(_spec(items, key, zarr, ocdbt), open=True, read=True, context=context)
        for path, key in wanted.items()
    }
    leaves: dict[str, Leaf] = {}
    problems: list[str] = []
    for path, future in futures.items():
        try:
            array = future.result()
        except ValueError as error:
            problems.append(read_problem(path, items, error))
            continue
        chunks = array.chunk_layout.read_chunk.shape or array.shape
        shape = tuple(int(n) for n in array.shape)
        leaves[path] = Leaf(path, wanted[path], shape, array.dtype.numpy_dtype.name, tuple(int(n or 1) for n in chunks))
    if problems:
        raise InputError(dict.fromkeys(problems))
    return leaves


def read_problem(path: str, items: str, error: Exception) -> str:
    """A sentence for TensorStore's ValueError (its kinds are told apart by the message's beginning)."""
    text = str(error)
    kind = text.split(":", 1)[0]
    cause = {
        "NOT_FOUND": "its index or a data file is missing",
        "OUT_OF_RANGE": "a data file is truncated",
        "DATA_LOSS": "a data file is damaged or missing",
        "FAILED_PRECONDITION": "a data file is damaged or missing",
    }.get(kind, "it cannot be read")
    return f"leaf {path} in {items}: {cause} ({kind}); copy the checkpoint again from where it was written"


__all__ = ["Checkpoint", "StorageError", "locate", "normalize", "open_checkpoint", "read_problem", "steps"]
