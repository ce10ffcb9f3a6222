"""Reading the header of a safetensors file and not believing a word of it.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian length N, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {text: text}}, then the data. Offsets count from the
end of the header, tensors tile the data without holes.
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.storage import Store
from mtx2vllm.schemas.manifest import ITEM_SIZES

MAX_HEADER = 100_000_000  # safetensors' own limit; its readers refuse longer headers
METADATA = "__metadata__"
LAYOUT_KEY = "layout"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: row-major little-endian bytes at `offset`, counted from the start of the file."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A whole header; `raw` is what its digest is over (the 8-byte length included)."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    raw: bytes


def read_header(store: Store, path: str, size: int) -> Header:
    """The header of a file of `size` bytes, checked against that size.

    Raises:
        InputError: with every problem found: truncated, too long, no JSON, types unknown, tensors that do not tile.
        FileNotFoundError: the file is not there.
    """
    raw = _read_raw(store, path, size)
    try:
        content = json.loads(raw[8:], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the safetensors header is no valid JSON ({error}); the file is damaged.") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: the safetensors header is not an object; the file is damaged.")
    metadata = content.pop(METADATA, {})
    problems: list[str] = []
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append(f"{path}: __metadata__ in the header is not a table of texts.")
        metadata = {}
    tensors = {}
    for name, entry in content.items():
        found = _tensor(entry, len(raw))
        if isinstance(found, str):
            problems.append(f"{path}: tensor {name!r} of the header: {found}")
        else:
            tensors[name] = found
    if not problems:
        problems = [f"{path}: {text}" for text in tiling_problems(tensors, len(raw), size)]
    if problems:
        raise InputError(problems)
    return Header(tensors, metadata, raw)


def _read_raw(store: Store, path: str, size: int) -> bytes:
    if size < 8:
        raise InputError(f"{path} has {size} bytes, too few for a safetensors file: it was truncated; copy it again.")
    try:
        length = int.from_bytes(store.read(path, 0, 8), "little")
        if length > MAX_HEADER:
            raise InputError(
                f"{path}: header of {length} bytes, more than the {MAX_HEADER} that safetensors allows: damaged, or "
                "not a safetensors file."
            )
        if 8 + length > size:
            raise InputError(
                f"{path}: a header of {length} bytes in a file of {size}: it was truncated; copy it again."
            )
        return store.read(path, 0, 8 + length)
    except EOFError:
        raise InputError(f"{path} ends within its header: it was truncated while being read.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return content


def _tensor(entry: object, data: int) -> Stored | str:
    if not isinstance(entry, dict):
        return "its entry is not an object."
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        return f"unknown type {dtype!r}."
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        return f"shape {shape!r} or data_offsets {offsets!r} are not lists of sizes."
    nbytes = prod(shape) * ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        return f"{dtype} {shape} needs {nbytes} bytes, its data_offsets span {offsets[1] - offsets[0]}."
    return Stored(dtype, tuple(shape), data + offsets[0], nbytes)


def _sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def tiling_problems(tensors: dict[str, Stored], data: int, size: int) -> list[str]:
    """What keeps the tensors from covering every byte from `data` to `size` exactly once; [] where they do."""
    problems, position = [], data
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != position:
            what = "overlaps the tensor before it" if stored.offset < position else "leaves a hole before it"
            problems.append(f"tensor {name!r} at byte {stored.offset} {what}, which ends at byte {position}.")
        position = max(position, stored.offset + stored.nbytes)
    if position > size:
        problems.append(f"{size} bytes, but its tensors end at byte {position}: it was truncated; copy it again.")
    elif position < size:
        problems.append(f"{size - position} bytes after the last tensor belong to nobody; the file is damaged.")
    return problems
