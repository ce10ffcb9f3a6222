"""The agent with real files, real inotify, a real staging process, and a fake engine."""

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from fake_engine import FakeEngine, until
from versions import arrays, write_manifest, write_version

from mtx2vllm.converter.errors import NotCommitted, UsageError
from mtx2vllm.converter.fleet import versions as fleet
from mtx2vllm.reload.apply import LoadFailed
from mtx2vllm.reload.engine import EngineBroken, TensorSpec

A, B, C = arrays(1), arrays(2), arrays(3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def damage(directory: Path) -> None:
    """Flip one bit of the last tensor of every shard."""
    for path in directory.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.unlink()
        path.write_bytes(data)


def test_it_follows_numbers_not_strings(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "9", A)
    for other in ("099", "x10", "1e9", ".hidden", "-1"):
        write_version(root / other, C)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 9)
    write_version(root / "10", B)
    until(lambda: agent.status().loaded == 10)
    assert engine.holds(B) and engine.version == 10
    assert [change.version for change in engine.changes] == [9, 10]
    status = agent.status()
    assert (status.state, status.ready, status.wanted, status.error, status.reloads) == ("serving", True, 10, None, 2)
    assert json.dumps(status.to_json())


def test_nothing_is_answered_before_the_first_version(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    engine.dummy = True
    agent = make_agent(engine).start()
    until(lambda: not engine.ready)
    assert agent.status().state == "waiting" and not agent.status().ready
    write_version(root / "1", A)
    until(lambda: agent.status().ready)
    assert engine.ready and engine.calls == ["ready False", "mode_for 1248", "swap 1 double", "ready True"]


def test_unready_fail_refuses_instead_of_holding(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    refusals: list[str | None] = []
    engine.refuse = refusals.append
    agent = make_agent(engine, hold=True, unready="fail").start()
    until(lambda: len(refusals) == 1)
    assert "no version from" in str(refusals[0])
    write_version(root / "1", A)
    until(lambda: agent.status().ready)
    assert refusals[1:] == [None] and "ready False" not in engine.calls


def test_a_failed_first_load_leaves_the_engine_not_ready(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    before = engine.hash()
    damage(write_version(root / "1", A))
    agent = make_agent(engine, hold=True).start()
    until(lambda: agent.status().state == "failed")
    assert not engine.ready and not agent.status().ready and engine.hash() == before
    assert "digest" in str(agent.status().error) and agent.status().quarantined == (1,)
    write_version(root / "2", B)
    until(lambda: agent.status().ready)
    assert engine.ready and engine.holds(B) and agent.status().error is None


def test_a_vision_tower_with_random_values_is_never_ready(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    engine.others = {"visual.patch.weight": TensorSpec((2, 2), A["model.norm.weight"].dtype)}
    write_version(root / "1", A)
    agent = make_agent(engine, hold=True).start()
    until(lambda: agent.status().loaded == 1)
    assert not agent.status().ready and not engine.ready and "vision tower" in str(agent.status().error)


def test_a_bad_version_is_refused_and_the_best_newer_one_served(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    damage(write_version(root / "3", C))
    until(lambda: agent.status().failures == 1)
    assert engine.holds(A) and agent.status().loaded == 1 and agent.status().ready
    write_version(root / "2", B)
    until(lambda: agent.status().loaded == 2)
    assert engine.holds(B) and agent.status().wanted == 3 and agent.status().quarantined == (3,)


def test_a_refused_version_is_tried_again_when_it_changes(root: Path, make_agent) -> None:
    """The clock stands still, so no pause ever ends."""
    engine = FakeEngine(A)
    damage(write_version(root / "3", B))
    agent = make_agent(engine, clock=lambda: 1000.0).start()
    until(lambda: agent.status().failures == 1)
    time.sleep(0.5)
    assert agent.status().failures == 1
    (root / "3" / "mtx2vllm.json").unlink()
    shutil.rmtree(root / "3")
    write_version(root / "3", C)
    until(lambda: agent.status().loaded == 3)
    assert engine.holds(C)


def test_a_refused_version_is_tried_again_after_a_pause(root: Path, make_agent) -> None:
    """The same manifest, repaired data: only the back-off leads there. The clock is ours."""
    engine, now = FakeEngine(A), [1000.0]
    directory = write_version(root / "3", B)
    good = {path: path.read_bytes() for path in directory.rglob("*.safetensors")}
    damage(directory)
    agent = make_agent(engine, clock=lambda: now[0]).start()
    until(lambda: agent.status().failures == 1)
    for path, data in good.items():
        path.unlink()
        path.write_bytes(data)
    time.sleep(0.5)
    assert agent.status().failures == 1 and agent.status().loaded is None
    now[0] += 5.1
    until(lambda: agent.status().loaded == 3)
    assert engine.holds(B) and agent.status().quarantined == ()


def test_only_what_changed_is_read_and_written(root: Path, make_agent) -> None:
    """Unchanged tensors are not even read: their bytes in the new version are wrong, and nobody notices."""
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    changed = {**A, "model.norm.weight": B["model.norm.weight"]}
    new = write_version(root.parent / "2", changed)
    entries = json.loads((new / "mtx2vllm.json").read_text())["tensors"]
    for name, entry in entries.items():
        if name != "model.norm.weight":
            with (new / entry["file"]).open("r+b") as file:
                file.seek(entry["offset"])
                file.write(b"\xee" * 4)
    new.rename(root / "2")
    until(lambda: agent.status().loaded == 2)
    assert list(engine.changes[-1].weights) == ["model.norm.weight"] and engine.holds(changed)
    report = agent.status().last
    assert (report.tensors, report.unchanged, report.nbytes) == (1, 5, A["model.norm.weight"].nbytes)


def test_the_same_content_again_only_moves_the_label(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    write_version(root / "2", A)
    until(lambda: agent.status().loaded == 2)
    assert engine.changes[-1].weights == {} and engine.version == 2 and engine.holds(A)


def test_a_version_written_again_with_other_content_is_loaded(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    (root / "1" / "mtx2vllm.json").unlink()
    shutil.rmtree(root / "1")
    write_version(root / "1", B)
    until(lambda: engine.holds(B))


def test_it_does_not_look_more_often_than_it_should(root: Path, make_agent, monkeypatch) -> None:
    """A refused version that is not wanted any more leaves no trace in the pace of the loop."""
    from mtx2vllm.reload import aspire

    engine, now, looks = FakeEngine(A), [1000.0], []
    write_version(root / "1", A)
    damage(write_version(root / "2", B))
    agent = make_agent(engine, poll_seconds=0.2, clock=lambda: now[0]).start()
    until(lambda: agent.status().loaded == 1 and agent.status().failures == 1)
    fleet.pin(str(root), 1)
    now[0] += 100
    until(lambda: agent.status().pinned == 1)
    real = aspire.look
    monkeypatch.setattr(aspire, "look", lambda path: (looks.append(path), real(path))[1])
    time.sleep(2.0)
    assert 1 <= len(looks) <= 12


def test_pin_beats_policy_and_rolls_back(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    write_version(root / "2", B)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 2)
    fleet.pin(str(root), 1)
    until(lambda: agent.status().loaded == 1)
    assert engine.holds(A) and agent.status().pinned == 1
    write_version(root / "3", C)
    time.sleep(0.4)
    assert agent.status().loaded == 1
    fleet.unpin(str(root))
    until(lambda: agent.status().loaded == 3)
    assert engine.holds(C)


def test_policy_step_waits_for_its_version(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "9", A)
    agent = make_agent(engine, policy="step:5").start()
    until(lambda: agent.status().error is not None)
    assert "version 5 is asked for by the policy, but it is not there" in str(agent.status().error)
    write_version(root / "5", B)
    until(lambda: agent.status().loaded == 5)
    assert engine.holds(B) and agent.status().error is None


def test_an_unreadable_pin_stops_the_moving_not_the_serving(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    (root / ".pin.json").write_text("one")
    write_version(root / "2", B)
    until(lambda: "is not a pin" in str(agent.status().error))
    assert agent.status().loaded == 1 and agent.status().ready
    (root / ".pin.json").unlink()
    until(lambda: agent.status().loaded == 2)


def test_a_pin_that_comes_while_staging_is_honoured(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    specs = engine.specs

    def pin_then() -> dict:
        fleet.pin(str(root), 1)
        return specs()

    engine.specs = pin_then
    write_version(root / "2", B)
    until(lambda: agent.status().pinned == 1)
    time.sleep(0.3)
    assert [change.version for change in engine.changes] == [1] and engine.holds(A)
    assert agent.status().quarantined == ()


def test_the_newest_of_two_that_appear_during_a_swap_wins(root: Path, make_agent) -> None:
    engine = FakeEngine(A)

    def publish_two() -> None:
        engine.before_swap = lambda: None
        write_version(root / "2", B)
        write_version(root / "3", C)

    engine.before_swap = publish_two
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 3)
    assert [change.version for change in engine.changes] == [1, 3] and engine.holds(C)


def test_a_slow_writer_in_the_worst_order(root: Path, make_agent) -> None:
    """Every file appears in reverse order, the manifest last: nothing is loaded before it."""
    engine = FakeEngine(A)
    agent = make_agent(engine).start()
    source = write_version(root.parent / "5", A)
    names = sorted((p.relative_to(source) for p in source.rglob("*") if p.is_file()), reverse=True)
    names.sort(key=lambda name: name.name == "mtx2vllm.json")
    assert str(names[-1]) == "mtx2vllm.json"
    for name in names:
        assert agent.status().loaded is None and engine.changes == [] and agent.status().failures == 0
        (root / "5" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "5" / name).write_bytes((source / name).read_bytes())
        time.sleep(0.15)
    until(lambda: agent.status().loaded == 5)
    assert agent.status().failures == 0


def test_a_manifest_that_comes_before_its_files(root: Path, make_agent) -> None:
    """A writer that breaks the order is refused until all is there, and nothing half is served."""
    engine, now = FakeEngine(A), [1000.0]
    agent = make_agent(engine, clock=lambda: now[0]).start()
    source = write_version(root.parent / "5", A)
    (root / "5").mkdir()
    (root / "5" / "mtx2vllm.json").write_bytes((source / "mtx2vllm.json").read_bytes())
    until(lambda: agent.status().failures == 1)
    assert "is not there" in str(agent.status().error)
    shutil.copytree(source, root / "5", dirs_exist_ok=True)
    now[0] += 10
    until(lambda: agent.status().loaded == 5)


def test_deleted_while_it_is_read(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 1)
    specs, before = engine.specs, engine.hash()

    def delete_then() -> dict:
        shutil.rmtree(root / "2", ignore_errors=True)
        return specs()

    engine.specs = delete_then
    write_version(root / "2", B)
    until(lambda: agent.status().failures == 1)
    assert engine.hash() == before and agent.status().loaded == 1 and agent.status().ready
    engine.specs = specs
    write_version(root / "3", C)
    until(lambda: agent.status().loaded == 3)


def test_a_root_that_comes_goes_and_returns(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    root.rmdir()
    agent = make_agent(engine).start()
    time.sleep(0.3)
    assert agent.status().state == "waiting" and not root.exists()
    write_version(root.parent / "new" / "1", A)
    (root.parent / "new").rename(root)
    until(lambda: agent.status().loaded == 1)
    root.rename(root.parent / "away")
    write_version(root.parent / "away" / "2", B)
    time.sleep(0.4)
    assert agent.status().loaded == 1 and agent.status().ready
    (root.parent / "away").rename(root)
    until(lambda: agent.status().loaded == 2)
    assert engine.holds(B)


def test_relisting_a_root_never_goes_backwards(root: Path, make_agent) -> None:
    """Versions that come back one after another, as a copy of the root does it, are no reason to serve old ones."""
    engine = FakeEngine(A)
    for step, tensors in ((1, A), (2, B), (3, C)):
        write_version(root.parent / "source" / str(step), tensors)
    shutil.copytree(root.parent / "source", root, dirs_exist_ok=True)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 3)
    shutil.rmtree(root)
    root.mkdir()
    for step in (1, 2, 3):
        time.sleep(0.25)
        shutil.copytree(root.parent / "source" / str(step), root / str(step))
    time.sleep(0.25)
    assert [change.version for change in engine.changes] == [3]


def test_a_run_that_starts_again_from_zero(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    write_version(root / "500", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().loaded == 500)
    (root / "500" / "mtx2vllm.json").unlink()
    shutil.rmtree(root / "500")
    write_version(root / "10", B, created="2026-01-02T00:00:00Z")
    until(lambda: agent.status().loaded == 10)


@pytest.mark.parametrize("where", ["specs", "swap", "untouched", "mode_for"])
def test_an_exception_anywhere_does_not_end_the_agent(root: Path, make_agent, where: str) -> None:
    engine = FakeEngine(A)
    now = [1000.0]
    write_version(root / "1", A)
    agent = make_agent(engine, clock=lambda: now[0]).start()
    until(lambda: agent.status().loaded == 1)
    healthy, before = getattr(engine, where), engine.hash()

    def explode(*args: object) -> None:
        raise RuntimeError("boom")

    setattr(engine, where, explode)
    write_version(root / "2", B)
    until(lambda: agent.status().failures == 1)
    assert engine.hash() == before and agent.status().ready and "boom" in str(agent.status().error)
    setattr(engine, where, healthy)
    now[0] += 100
    until(lambda: agent.status().loaded == 2)


def test_a_broken_engine_does_not_serve_until_a_whole_version_is_in(root: Path, make_agent) -> None:
    engine, now = FakeEngine(A, mode="inplace"), [1000.0]
    write_version(root / "1", A)
    agent = make_agent(engine, clock=lambda: now[0]).start()
    until(lambda: agent.status().loaded == 1)
    engine.fail_at, engine.fail_undo = 1, True
    write_version(root / "2", B)
    until(lambda: agent.status().state == "broken")
    assert not engine.ready and not agent.status().ready and not agent.is_live() and agent.status().loaded is None
    engine.fail_at, engine.fail_undo = None, False

    def time_passes() -> bool:
        now[0] += 10
        return True

    until(lambda: time_passes() and agent.status().ready)  # with the first version that is not in quarantine
    assert engine.ready and agent.status().state == "serving" and agent.is_live()
    assert len(engine.changes[1].weights) == len(A)
    until(lambda: time_passes() and agent.status().loaded == 2)
    assert engine.holds(B)


@pytest.mark.own_process
def test_it_ends_within_a_second_of_the_engine_even_while_staging(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    agent = make_agent(engine).start()
    process = None

    def started() -> bool:
        nonlocal process
        process = agent._replica.stager._process
        return process is not None

    until(started)
    os.kill(process.pid, signal.SIGSTOP)  # reading hangs
    write_version(root / "1", A)
    until(lambda: agent.status().state == "loading")
    engine.running = False
    begun = time.monotonic()
    until(lambda: agent.status().state == "stopped")
    assert time.monotonic() - begun < 1.0
    assert process.poll() is not None and engine.changes == []
    assert not [t for t in threading.enumerate() if t.name == "mtx2vllm-agent"]


@pytest.mark.own_process
def test_a_killed_staging_process_is_replaced(root: Path, make_agent) -> None:
    engine, now = FakeEngine(A), [1000.0]
    write_version(root / "1", A)
    agent = make_agent(engine, clock=lambda: now[0]).start()
    until(lambda: agent.status().loaded == 1)
    process = agent._replica.stager._process
    os.kill(process.pid, signal.SIGSTOP)
    write_version(root / "2", B)
    until(lambda: agent.status().state == "loading")
    process.kill()
    until(lambda: agent.status().failures == 1)
    assert engine.holds(A) and agent.status().ready
    now[0] += 10
    until(lambda: agent.status().loaded == 2)
    assert engine.holds(B)


def test_load_stays_and_goes_on(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    for step, tensors in ((1, A), (2, B)):
        write_version(root / str(step), tensors)
    agent = make_agent(engine)
    assert agent.load(1).loaded == 1 and engine.holds(A)
    agent.start()
    time.sleep(0.4)
    assert agent.status().loaded == 1 and agent.status().policy == "step:1"
    assert agent.load().loaded == 2 and engine.holds(B)
    with pytest.raises(NotCommitted, match="version 7"):
        agent.load(7)
    fleet.pin(str(root), 2)
    with pytest.raises(UsageError, match="pinned to 2"):
        agent.load(1)
    assert agent.load(2).loaded == 2


def test_load_tells_what_is_wrong(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    agent = make_agent(engine)
    with pytest.raises(NotCommitted):
        agent.load()
    damage(write_version(root / "1", A))
    with pytest.raises(LoadFailed, match="another digest") as caught:
        agent.load(1)
    assert caught.value.reason == "invalid" and engine.changes == []
    engine.fail_at, engine.fail_undo, engine.mode = 0, True, "inplace"
    write_version(root / "2", B)
    with pytest.raises(EngineBroken):
        agent.load(2)
    assert not agent.is_live()


def test_an_engine_started_from_a_version_has_it_loaded(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    engine.state = {name: value.copy() for name, value in A.items()}
    write_version(root / "1", A)
    agent = make_agent(engine, hold=True, loaded=str(root / "1")).start()
    until(lambda: agent.status().ready)
    time.sleep(0.3)
    assert engine.changes == [] and engine.ready and agent.status().loaded == 1
    write_version(root / "2", {**A, "model.norm.weight": B["model.norm.weight"]})
    until(lambda: agent.status().loaded == 2)
    assert list(engine.changes[0].weights) == ["model.norm.weight"]


def test_an_engine_started_from_a_copy_outside_of_the_root(root: Path, make_agent) -> None:
    """The number is the source's step; the root's version of that number is compared by its digest."""
    engine = FakeEngine(A)
    engine.state = {name: value.copy() for name, value in A.items()}
    write_version(root / "7", A)
    shutil.copytree(root / "7", root.parent / "copy")
    agent = make_agent(engine, loaded=str(root.parent / "copy")).start()
    until(lambda: agent.status().ready)
    assert agent.status().loaded == 7
    time.sleep(0.4)
    assert engine.changes == []
    write_version(root.parent / "8" / "7", B).rename(root.parent / "other")
    shutil.rmtree(root / "7")
    (root.parent / "other").rename(root / "7")
    until(lambda: engine.holds(B))


def test_started_from_something_else(root: Path, make_agent, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(A)
    write_version(root / "1", A)
    agent = make_agent(engine, loaded=str(root.parent / "plain")).start()
    until(lambda: agent.status().loaded == 1)
    assert "does not count as loaded" in caplog.text and len(engine.changes) == 1


@pytest.mark.own_process
def test_fifty_reloads_leave_nothing_behind(root: Path, make_agent) -> None:
    """10 MB versions, each deleted after its successor is served: memory, descriptors and maps stay."""
    versions = [arrays(seed, rows=256, columns=4096) for seed in (1, 2)]
    engine = FakeEngine(versions[0], mode="inplace")
    engine.changes = deque(maxlen=1)  # a change holds its version's maps
    agent = make_agent(engine).start()
    facts = []
    for step in range(1, 51):
        write_version(root / str(step), versions[step % 2])
        until(lambda step=step: agent.status().loaded == step)
        shutil.rmtree(root / str(step - 1), ignore_errors=True)
        if step in {5, 50}:
            maps = Path("/proc/self/maps").read_text().count(str(root))
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            worker = Path(f"/proc/{agent._replica.stager._process.pid}/statm").read_text().split()[1]
            descriptors = len(list(Path("/proc/self/fd").iterdir()))
            facts.append((resident, descriptors, maps, int(worker) * os.sysconf("SC_PAGE_SIZE")))
    (memory, descriptors, maps, worker), (memory2, descriptors2, maps2, worker2) = facts
    assert memory2 - memory < 64 << 20 and worker2 - worker < 64 << 20
    assert descriptors2 <= descriptors + 3 and maps2 <= maps + 2
    assert agent.status().failures == 0 and engine.holds(versions[0])


def test_a_log_line_says_it_once(root: Path, make_agent, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mtx2vllm")
    engine, now = FakeEngine(A), [1000.0]
    damage(write_version(root / "1", A))
    agent = make_agent(engine, clock=lambda: now[0]).start()
    for count in (1, 2, 3):
        until(lambda count=count: agent.status().failures == count)
        now[0] += 1000
    until(lambda: agent.status().failures == 4)
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "is refused" in r.message]
    assert len(warnings) == 1
    (root / "1" / "mtx2vllm.json").unlink()
    shutil.rmtree(root / "1")
    write_version(root / "2", A)
    until(lambda: agent.status().loaded == 2)
    assert any("loaded version 2: 6 tensors" in r.message for r in caplog.records)


def test_a_manifest_of_another_kind(root: Path, make_agent) -> None:
    engine = FakeEngine(A)
    (root / "1").mkdir()
    (root / "1" / "mtx2vllm.json").write_text('{"format": 99}')
    agent = make_agent(engine).start()
    until(lambda: agent.status().error is not None)
    assert "not a valid manifest" in str(agent.status().error) and engine.changes == []
    write_version(root / "2", A)
    write_manifest(root / "2")
    until(lambda: agent.status().loaded == 2)
