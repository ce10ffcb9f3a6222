"""doctor on real directories: what it says of a root, of the environment, and of a fleet's clocks."""

import os
import time
from pathlib import Path

import pytest
from versions import arrays, write_version

from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.reload import doctor, doctor_root
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
    assert f"{doctor_root._tenths(-0.01):+.1f}" == "+0.0" and doctor_root._tenths(-0.06) == -0.1


def _only(found: Examination, topic: str) -> tuple[str, str]:
    [one] = [(f.level, f.text) for f in found.findings if f.topic == topic]
    return one


def test_a_version_is_no_root(tmp_path: Path) -> None:
    write_version(tmp_path / "7", arrays(1))
    found = examine(str(tmp_path / "7"), {})
    level, text = _only(found, "root")
    assert (level, text) == (
        "problem", f"{tmp_path}/7 is itself a version, not a root of versions; give {tmp_path}"
    )  # fmt: skip
    assert not found.ok and found.findings[-1].topic == "root"  # nothing was written into it to try
    assert _only(examine(str(tmp_path / "7/mtx2vllm.json"), {}), "root")[0] == "problem"


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/10"])
def test_a_trainers_directory_is_no_root(tmp_path: Path, below: str) -> None:
    items = tmp_path / "run/checkpoints/10/items"
    items.mkdir(parents=True)
    (items / "_METADATA").write_text("{}")
    (items.parent / "_CHECKPOINT_METADATA").write_text("{}")
    found = examine(str(tmp_path / "run" / below), {"MTX2VLLM_WATCH": str(tmp_path)})
    level, text = _only(found, "root")
    assert level == "problem" and "is a trainer's checkpoint directory, not a root of versions" in text


def test_the_newest_version_is_one_that_can_be_served(tmp_path: Path) -> None:
    write_version(tmp_path / "3", arrays(1))
    assert _only(examine(str(tmp_path), {}), "root") == ("ok", f"{tmp_path} can be read: 1 version, newest 3")
    write_version(tmp_path / "4", arrays(2))
    assert "2 versions, newest 4" in _only(examine(str(tmp_path), {}), "root")[1]
    (tmp_path / "4/mtx2vllm.json").write_text("{")
    found = examine(str(tmp_path), {})
    assert "1 version, newest 3" in _only(found, "root")[1]
    level, text = _only(found, "version")
    assert level == "problem" and text.startswith(f"4 is refused by every agent: {tmp_path}/4: ")
    for shard in (tmp_path / "3").rglob("*.safetensors"):
        shard.unlink()
    found = examine(str(tmp_path), {})
    assert _only(found, "root") == ("note", f"{tmp_path} can be read: no version that can be served")
    assert "is missing" in _text(found, "version")


def test_a_directory_of_other_things_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    level, text = _only(examine(str(tmp_path), {}), "root")
    assert level == "note" and "holds no version but other things (config.json)" in text


def test_a_pin_that_is_none(tmp_path: Path) -> None:
    (tmp_path / roots.PIN).write_text("7")
    assert _only(examine(str(tmp_path), {}), "pin")[0] == "problem"


@pytest.mark.parametrize("variable", [("MTX2VLLM_WACH", "/r"), ("MTX2VLLM_CACHE_SIZE", "lots")])
def test_variables_are_checked_where_nothing_is_watched(variable: tuple[str, str]) -> None:
    level, text = _only(examine(None, dict([variable])), "environment")
    assert level == "problem" and text.startswith(variable[0])


def test_settings_are_printed_as_they_are_written(tmp_path: Path) -> None:
    text = _text(examine(None, {"MTX2VLLM_WATCH": str(tmp_path), "MTX2VLLM_POLICY": "step:7"}), "environment")
    assert (
        f"MTX2VLLM_WATCH={tmp_path}, MTX2VLLM_POLICY=step:7, MTX2VLLM_POLL_SECONDS=1, MTX2VLLM_CACHE_SIZE=32GiB,"
        in text
    )


def test_the_cache_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = tmp_path / "kept"
    kept.mkdir()

    def said(directory: Path | str) -> tuple[str, str]:
        environ = {"MTX2VLLM_WATCH": str(tmp_path), "MTX2VLLM_CACHE_DIR": str(directory)}
        return _only(examine(None, environ), "cache")

    assert said(tmp_path / "new/deep") == ("ok", f"{tmp_path}/new/deep can be written")
    assert said(kept)[0] == "ok"
    for impossible in ("/proc/x", tmp_path / "file", tmp_path / "file/x"):
        level, text = said(impossible)
        assert level == "problem" and f"MTX2VLLM_CACHE_DIR = {impossible} cannot be made or written (" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "kept"] and not list(kept.iterdir())


def test_without_vllm_nothing_is_said_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert _only(examine(None, {}), "plugin") == ("note", "vLLM is not installed here, so nothing loads the plugin")
