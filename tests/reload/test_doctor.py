"""doctor on real directories: what it says of a root, of the environment, and of a fleet's clocks."""

import os
import time
from pathlib import Path

import pytest

from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.reload import doctor
from mtx2vllm.reload.doctor import Examination, examine


def _text(found: Examination, topic: str) -> str:
    return " ".join(f.text for f in found.findings if f.topic == topic)


def test_a_local_root_is_writable_raises_events_and_its_clock_agrees(tmp_path: Path) -> None:
    found = examine(str(tmp_path), {})
    assert "can be written" in _text(found, "writing")
    assert "raises events" in _text(found, "events")
    assert "differs" in _text(found, "clock")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    found = examine(str(tmp_path / "not there"), {})
    assert "does not exist yet" in _text(found, "root")
    assert not (tmp_path / "not there").exists()


def test_a_misspelt_variable_is_a_problem(tmp_path: Path) -> None:
    found = examine(None, {"MTX2VLLM_WATCH": str(tmp_path), "MTX2VLLM_POLCY": "latest"})
    assert not found.ok
    assert "MTX2VLLM_POLICY" in _text(found, "environment")


@pytest.mark.parametrize(("age", "word"), [(1.0, "serves 7"), (1000.0, "expired")])
def test_replicas_and_whether_they_live(tmp_path: Path, age: float, word: str) -> None:
    agents = tmp_path / roots.AGENTS
    agents.mkdir()
    heartbeat = time.time() - age
    lease = roots.Lease(replica="a", loaded=7, state="serving", heartbeat=heartbeat)
    path = agents / "a.json"
    path.write_bytes(roots.dumps(lease))
    os.utime(path, (heartbeat, heartbeat))
    assert word in _text(examine(str(tmp_path), {}), "replica")


@pytest.mark.parametrize(
    ("ttl_s", "words"), [(0.0, "none is running (the last one stopped cleanly)"), (5.0, "is dead")]
)
def test_a_follower_that_stopped_is_not_called_dead(tmp_path: Path, ttl_s: float, words: str) -> None:
    path, heartbeat = tmp_path / roots.FOLLOWER, time.time() - 60
    path.write_bytes(roots.dumps(roots.FollowerLease(holder="host:1", heartbeat=heartbeat, ttl_s=ttl_s)))
    os.utime(path, (heartbeat, heartbeat))
    assert words in _text(examine(str(tmp_path), {}), "follower")


def test_a_clock_that_agrees_has_no_sign_but_plus() -> None:
    assert f"{doctor._tenths(-0.01):+.1f}" == "+0.0" and doctor._tenths(-0.06) == -0.1
