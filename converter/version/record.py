"""What a version says of itself: its side files, the index, and the manifest. Content only; `publish` puts it there."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version as package_version

from mtx2vllm.converter.execute.run import TensorResult
from mtx2vllm.converter.hf_files import CONFIG, local_path
from mtx2vllm.converter.job import Job
from mtx2vllm.converter.shards import DTYPES
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.schemas import manifest as manifests
from mtx2vllm.schemas.manifest import FileEntry, Manifest, Source, TensorEntry, Unchanged

INDEX = "model.safetensors.index.json"
Previous = tuple[int, Manifest]  # a version of the same root, and its number


def file_names(job: Job) -> tuple[str, ...]:
    """Every file that a run writes, but the manifest."""
    return (*(s.name for s in (*job.shards, *job.copy_shards)), *side_files(job, names_only=True))


def side_files(job: Job, names_only: bool = False) -> dict[str, bytes]:
    """Everything beside the shards, by name in the version directory."""
    folder = job.shards[0].name.rpartition("/")[0]
    side: dict[str, bytes] = {}
    for name, where in job.side.items():
        side[name] = b"" if names_only else store_for(where).read(where)
    if job.config is not None:
        side[CONFIG] = json.dumps(job.config, indent=2, sort_keys=True).encode() + b"\n"
    side[join(folder, INDEX) if folder else INDEX] = _index(job)
    return side


def _index(job: Job) -> bytes:
    weights = {
        tensors[number].name: shard.name.rpartition("/")[2]
        for shards, tensors in ((job.shards, job.plan.tensors), (job.copy_shards, job.copies.tensors))
        for shard in shards
        for number in shard.offsets
    }
    content = {"metadata": {"total_size": job.nbytes}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"


def manifest_of(
    job: Job,
    checkpoint: str,
    results: tuple[Mapping[int, TensorResult], Mapping[int, TensorResult]],
    side: Mapping[str, bytes],
    previous: Previous | None,
) -> Manifest:
    """The manifest of a finished job.

    Args:
        checkpoint: as the user named it.
        results: of the plan's tensors, and of those that were copied from a base.
        side: the side files.
        previous: a version whose unchanged tensors are counted.
    """
    made = _manifest(job, checkpoint, _entries(job, *results), side)
    if previous is None:
        return made
    return made.model_copy(update={"unchanged": _unchanged(made, *previous)})


def _entries(
    job: Job, results: Mapping[int, TensorResult], copied: Mapping[int, TensorResult]
) -> dict[str, TensorEntry]:
    written = ((job.shards, job.plan.tensors, results), (job.copy_shards, job.copies.tensors, copied))
    return {
        tensors[number].name: TensorEntry(
            file=shard.name,
            offset=offset,
            dtype=DTYPES[tensors[number].dtype],
            shape=tensors[number].shape,
            blake3=digests[number].digest,
        )
        for shards, tensors, digests in written
        for shard in shards
        for number, offset in shard.offsets.items()
    }


def _unchanged(made: Manifest, version: int, before: Manifest) -> Unchanged:
    old = {name: entry.blake3 for name, entry in before.tensors.items()}
    return Unchanged(version=version, tensors=sum(old.get(n) == t.blake3 for n, t in made.tensors.items()))


def _manifest(job: Job, checkpoint: str, tensors: dict[str, TensorEntry], side: Mapping[str, bytes]) -> Manifest:
    files = {
        s.name: FileEntry(size=s.size, digest=manifests.digest(s.header), shard=True)
        for s in (*job.shards, *job.copy_shards)
    }
    files |= {name: FileEntry(size=len(data), digest=manifests.digest(data)) for name, data in side.items()}
    return Manifest(
        layout=job.plan.layout,
        family=job.plan.family,
        architecture=job.plan.architecture,
        source=Source(uri=local_path(checkpoint), step=job.checkpoint.step),
        conventions=dict(job.plan.conventions),
        dtype=job.options.dtype,
        tool=f"mtx2vllm {package_version('mtx2vllm')}",
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        files=files,
        tensors=tensors,
    )
