"""The safetensors files of a version, laid out before any data exists.

A safetensors file is 8 bytes (the header's length, little endian), a JSON header, and the tensors' bytes back to back.
The header may end in spaces; ours is padded so that the data begin on a page. Format:
https://huggingface.co/docs/safetensors. Readers refuse headers above 100 MB.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.plans import Tensor

PAGE = 4096
HEADER_LIMIT = 100_000_000
DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file to write. `header` is everything before the data, its length included; `offsets` are absolute, by the
    tensor's number in the plan."""

    name: str
    header: bytes
    size: int
    offsets: Mapping[int, int]


def layout(tensors: Sequence[Tensor], max_shard_size: int | None, metadata: Mapping[str, str]) -> list[ShardFile]:
    """Assign tensors to files in their order, starting a new file where `max_shard_size` bytes would be exceeded.

    A tensor larger than that gets a file of its own. `metadata` goes into every header (`format: pt` is added).

    Raises:
        InputError: a header that readers would refuse, a dtype that safetensors does not know.
    """
    unknown = sorted({t.dtype for t in tensors} - DTYPES.keys())
    if unknown:
        raise InputError(f"safetensors has no dtype {', '.join(unknown)}; choose another one with --dtype")
    parts = _divide(tensors, max_shard_size)
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = ["model.safetensors"]
    return [_file(name, tensors, numbers, metadata) for name, numbers in zip(names, parts, strict=True)]


def _divide(tensors: Sequence[Tensor], limit: int | None) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    size = 0
    for number, tensor in enumerate(tensors):
        if parts[-1] and limit is not None and size + tensor.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(number)
        size += tensor.nbytes
    return parts


def _order(tensors: Sequence[Tensor], numbers: Iterable[int]) -> list[int]:
    """Wide items first, then whole pages, then the rest: every tensor is aligned to its items, big ones to pages."""

    def rank(number: int) -> tuple[int, bool]:
        tensor = tensors[number]
        return -(tensor.nbytes // max(1, _count(tensor))), tensor.nbytes % PAGE != 0

    return sorted(numbers, key=rank)


def _count(tensor: Tensor) -> int:
    n = 1
    for size in tensor.shape:
        n *= size
    return n


def _file(name: str, tensors: Sequence[Tensor], numbers: Iterable[int], metadata: Mapping[str, str]) -> ShardFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    relative: dict[int, int] = {}
    end = 0
    for number in _order(tensors, numbers):
        tensor = tensors[number]
        relative[number] = end
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(len(text) + 8) // PAGE) * PAGE - 8
    if length > HEADER_LIMIT:
        raise InputError(
            f"{name} would have a header of {length} bytes for {len(relative)} tensors, and readers accept at most "
            f"{HEADER_LIMIT}; choose a smaller --max-shard-size"
        )
    header = length.to_bytes(8, "little") + text.ljust(length)
    return ShardFile(name, header, len(header) + end, {n: len(header) + at for n, at in relative.items()})
