"""`mtx2vllm.json`, the manifest of a version: what every file and tensor of it is, to the bit. It is written last.

A version directory holds shards, side files and this manifest; a directory without it is not a version. Offsets count
from the start of the file. Tensors tile each shard's data, so the tensors' digests together with the digests of the
headers cover every byte.
"""

import json
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

NAME = "mtx2vllm.json"
FORMAT = 1
ITEM_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

Layout = Literal["canonical", "hf"]
CANONICAL_DIR = "canonical"  # below OUT, so that a stock loader finds no weights and fails loudly
# Where a version's shards lie, and what killed writers leave of them.
FOLDERS = ("", CANONICAL_DIR)
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # blake3, hexadecimal


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Frozen):
    """Where a version comes from. `step` is the trainer's."""

    uri: str
    step: int | None = None
    kind: Literal["maxtext", "hf"] = "maxtext"


class FileEntry(_Frozen):
    """One file of the version. `digest` is over the header (8-byte length included) of a shard, over all bytes of a
    side file."""

    size: Annotated[int, Field(ge=0)]
    digest: Digest
    shard: bool = False


class TensorEntry(_Frozen):
    """One tensor: row-major little-endian bytes at `offset` (from the file's start) of `file`."""

    file: str
    offset: Annotated[int, Field(ge=0)]
    dtype: str  # safetensors' names: BF16, F32, ...
    shape: tuple[int, ...]
    blake3: Digest

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        size = ITEM_SIZES[self.dtype]
        for n in self.shape:
            size *= n
        return size


class Unchanged(_Frozen):
    """Against which version tensors were compared, and how many have the same digest there."""

    version: int
    tensors: int


class Manifest(_Frozen):
    """The whole manifest. `parse` and `dumps` are its only ways in and out."""

    format: Literal[1] = 1
    layout: Layout
    family: str
    architecture: str
    source: Source
    conventions: dict[str, str] = {}  # e.g. rope: half|interleaved, and why
    dtype: str = "bfloat16"
    tool: str
    created: str  # RFC 3339, UTC
    unchanged: Unchanged | None = None
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in self.files:
            if not is_inside(name):
                raise ValueError(f"file name {name!r} leads out of the version directory")
        for name, t in self.tensors.items():
            entry = self.files.get(t.file)
            if entry is None or not entry.shard:
                raise ValueError(f"tensor {name!r} lies in {t.file!r}, which the manifest does not list as a shard")
            if t.dtype not in ITEM_SIZES or any(n < 0 for n in t.shape):
                raise ValueError(f"tensor {name!r} has the impossible type {t.dtype} {list(t.shape)}")
            if t.offset + t.nbytes > entry.size:
                raise ValueError(f"tensor {name!r} ends beyond its file {t.file!r}")
        return self

    def dumps(self) -> bytes:
        """The manifest's bytes; equal manifests give equal bytes."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read and check a manifest.

        Raises:
            ValueError: it is not a manifest of this format, or contradicts itself; the message is one sentence.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{NAME} is not a valid manifest: {where + ': ' if where else ''}{first['msg']}") from None


def digest(data: bytes | memoryview) -> str:
    """blake3 of `data`, hexadecimal. A version's identity is (step, digest of its manifest's bytes)."""
    return str(blake3(data).hexdigest())


def is_inside(name: str) -> bool:
    """Whether a relative file name stays inside its version directory."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and not name.startswith(("/", "~"))
        and "\\" not in name
        and "\0" not in name
        and not ({"..", "."} & set(name.split("/")) or ":" in parts[0] or "" in name.split("/"))
    )
