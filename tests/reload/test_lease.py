"""The lease: what it says, how often it is written, and that nothing of it is the engine's trouble."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine, until
from versions import arrays, write_version

from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.fleet import versions as fleet
from mtx2vllm.reload.lease import LeaseKeeper, Served, free_name
from mtx2vllm.reload.settings import host_name

A = arrays(1)


def read(root: Path, replica: str = "r0") -> dict:
    return json.loads((root / ".agents" / f"{replica}.json").read_text())


def test_what_it_says(tmp_path: Path) -> None:
    keeper = LeaseKeeper(str(tmp_path), "r0", clock=lambda: 1234.5)
    keeper.served = Served(7, "ab", "serving", None)
    assert keeper.write()
    said = read(tmp_path)
    assert {key: said[key] for key in ("replica", "loaded", "manifest_digest", "state", "error", "heartbeat", "ttl_s")} == {
        "replica": "r0", "loaded": 7, "manifest_digest": "ab", "state": "serving", "error": None, "heartbeat": 1234.5,
        "ttl_s": 120.0,
    }  # fmt: skip


def test_the_agent_keeps_it(tmp_path: Path, make_agent) -> None:
    root = tmp_path / "root"
    write_version(root / "1", A)
    agent = make_agent(FakeEngine(A, suffix="-dp3")).start()
    until(lambda: (root / ".agents" / "r0-dp3.json").exists() and read(root, "r0-dp3")["loaded"] == 1)
    said = read(root, "r0-dp3")
    assert said["state"] == "serving" and said["manifest_digest"] == agent.status().manifest_digest
    [row] = fleet.list_versions(str(root)).versions
    assert row.served_by == ("r0-dp3",)
    agent.stop()
    assert not (root / ".agents" / "r0-dp3.json").exists()


def test_no_write_storm(tmp_path: Path) -> None:
    """A replica that changes its mind a thousand times writes once a second; one that does not, once a heartbeat."""
    times: list[float] = []
    keeper = LeaseKeeper(str(tmp_path), "r0", heartbeat_s=30.0, on_write=lambda: times.append(time.monotonic()))
    keeper.start()
    until(lambda: len(times) == 1)
    for n in range(1000):
        keeper.tell(Served(n, None, "serving"))
        keeper.tell(Served(n, None, "serving"))
    until(lambda: (tmp_path / ".agents").exists() and read(tmp_path)["loaded"] == 999)
    time.sleep(1.5)
    keeper.stop()
    assert len(times) <= 3 and all(b - a > 0.99 for a, b in itertools.pairwise(times))


def test_heartbeats_go_on_without_news(tmp_path: Path) -> None:
    beats = threading.Semaphore(0)
    keeper = LeaseKeeper(str(tmp_path), "r0", heartbeat_s=1.0, on_write=beats.release)
    keeper.start()
    assert all(beats.acquire(timeout=5) for _ in range(3))
    keeper.stop()


def test_a_root_that_cannot_be_written_is_said_once(tmp_path: Path, make_agent, caplog) -> None:
    root = tmp_path / "root"
    write_version(root / "1", A)
    (root / ".agents").write_text("a file where the directory should be")
    engine = FakeEngine(A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    for _ in range(3):
        assert not agent._lease.write()
    said = [record for record in caplog.records if "no lease can be written" in record.message]
    assert len(said) == 1 and "prune" in said[0].message and agent.status().error is None


def test_a_missing_root_is_not_made(tmp_path: Path) -> None:
    keeper = LeaseKeeper(str(tmp_path / "root"), "r0")
    keeper.start()
    time.sleep(0.3)
    keeper.stop()
    assert not (tmp_path / "root").exists()


def hold(root: Path, replica: str, **values) -> None:
    (root / ".agents").mkdir(exist_ok=True)
    lease = roots.Lease(replica=replica, heartbeat=values.pop("heartbeat", time.time()), **values)
    (root / ".agents" / f"{replica}.json").write_bytes(roots.dumps(lease))


def test_two_samplers_of_one_name_on_one_host(tmp_path: Path, make_agent) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (tmp_path / "root").mkdir()
        hold(tmp_path / "root", "r0", host=host_name(), pid=other.pid, loaded=1)
        agent = make_agent(FakeEngine(A)).start()
        until(lambda: agent.status().replica == f"r0-{os.getpid()}")
        until((tmp_path / "root" / ".agents" / f"r0-{os.getpid()}.json").exists)
        assert read(tmp_path / "root")["pid"] == other.pid
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    "values",
    [
        {"host": host_name(), "pid": 2**22 + 1},  # killed
        {"host": host_name(), "pid": os.getpid()},  # ourselves, started again
        {"host": "another-host", "pid": 1},  # a pod of that name was moved
        {"host": host_name(), "pid": 1, "heartbeat": 1.0},  # dead for long
    ],
)
def test_a_name_that_is_free_again(tmp_path: Path, values: dict) -> None:
    hold(tmp_path, "r0", **values)
    os.utime(tmp_path / ".agents" / "r0.json", (1, 1) if "heartbeat" in values else None)
    assert free_name(str(tmp_path), "r0", time.time()) == "r0"
    assert free_name(str(tmp_path), "fresh", time.time()) == "fresh"
