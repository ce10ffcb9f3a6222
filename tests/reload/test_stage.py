"""Staging by the real process: in place, in shared memory, in the cache; canonical, and Hugging Face fused on the way.

The oracle for fused tensors is the digest of what vLLM itself holds after loading the same file.
"""

import gc
import hashlib
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeEngine, until
from versions import BF16, arrays, write_manifest, write_version

from mtx2vllm.converter.version.pieces import DTYPES
from mtx2vllm.reload import stage as staging
from mtx2vllm.reload.apply import Way, load
from mtx2vllm.reload.aspire import open_version
from mtx2vllm.reload.engine import TensorSpec
from mtx2vllm.reload.match import fit
from mtx2vllm.reload.stage import Options, Stager
from mtx2vllm.reload.staged import StageFailed

DATA = Path(__file__).parents[1] / "data"
FAMILIES = {
    "deepseek3": "deepseek3", "gemma3": "gemma3", "gemma4-moe": "gemma4", "gpt-oss": "gpt_oss", "qwen2.5": "qwen2",
    "qwen3-moe": "qwen3_moe", "qwen3.5-moe": "qwen3_5_moe", "mixtral": "mixtral", "qwen3-untied": "qwen3",
}  # fmt: skip
A, B = arrays(1), arrays(2)


def specs_of(tensors: dict[str, np.ndarray]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(value.shape, value.dtype) for name, value in tensors.items()}


def staged(stager: Stager, directory: Path, tensors: dict[str, np.ndarray], **options):
    version = open_version(str(directory), 1)
    return stager.stage(version, fit(version.manifest, specs_of(tensors)).targets, **options)


def equal(weights, tensors: dict[str, np.ndarray]) -> bool:
    return weights.keys() == tensors.keys() and all(weights[n].tobytes() == tensors[n].tobytes() for n in tensors)


def oracle(name: str) -> dict[str, dict]:
    found = json.loads((DATA / name / "canonical_digests.json").read_text())
    buffers = DATA / name / "canonical_buffer_digests.json"
    return found | (json.loads(buffers.read_text()) if buffers.exists() else {})


@pytest.mark.parametrize("name", FAMILIES)
def test_hf_is_fused_to_what_vllm_holds(tmp_path: Path, stager: Stager, name: str) -> None:
    directory = shutil.copytree(DATA / name / "hf", tmp_path / "1")
    write_manifest(directory, "hf", FAMILIES[name])
    wanted = oracle(name)
    engine = FakeEngine({n: np.zeros(said["shape"], DTYPES[said["dtype"]]) for n, said in wanted.items()})
    _, report = load(engine, stager, open_version(str(directory), 1), None, Way())
    digests = {n: hashlib.sha256(value.tobytes()).hexdigest() for n, value in engine.state.items()}
    assert digests == {n: said["sha256"] for n, said in wanted.items()}
    assert report.tensors == len(wanted)


def test_only_changed_experts_make_a_fused_tensor_change(tmp_path: Path, stager: Stager) -> None:
    from safetensors.numpy import load_file, save_file

    directory = shutil.copytree(DATA / "qwen3-moe" / "hf", tmp_path / "1")
    write_manifest(directory, "hf", "qwen3_moe")
    wanted = oracle("qwen3-moe")
    engine = FakeEngine({n: np.zeros(said["shape"], DTYPES[said["dtype"]]) for n, said in wanted.items()})
    loaded, _ = load(engine, stager, open_version(str(directory), 1), None, Way())
    new = shutil.copytree(directory, tmp_path / "2")
    tensors = load_file(new / "model.safetensors")
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"] += 1
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    write_manifest(new, "hf", "qwen3_moe")
    load(engine, stager, open_version(str(new), 2), loaded, Way())
    assert list(engine.changes[-1].weights) == ["model.layers.1.mlp.experts.routed_experts.w13_weight"]


def test_both_layouts_agree_on_what_is_unchanged(tmp_path: Path, stager: Stager) -> None:
    """From hf to canonical of the same model: only fused tensors move, and their values stay."""
    hf = {"model.norm.weight": A["model.norm.weight"], "model.layers.0.mlp.down_proj.weight": B["model.norm.weight"]}
    hf["model.layers.0.mlp.gate_proj.weight"] = np.ones((2, 3), BF16)
    hf["model.layers.0.mlp.up_proj.weight"] = np.full((2, 3), 2, BF16)
    canonical = {name: hf[name] for name in list(hf)[:2]}
    canonical["model.layers.0.mlp.gate_up_proj.weight"] = np.array([[1] * 3] * 2 + [[2] * 3] * 2, BF16)
    engine = FakeEngine(canonical)
    loaded, _ = load(engine, stager, open_version(str(write_version(tmp_path / "1", hf, "hf")), 1), None, Way())
    assert engine.holds(canonical)
    load(engine, stager, open_version(str(write_version(tmp_path / "2", canonical)), 2), loaded, Way())
    assert list(engine.changes[-1].weights) == ["model.layers.0.mlp.gate_up_proj.weight"] and engine.holds(canonical)


def test_hf_floats_are_rounded_as_vllm_does_it(tmp_path: Path, stager: Stager) -> None:
    """float32 and float16 files into a bfloat16 engine: torch's copy_ rounds to nearest even."""
    import torch

    values = np.random.default_rng(0).standard_normal((64, 33)).astype(np.float32)
    values[0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38]  # ties, and beyond bfloat16's largest
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    engine = FakeEngine({"model.layers.0.mlp.down_proj.weight": np.zeros((64, 33), BF16)})
    directory = write_version(tmp_path / "1", {"model.layers.0.mlp.down_proj.weight": values}, "hf", shards=1)
    load(engine, stager, open_version(str(directory), 1), None, Way())
    assert np.array_equal(engine.state["model.layers.0.mlp.down_proj.weight"].view(np.uint16), expected)


def test_local_files_are_mapped_not_copied(tmp_path: Path, stager: Stager) -> None:
    found = staged(stager, write_version(tmp_path / "1", A), A)
    assert equal(found.weights, A) and len(found.files) == 2
    assert all(not value.flags.writeable and not value.flags.owndata for value in found.weights.values())
    assert str(tmp_path / "1" / "canonical") in Path("/proc/self/maps").read_text()
    shutil.rmtree(tmp_path / "1")
    assert equal(found.weights, A)  # unlinked files stay mapped
    found.check()


def test_what_cannot_be_mapped_goes_to_memory(tmp_path: Path, stager: Stager, monkeypatch) -> None:
    monkeypatch.setattr(staging, "mappable", lambda location: False)
    directory = write_version(tmp_path / "1", A)
    found = staged(stager, directory, A)
    assert equal(found.weights, A) and found.files == {}
    maps = Path("/proc/self/maps").read_text()
    assert str(directory) not in maps and "memfd:mtx2vllm-stage" in maps
    for path in directory.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert equal(found.weights, A)


def mapped_memory() -> set[str]:
    """The inodes of staged memory that this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:mtx2vllm-stage" in line}


def test_memory_goes_when_the_arrays_go(tmp_path: Path, stager: Stager, monkeypatch) -> None:
    monkeypatch.setattr(staging, "mappable", lambda location: False)
    gc.collect()  # what earlier tests hold in cycles
    before, opened = mapped_memory(), set(Path("/proc/self/fd").iterdir())
    found = staged(stager, write_version(tmp_path / "1", A), A)
    assert mapped_memory() - before
    pid = stager._process.pid
    del found
    staged(stager, tmp_path / "1", A)
    assert not mapped_memory() - before
    until(lambda: "memfd:mtx2vllm-stage" not in Path(f"/proc/{pid}/maps").read_text())
    fds = set(Path("/proc/self/fd").iterdir()) - opened
    assert not [fd for fd in fds if "memfd:mtx2vllm" in _target(fd)]


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


@pytest.fixture
def caching(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(staging, "mappable", lambda location: False)
    found = Stager(Options(str(tmp_path / "cache"), 1 << 20))
    yield found
    found.close()


def test_the_cache(tmp_path: Path, caching: Stager) -> None:
    """One process for the whole story: filled, shared between versions, verified when hit, repaired."""
    cache = tmp_path / "cache"
    one = write_version(tmp_path / "1", A)
    assert equal(staged(caching, one, A).weights, A)
    files = {path.name: path.stat().st_ino for path in cache.iterdir()}
    assert len(files) == len(A) and not [name for name in files if name.endswith(".part")]
    changed = {**A, "model.norm.weight": B["model.norm.weight"]}
    assert equal(staged(caching, write_version(tmp_path / "2", changed), changed).weights, changed)
    assert len(list(cache.iterdir())) == len(A) + 1
    # A damaged file is fetched again under a new inode; whoever has the old one mapped keeps it.
    victim = next(path for path in cache.iterdir() if path.name in files)
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    again = staged(caching, one, A)
    assert equal(again.weights, A) and victim.stat().st_ino != files[victim.name]
    # A hit reads nothing of the version's data: it is wrong by now, and that does not matter.
    for path in one.rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    assert equal(staged(caching, one, A).weights, A)
    # Without a hit it does, and wrong bytes do not stay in the cache.
    for path in cache.iterdir():
        path.unlink()
    with pytest.raises(StageFailed, match="another digest"):
        staged(caching, one, A)
    good = {json.loads((one / "mtx2vllm.json").read_text())["tensors"][name]["blake3"] for name in A}
    assert {name.partition("-")[0] for name in os.listdir(cache) if "-" in name} <= good  # noqa: PTH208


def test_a_damaged_part_in_the_cache_is_no_fault_of_the_version(tmp_path: Path, caching: Stager) -> None:
    version = open_version(str(write_version(tmp_path / "1", A)), 1)
    (tmp_path / "cache").mkdir()
    for target in fit(version.manifest, specs_of(A)).targets.values():
        (tmp_path / "cache" / f"{target.key}.part").write_bytes(b"wrong")
    assert equal(staged(caching, tmp_path / "1", A).weights, A)
    assert len(list((tmp_path / "cache").iterdir())) == len(A)


def test_the_screen_looks_into_memory_and_cache_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(staging, "mappable", lambda location: False)
    sick = {**A, "model.norm.weight": np.full((8, 6), np.inf, BF16)}
    directory = write_version(tmp_path / "1", sick)
    for cache in (None, str(tmp_path / "cache")):
        own = Stager(Options(cache, 1 << 20, screen=True))
        try:
            with pytest.raises(StageFailed, match="holds NaN or infinity"):
                staged(own, directory, sick)
        finally:
            own.close()


def test_a_version_larger_than_the_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(staging, "mappable", lambda location: False)
    small = Stager(Options(str(tmp_path / "cache"), 100))
    try:
        with pytest.raises(StageFailed, match="MTX2VLLM_CACHE_SIZE is 100: raise it"):
            staged(small, write_version(tmp_path / "1", A), A)
    finally:
        small.close()


def test_odd_offsets_are_copied(tmp_path: Path, stager: Stager) -> None:
    """A foreign header may put float32 on an odd byte; an array needs alignment."""
    a = np.arange(3, dtype=np.uint8)
    b = np.arange(6, dtype=np.float32)
    header = {
        "model.layers.0.a.weight": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "model.layers.0.b.weight": {"dtype": "F32", "shape": [6], "data_offsets": [3, 27]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "1").mkdir()
    raw = len(text).to_bytes(8, "little") + text + a.tobytes() + b.tobytes()
    (tmp_path / "1" / "model.safetensors").write_bytes(raw)
    write_manifest(tmp_path / "1", "hf")
    tensors = {"model.layers.0.a.weight": a, "model.layers.0.b.weight": b}
    found = staged(stager, tmp_path / "1", tensors)
    assert equal(found.weights, tensors) and all(value.flags.aligned for value in found.weights.values())


def test_empty_and_scalar_tensors(tmp_path: Path, stager: Stager, monkeypatch) -> None:
    tensors = {"model.norm.weight": np.array(7, np.float32), "model.layers.0.x.weight": np.zeros((0, 4), BF16)}
    directory = write_version(tmp_path / "1", tensors, shards=1)
    assert equal(staged(stager, directory, tensors).weights, tensors)
    monkeypatch.setattr(staging, "mappable", lambda location: False)
    assert equal(staged(stager, directory, tensors).weights, tensors)


def test_the_process_is_modest_and_ends_with_its_parent(tmp_path: Path, stager: Stager) -> None:
    staged(stager, write_version(tmp_path / "1", A), A)
    fields = Path(f"/proc/{stager._process.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[16]) == 19 and int(fields[38]) == os.SCHED_BATCH
    mapped = Path(f"/proc/{stager._process.pid}/maps").read_text()
    assert not [name for name in ("libjax", "jaxlib", "torch", "vllm", "tensorstore", "orbax") if name in mapped]


def test_cancelling_kills_the_process_and_the_next_job_gets_a_new_one(tmp_path: Path) -> None:
    own = Stager(Options())
    try:
        directory = write_version(tmp_path / "1", A)
        staged(own, directory, A)
        first = own._process
        os.kill(first.pid, signal.SIGSTOP)
        gone = threading.Event()
        threading.Timer(0.3, gone.set).start()
        with pytest.raises(StageFailed) as caught:
            staged(own, directory, A, cancelled=gone.is_set)
        assert caught.value.reason == "cancelled" and first.poll() is not None
        assert equal(staged(own, directory, A).weights, A) and own._process.pid != first.pid
    finally:
        own.close()


def test_a_process_that_cannot_start(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(staging.sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(StageFailed, match="could not be started"):
        staged(Stager(Options()), write_version(tmp_path / "1", A), A)
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setattr(staging.sys, "executable", str(tmp_path / "broken"))
    with pytest.raises(StageFailed, match="staging process ended"):
        staged(Stager(Options()), tmp_path / "1", A)
