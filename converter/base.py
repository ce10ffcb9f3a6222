"""`--base HF_DIR`: what MaxText does not train (vision tower, projector, multi-token prediction) is copied from a whole
Hugging Face model, byte by byte, beside the converted text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.execute.run import TensorResult
from mtx2vllm.converter.plans import Plan, Tensor
from mtx2vllm.converter.shards import DTYPES, ShardFile
from mtx2vllm.converter.storage import RangeWriter, join, store_for
from mtx2vllm.converter.version.header import Stored, read_header
from mtx2vllm.converter.version.pieces import fold

_CHUNK = 8 << 20
_NUMPY = {stored: name for name, stored in DTYPES.items()}
_SHOWN = 5


@dataclass(frozen=True)
class Copies:
    """Tensors to copy, with the file that each lies in; numbered by position."""

    tensors: tuple[Tensor, ...]
    places: tuple[tuple[str, Stored], ...]


def copies(base: str, plan: Plan, *, tied: bool) -> Copies:
    """The tensors of `base` that the plan does not write.

    Raises:
        InputError: no weights there, or its text model is another one (names or shapes).
    """
    have = _headers(base)
    written = {fold(t.name): t for t in plan.tensors}
    text = {fold(name): stored for name, (_, stored) in have.items()}
    problems = [
        f"--base {base} lacks text tensor {name}; it is not a {plan.architecture}"
        for name in written
        if name not in text
    ]
    problems += [
        f"--base {base} holds {name} as {list(text[name].shape)}, the checkpoint gives {list(t.shape)}; it is of another size"
        for name, t in written.items()
        if name in text and text[name].shape != t.shape
    ]
    if problems:
        more = [f"{len(problems) - _SHOWN} more tensors differ alike"] if len(problems) > _SHOWN else []
        raise InputError([*problems[:_SHOWN], *more])
    left = {
        name: place
        for name, place in have.items()
        if fold(name) not in written and not (tied and fold(name) == "lm_head.weight")
    }
    stray = [name for name in left if fold(name).startswith("model.layers.")]
    if stray:
        raise InputError(
            f"--base {base} has text tensors that the checkpoint does not give, {stray[0]} first; is it of another size?"
        )
    tensors = tuple(Tensor(name, stored.shape, _NUMPY[stored.dtype]) for name, (_, stored) in left.items())
    return Copies(tensors, tuple(left.values()))


def _headers(base: str) -> dict[str, tuple[str, Stored]]:
    store = store_for(base)
    files = [e for e in store.listdir(base) if not e.is_dir and e.name.endswith(".safetensors")]
    if not files:
        raise InputError(f"--base {base} holds no *.safetensors files; it wants a Hugging Face model directory")
    found: dict[str, tuple[str, Stored]] = {}
    for entry in files:
        path = join(base, entry.name)
        found |= {name: (path, stored) for name, stored in read_header(store, path, entry.size).tensors.items()}
    return found


def copy(
    wanted: Copies,
    shards: Sequence[ShardFile],
    sink: Callable[[ShardFile], RangeWriter],
    progress: Callable[[int], None],
) -> dict[int, TensorResult]:
    """Write the shards that hold copies; results by position in `wanted`."""
    results: dict[int, TensorResult] = {}
    for shard in shards:
        writer = sink(shard)
        try:
            writer.write(0, memoryview(shard.header))
            for number, offset in sorted(shard.offsets.items(), key=lambda item: item[1]):
                results[number] = _copy_one(wanted.places[number], writer, offset, progress)
            writer.commit()
        except BaseException:
            writer.abort()
            raise
    return results


def _copy_one(
    place: tuple[str, Stored], writer: RangeWriter, offset: int, progress: Callable[[int], None]
) -> TensorResult:
    path, stored = place
    store, hasher = store_for(path), blake3()
    for at in range(0, stored.nbytes, _CHUNK):
        data = store.read(path, stored.offset + at, min(_CHUNK, stored.nbytes - at))
        hasher.update(data)
        writer.write(offset + at, memoryview(data))
        progress(len(data))
    return TensorResult(hasher.hexdigest(), 0, 0)


def joined(
    shards: Sequence[ShardFile], extra: Sequence[ShardFile]
) -> tuple[tuple[ShardFile, ...], tuple[ShardFile, ...]]:
    """Both lists numbered through, as one model's files."""
    total = len(shards) + len(extra)
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    renamed = [replace(s, name=name) for s, name in zip((*shards, *extra), names, strict=True)]
    return tuple(renamed[: len(shards)]), tuple(renamed[len(shards) :])
