"""The agent on a bucket of the real fake-gcs-server: detection, staging into memory and cache, faults, leases."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, until
from gcs.conftest import broken, bucket, server  # noqa: F401  (fixtures)
from gcs.proxy import TRANSIENT
from versions import arrays, write_version

from mtx2vllm.converter.fleet import versions as fleet
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.converter.version.verify import verify_version

pytestmark = [pytest.mark.gcs, pytest.mark.own_process]  # a process of its own: it must have this test's environment
A, B = arrays(1), arrays(2)


def upload(directory: Path, location: str, skip: str = "") -> None:
    """Copy a version to the bucket, the manifest last."""
    store = store_for(location)
    names = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    for name in sorted(names, key=lambda name: name == "mtx2vllm.json"):
        if not skip or skip not in name:
            store.create(join(location, name), (directory / name).read_bytes())


def publish(tmp_path: Path, root: str, step: int, tensors, skip: str = "") -> None:
    local = tmp_path / "made" / str(step)
    upload(write_version(local, tensors), join(root, str(step)), skip)


@pytest.mark.parametrize("cached", [False, True])
def test_following_a_bucket(tmp_path: Path, bucket: str, make_agent, cached: bool) -> None:  # noqa: F811
    root = f"{bucket}/runs/a b/ü"
    options = {"cache_dir": str(tmp_path / "cache")} if cached else {}
    engine = FakeEngine(A)
    agent = make_agent(engine, root=root, **options).start()
    publish(tmp_path, root, 9, A)
    until(lambda: agent.status().loaded == 9)
    assert engine.holds(A) and agent.status().watching == "listing"
    changed = {**A, "model.norm.weight": B["model.norm.weight"]}
    publish(tmp_path, root, 10, changed)
    until(lambda: agent.status().loaded == 10)
    assert engine.holds(changed) and list(engine.changes[-1].weights) == ["model.norm.weight"]
    until(lambda: any("r0" in row.served_by for row in fleet.list_versions(root).versions if row.step == 10))
    fleet.pin(root, 9)
    until(lambda: agent.status().loaded == 9)
    assert engine.holds(A)
    if cached:
        assert len([p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".part")]) == len(A) + 1
    agent.stop()
    assert not list(store_for(root).listdir(join(root, ".agents")))


def test_a_prefix_beside_ours_is_not_ours(tmp_path: Path, bucket: str, make_agent) -> None:  # noqa: F811
    engine = FakeEngine(A)
    publish(tmp_path, f"{bucket}/v10", 5, B)
    publish(tmp_path, f"{bucket}/v1", 3, A)
    agent = make_agent(engine, root=f"{bucket}/v1/").start()
    until(lambda: agent.status().loaded == 3)
    assert engine.holds(A)


def test_a_missing_shard_and_its_arrival(tmp_path: Path, bucket: str, make_agent) -> None:  # noqa: F811
    engine = FakeEngine(A)
    publish(tmp_path, f"{bucket}/r", 3, A, skip="model-00002")
    agent = make_agent(engine, root=f"{bucket}/r").start()
    until(lambda: agent.status().failures >= 1)
    assert agent.status().loaded is None and "model-00002" in str(agent.status().error)
    late = tmp_path / "made" / "3" / "canonical" / "model-00002-of-00002.safetensors"
    store_for(bucket).create(f"{bucket}/r/3/canonical/{late.name}", late.read_bytes())
    until(lambda: agent.status().loaded == 3)  # tried again by itself
    assert engine.holds(A)


def test_wrong_bytes_are_refused(tmp_path: Path, bucket: str, make_agent) -> None:  # noqa: F811
    engine = FakeEngine(A)
    local = write_version(tmp_path / "made" / "3", A)
    shard = next((local / "canonical").glob("*1-of*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    upload(local, f"{bucket}/r/3")
    before = engine.hash()
    agent = make_agent(engine, root=f"{bucket}/r", cache_dir=str(tmp_path / "cache")).start()
    until(lambda: agent.status().failures == 1)
    assert "another digest" in str(agent.status().error) and engine.hash() == before


def test_verify_on_a_bucket(tmp_path: Path, bucket: str) -> None:  # noqa: F811
    publish(tmp_path, f"{bucket}/r", 3, A)
    publish(tmp_path, f"{bucket}/r", 4, {**A, "model.norm.weight": B["model.norm.weight"]})
    assert verify_version(f"{bucket}/r/3", str(tmp_path / "made" / "3")).ok
    differing = verify_version(f"{bucket}/r/4", f"{bucket}/r/3").differing
    assert [found.name for found in differing] == ["model.norm.weight"]
    store = store_for(bucket)
    path = f"{bucket}/r/4/canonical/model-00002-of-00002.safetensors"
    store.replace(path, store.read(path)[:-1])
    result = verify_version(f"{bucket}/r/4")
    assert not result.ok and len(result.problems) == 1 and "truncated" in result.problems[0]


def test_a_bucket_that_does_not_exist(server: str, bucket: str, make_agent) -> None:  # noqa: F811
    engine = FakeEngine(A)
    agent = make_agent(engine, root="gs://no-such-bucket-here/r").start()
    time.sleep(1.0)
    status = agent.status()
    assert status.state == "waiting" and engine.changes == [] and agent.is_live()
    assert "does not exist" in str(status.error)
    assert json.dumps(status.to_json())


def test_ten_reloads_through_faults(tmp_path: Path, broken, bucket: str, make_agent) -> None:  # noqa: F811
    """One request in twenty fails, in every way that may pass: every version arrives, to the bit."""
    dice = random.Random(4)
    broken.choose = lambda _: dice.choice(TRANSIENT) if dice.random() < 0.05 else None
    engine = FakeEngine(A)
    agent = make_agent(engine, root=f"{bucket}/r").start()
    for step in range(1, 11):
        tensors = arrays(step)
        publish(tmp_path, f"{bucket}/r", step, tensors)
        until(lambda step=step: agent.status().loaded == step, 60)
        assert engine.holds(tensors)
    assert sum(broken.faults.values()) > 5


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_range_that_arrives_damaged_is_read_again(
    tmp_path: Path, broken, bucket: str, make_agent, number: int, cache: bool  # noqa: F811
) -> None:  # fmt: skip
    """The store knows no checksum of a range. The version is not blamed for what a network did: headers, tensors."""
    publish(tmp_path, f"{bucket}/r", 3, A)
    seen: set[str] = set()

    def choose(request: Any) -> str | None:
        if request.method != "GET" or not request.span or ".safetensors" not in request.path:
            return None
        seen.add(request.path + request.span)
        return "wrong" if len(seen) == number + 1 and broken.faults["wrong", "GET"] == 0 else None

    broken.choose = choose
    engine = FakeEngine(A)
    more = {"cache_dir": str(tmp_path / "cache")} if cache else {}
    agent = make_agent(engine, root=f"{bucket}/r", **more)
    agent.load(3)
    assert broken.faults["wrong", "GET"] == 1
    assert agent.status().failures == 0 and engine.holds(A)


def test_ranges_are_read_in_parallel(tmp_path: Path, broken, bucket: str, make_agent) -> None:  # noqa: F811
    """With 50 ms a request, 60 tensors one after another would take 3 s."""
    tensors = arrays(1, layers=30)
    publish(tmp_path, f"{bucket}/r", 1, tensors)
    engine = FakeEngine(tensors)
    broken.latency = 0.05
    agent = make_agent(engine, root=f"{bucket}/r")
    agent.load(1)
    assert engine.holds(tensors)
    assert agent.status().last.seconds["stage"] < 0.05 * len(tensors) / 2
