"""A conversion spread over a local Ray cluster of two machines, workers that are killed, and how evenly work divides."""

import os
import signal
import sys
from dataclasses import replace
from itertools import pairwise
from math import gcd, prod
from pathlib import Path

import pytest
from patience import patiently

from mtx2vllm.converter.conversion import convert, plan
from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.execute import slabs as slabs_module
from mtx2vllm.converter.execute import units as units_module
from mtx2vllm.converter.execute.units import hashing, imbalance, units
from mtx2vllm.converter.plans import Plan
from mtx2vllm.converter.version.verify import verify_version

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import make_checkpoint

SIZES = make_checkpoint.Sizes(64, 3, 96, 4, 2, 16, 512, 8, False)
MESH = {"expert": 4, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="the ray extra has wheels up to Python 3.13")
    from ray.cluster_utils import Cluster

    made = Cluster()
    for _ in range(2):
        patiently(lambda: made.add_node(num_cpus=1, include_dashboard=False))
    ray.init(address=made.address, log_to_driver=False)
    yield ray
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def many_units(monkeypatch):
    """A model of a few hundred KB falls into units as a model of a TB does."""
    monkeypatch.setattr(slabs_module, "SMALL", 0)
    monkeypatch.setattr(units_module, "SMALLEST", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint.make(directory, SIZES, MESH)
    return directory


def shards_of(out):
    return {path.name: path.read_bytes() for path in sorted(Path(out).rglob("*.safetensors"))}


@pytest.mark.parametrize("layout", ["canonical", "hf"])
def test_a_cluster_writes_the_same_bytes(cluster, many_units, checkpoint, tmp_path, layout):
    here, there = tmp_path / "here", tmp_path / "there"
    convert(str(checkpoint), str(here), layout=layout, max_shard_size=200_000)
    seen = []
    done = convert(
        str(checkpoint),
        str(there),
        layout=layout,
        max_shard_size=200_000,
        executor="ray",
        progress=lambda n, total: seen.append((n, total)),
    )
    assert len(shards_of(here)) > 3
    assert shards_of(here) == shards_of(there)
    assert verify_version(str(there), None).ok and done.nonfinite == {}
    assert len(seen) > 5 and seen[-1][0] <= seen[-1][1]
    assert not [p.name for p in there.rglob("*") if p.name.startswith(".")], "a guest left something behind"


def test_a_killed_worker_is_run_again(cluster, many_units, checkpoint, tmp_path, monkeypatch):
    here, there, marks = tmp_path / "here", tmp_path / "there", tmp_path / "marks"
    convert(str(checkpoint), str(here))
    marks.mkdir()
    folder = str(marks)
    from mtx2vllm.converter.execute import ray_executor

    def dies_in_the_middle(work, unit):  # closures travel by value: the workers cannot import this file
        from mtx2vllm.converter.execute import ray_executor
        from mtx2vllm.converter.storage import rangefile

        mark = Path(folder) / str(min(unit.tensors))
        if sum(1 for _ in Path(folder).iterdir()) < 3 and not mark.exists():
            mark.touch()
            write = rangefile.FileGuest.write

            def write_and_die(self, offset, data):
                write(self, offset, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

            rangefile.FileGuest.write = write_and_die
        return ray_executor.convert_unit(work, unit)

    original = ray_executor._Cluster.each

    def each(self, tasks):
        for number, (function, item) in enumerate(tasks):
            if function is ray_executor.convert_unit:
                tasks[number] = (dies_in_the_middle, item)
        return original(self, tasks)

    monkeypatch.setattr(ray_executor._Cluster, "each", each)
    convert(str(checkpoint), str(there), executor="ray")
    assert len(list(marks.iterdir())) >= 3, "no worker died"
    assert shards_of(here) == shards_of(there)
    assert verify_version(str(there), None).ok


def test_a_fault_in_a_worker_is_the_sentence_it_would_be_here(cluster, many_units, tmp_path):
    make_checkpoint.make(tmp_path / "checkpoint", SIZES, MESH)
    for path in (tmp_path / "checkpoint/0/items/ocdbt.process_0/d").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"cannot be read|cannot be opened|damaged"):
        convert(str(tmp_path / "checkpoint"), str(tmp_path / "out"), executor="ray")
    assert not (tmp_path / "out" / "mtx2vllm.json").exists()


MODELS = Path(__file__).parents[1] / "data" / "configs"


def meshed(made: Plan, mesh: dict[str, int], hidden: int) -> Plan:
    """The plan with the chunk grid of a training mesh: experts by expert, the embedding axis by what is left."""
    devices = mesh["expert"] * mesh["fsdp"]

    def chunks(leaf):
        shape, ways = leaf.shape, [1] * len(leaf.shape)
        axis = shape.index(hidden) if hidden in shape else 0
        if leaf.path.rpartition(".")[2] in ("wi_0", "wi_1", "wo"):
            ways[0], ways[axis] = mesh["expert"], mesh["fsdp"]
        elif len(shape) > 1:
            ways[axis] = gcd(shape[axis], devices)
        return tuple(n // w for n, w in zip(shape, ways, strict=True))

    moves = [replace(m, leaf=replace(m.leaf, chunks=chunks(m.leaf))) for m in made.moves]
    return replace(made, moves=moves)


@pytest.mark.parametrize("layout", ["canonical", "hf"])
@pytest.mark.parametrize("scale", [1, 1.5])
def test_the_largest_models_divide_evenly(layout, scale):
    import json

    config = json.loads((MODELS / "deepseek3-671b.json").read_text())
    config["n_routed_experts"] = int(config["n_routed_experts"] * scale)  # 1.5: a model of 1 T
    made = meshed(plan(config, layout=layout), {"expert": 64, "fsdp": 4}, config["hidden_size"])
    assert sum(prod(t.shape) for t in made.tensors) > 0.65e12 * scale
    for machines in (1, 8, 64):
        assert imbalance(made, machines) < 0.1


def test_units_cover_everything_once_and_share_no_chunk():
    sizes = replace(SIZES, experts=16)
    leaves = make_checkpoint.leaves(sizes)
    made = meshed(plan(make_checkpoint.hf_config(sizes, "bfloat16")), {"expert": 8, "fsdp": 2}, sizes.hidden)
    assert leaves
    for machines in (1, 3, 64):
        found = units(made, machines)
        rows = sorted((p.tensor, p.rows) for u in found for slab in u.slabs for p in slab.parts)
        for number, tensor in enumerate(made.tensors):
            mine = [r for n, r in rows if n == number]
            assert mine[0][0] == 0 and mine[-1][1] == tensor.shape[0]
            assert all(a[1] == b[0] for a, b in pairwise(mine))
        partial = {n for u in found for n in u.partial}
        assert partial == {n for bundle in hashing(made, found, machines) for n in bundle}
