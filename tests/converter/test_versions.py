"""Who serves what, and what may be removed: every combination of newest, pinned, leased and half written."""

import itertools
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from fleet.run_source import STEPS
from versions import arrays, write_version

from mtx2vllm.converter.errors import InputError, UsageError
from mtx2vllm.converter.fleet import root
from mtx2vllm.converter.fleet.contents import QUIET_S
from mtx2vllm.converter.fleet.versions import list_versions, pin, prune, unpin
from mtx2vllm.converter.storage import store_for
from mtx2vllm.converter.version import claim, process

NOW = time.time()


def later(seconds: float):
    return lambda: NOW + seconds


def lease(at: Path, replica: str, loaded: int | None, age: float = 0.0, ttl_s: float = 120.0) -> None:
    """A replica's lease whose last sign of life is `age` seconds before NOW."""
    path = at / ".agents" / f"{replica}.json"
    path.parent.mkdir(exist_ok=True)
    record = root.Lease(replica=replica, loaded=loaded, heartbeat=NOW - age, ttl_s=ttl_s, state="serving")
    path.write_bytes(root.dumps(record))
    os.utime(path, (NOW - age, NOW - age))


def claimed(at: Path, step: int, age: float = 0.0, **values) -> None:
    """A directory that a converter on another host writes."""
    (at / str(step)).mkdir()
    record = {"host": "elsewhere", "pid": 7, "started": 1, "heartbeat": NOW - age, **values}
    path = at / str(step) / claim.NAME
    path.write_bytes(json.dumps(record).encode())
    os.utime(path, (NOW - age, NOW - age))


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    for step in (8, 9, 10, 11):
        write_version(tmp_path / str(step), arrays(step), shards=1)
    for other in ("007", "latest", "1e3", "-3", "9" * 100):
        (tmp_path / other).mkdir()
    (tmp_path / "12").write_text("a file, not a directory")
    return tmp_path


def test_numbers_are_numbers(fleet: Path) -> None:
    assert [row.step for row in list_versions(str(fleet)).versions] == [11, 10, 9, 8]
    assert [row.newest for row in list_versions(str(fleet)).versions] == [True, False, False, False]


def test_the_table(fleet: Path) -> None:
    lease(fleet, "a", 11)
    lease(fleet, "b", 9, age=20)
    lease(fleet, "dead", 8, age=121)
    lease(fleet, "new", None)
    (fleet / ".agents" / "half.json").write_text('{"replica": "ha')
    claimed(fleet, 13)
    found = list_versions(str(fleet), later(0))
    rows = {row.step: row for row in found.versions}
    assert rows[11].served_by == ("a",) and rows[9].served_by == ("b",) and rows[8].served_by == ()
    assert rows[13].writing and not rows[13].complete and rows[13].bytes is None and not rows[13].newest
    size = sum(p.stat().st_size for p in (fleet / "9").rglob("*") if p.is_file() and p.name != "mtx2vllm.json")
    assert rows[9].bytes == size and rows[9].complete and rows[9].age is not None and rows[9].age < 600
    replicas = {row.replica: row for row in found.replicas}
    assert (replicas["a"].behind, replicas["a"].lag, replicas["a"].alive) == (0, 0, True)
    assert (replicas["b"].behind, replicas["b"].lag, replicas["b"].heartbeat_age) == (2, 2, pytest.approx(20, abs=1))
    assert not replicas["dead"].alive and replicas["new"].behind is None
    assert json.loads(json.dumps(found.to_json()))["pin"] is None


def test_pin_and_unpin(fleet: Path) -> None:
    pin(str(fleet), 9)
    assert json.loads((fleet / ".pin.json").read_text()) == {"step": 9}
    lease(fleet, "a", 11)
    found = list_versions(str(fleet))
    assert found.pin == 9 and {row.step for row in found.versions if row.pinned} == {9}
    assert (found.replicas[0].behind, found.replicas[0].lag) == (1, -2)
    pin(str(fleet), 10)
    assert root.read_pin(str(fleet)) == 10
    assert unpin(str(fleet)) == 10
    assert unpin(str(fleet)) is None
    assert root.read_pin(str(fleet)) is None
    with pytest.raises(InputError, match=r"holds no complete version 77; it holds 11, 10, 9, 8\."):
        pin(str(fleet), 77)
    (fleet / "empty").mkdir()
    with pytest.raises(InputError, match="it holds none"):
        pin(str(fleet / "empty"), 1)


def test_prune_keeps_the_newest(fleet: Path) -> None:
    before = set(fleet.rglob("*"))
    dry = prune(str(fleet), 2, dry_run=True)
    assert set(fleet.rglob("*")) == before
    done = prune(str(fleet), 2)
    assert dry.removed == done.removed == (9, 8) and dry.freed == done.freed > 0
    assert done.kept == {11: "newest", 10: "one of the newest 2"}
    assert not (fleet / "9").exists() and (fleet / "latest").exists() and (fleet / "007").exists()
    with pytest.raises(UsageError, match="at least 1"):
        prune(str(fleet), 0)


@pytest.mark.parametrize(("pinned", "live", "dead"), list(itertools.product([None, 8], [None, 9], [None, 10])))
def test_what_protects(fleet: Path, pinned: int | None, live: int | None, dead: int | None) -> None:
    if pinned:
        pin(str(fleet), pinned)
    if live:
        lease(fleet, "live", live, age=119)
    if dead:
        lease(fleet, "dead", dead, age=121)
    expected = {11} | ({pinned} - {None}) | ({live} - {None})
    result = prune(str(fleet), 1, clock=later(0))
    assert {row.step for row in list_versions(str(fleet)).versions} == expected == set(result.kept)


def test_a_lease_counts_by_the_younger_of_heartbeat_and_file(fleet: Path) -> None:
    """A replica whose clock is an hour slow is alive all the same."""
    lease(fleet, "slow", 8, age=3600)
    os.utime(fleet / ".agents" / "slow.json", (NOW, NOW))
    assert 8 in prune(str(fleet), 1, clock=later(0)).kept


def test_half_written(fleet: Path) -> None:
    claimed(fleet, 20, age=119)
    claimed(fleet, 21, age=121)
    claimed(
        fleet,
        22,
        host=os.uname().nodename,
        pid=os.getpid(),
        started=process.started(os.getpid()),
        namespace=process.namespace(),
        age=9999,
    )
    claimed(fleet, 23, host=os.uname().nodename, pid=os.getpid(), started=5, namespace=process.namespace())
    (fleet / "24").mkdir()
    (fleet / "24" / "model.safetensors").write_bytes(b"copied by somebody")
    (fleet / "25").mkdir()
    (fleet / "25" / ".mtx2vllm-old").write_bytes(b"left behind")
    os.utime(fleet / "25" / ".mtx2vllm-old", (NOW - QUIET_S - 5, NOW - QUIET_S - 5))
    (fleet / "26").mkdir()
    (fleet / "27").mkdir()
    (fleet / "27" / "x").write_bytes(b"")
    os.utime(fleet / "27" / "x", (0, 0))
    store_for(str(fleet)).replace(
        str(fleet / ".follower.json"),
        root.dumps(root.FollowerLease(holder="f", heartbeat=NOW, writing=27)),
    )
    result = prune(str(fleet), 4, clock=later(0))
    assert set(result.removed) == {21, 23, 25}
    assert {20, 22, 24, 26, 27, 11, 10, 9, 8} == set(result.kept)
    assert result.kept[20] == "being written by process 7 on elsewhere"
    assert result.kept[27] == "being written by the follower" and result.kept[11] == "newest"


def test_a_pin_that_cannot_be_read_stops_everything(fleet: Path) -> None:
    (fleet / ".pin.json").write_text("9")
    for call in (lambda: prune(str(fleet), 1), lambda: list_versions(str(fleet))):
        with pytest.raises(InputError, match="is not a pin"):
            call()
    assert len([p for p in fleet.iterdir() if (p / "mtx2vllm.json").exists()]) == 4


def test_a_pin_that_comes_while_pruning(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts are read for each version anew: a replica that rolls back while others are deleted is not robbed."""
    from mtx2vllm.converter.fleet import versions

    remove = versions._remove

    def and_pin(store, location, step, inside):
        remove(store, location, step, inside)
        pin(location, 8)

    monkeypatch.setattr(versions, "_remove", and_pin)
    result = prune(str(fleet), 1)
    assert result.removed == (10, 9) and result.kept == {11: "newest", 8: "pinned"}
    assert (fleet / "8" / "mtx2vllm.json").exists()


def test_a_manifest_that_cannot_be_read_is_shown(fleet: Path) -> None:
    (fleet / "9" / "mtx2vllm.json").write_text("{}")
    row = next(row for row in list_versions(str(fleet)).versions if row.step == 9)
    assert not row.complete and row.bytes is None and row.problem is not None and "not a valid manifest" in row.problem


def aged(directory: Path, seconds: float = QUIET_S + 60) -> dict[str, bytes]:
    """Make everything below a directory old; what it holds."""
    files = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    for name in files:
        os.utime(directory / name, (NOW - seconds, NOW - seconds))
    return files


def holds(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_trainer_s_steps_are_never_pruned(tmp_path: Path, below: str) -> None:
    shutil.copytree(STEPS, tmp_path / "checkpoints")
    for step in (2, 3):
        (tmp_path / "checkpoints" / str(step) / "commit_success.txt").write_text("done")
    before = aged(tmp_path)
    with pytest.raises(InputError, match="is a trainer's checkpoint directory"):
        prune(str(tmp_path / below), 1)
    assert holds(tmp_path) == before


def test_nor_where_versions_lie_among_them(fleet: Path) -> None:
    shutil.copytree(STEPS / "3", fleet / "3")
    before = aged(fleet / "3")
    result = prune(str(fleet), 1)
    assert result.removed == (10, 9, 8) and "not a version" in result.kept[3]
    assert holds(fleet / "3") == before
    row = next(row for row in list_versions(str(fleet)).versions if row.step == 3)
    assert not row.complete and not row.writing and "items/_METADATA" in row.foreign


def test_a_claim_in_a_trainer_s_step_makes_it_no_version(fleet: Path) -> None:
    """A conversion that was given a wrong OUT and killed before it looked."""
    claimed(fleet, 3, age=9999)
    shutil.copytree(STEPS / "3", fleet / "3", dirs_exist_ok=True)
    before = holds(fleet / "3")
    assert 3 in prune(str(fleet), 1, clock=later(0)).kept
    assert holds(fleet / "3") == before


def test_somebody_s_model_is_never_pruned(fleet: Path) -> None:
    """With the names that our own Hugging Face layout has, and a temporary file of ours beside them."""
    write_version(fleet / "7", arrays(7), layout="hf", commit=False)
    (fleet / "7" / ".mtx2vllm-0123").write_bytes(b"")
    before = aged(fleet / "7")
    result = prune(str(fleet), 1)
    assert "model-00001-of-00002.safetensors" in result.kept[7] and holds(fleet / "7") == before


def test_an_adopted_model_is_never_pruned(fleet: Path) -> None:
    write_version(fleet / "7", arrays(7), layout="hf")
    manifest = json.loads((fleet / "7" / "mtx2vllm.json").read_text())
    manifest["source"] = {"uri": str(fleet / "7"), "step": 7, "kind": "hf"}
    (fleet / "7" / "mtx2vllm.json").write_text(json.dumps(manifest))
    before = holds(fleet / "7")
    assert prune(str(fleet), 1).kept[7].startswith("adopted in its place") and holds(fleet / "7") == before


def test_a_link_to_a_version_elsewhere_is_left_alone(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = write_version(tmp_path_factory.mktemp("elsewhere") / "7", arrays(7))
    before = holds(elsewhere)
    (fleet / "7").symlink_to(elsewhere)
    assert prune(str(fleet), 1).kept[7].startswith("a link") and holds(elsewhere) == before


def test_foreign_files_in_a_version_stay(fleet: Path) -> None:
    (fleet / "8" / "notes").mkdir()
    (fleet / "8" / "notes" / "why.txt").write_text("mine")
    result = prune(str(fleet), 1)
    assert result.removed == (10, 9, 8) and result.left == {8: ("notes/why.txt",)}
    assert holds(fleet / "8") == {"notes/why.txt": b"mine"}
    assert not (fleet / "8" / "canonical").exists() and not (fleet / "9").exists()


def test_a_dead_claim_s_files_go_and_others_stay(fleet: Path) -> None:
    claimed(fleet, 5, age=9999, files=["canonical/model.safetensors", "../9/config.json"])
    (fleet / "5" / "canonical").mkdir()
    for name in ("canonical/model.safetensors", ".mtx2vllm-7", "mine.txt"):
        (fleet / "5" / name).write_bytes(b"x")
    result = prune(str(fleet), 4, clock=later(0))
    assert result.removed == (5,) and result.left == {5: ("mine.txt",)}
    assert holds(fleet / "5") == {"mine.txt": b"x"} and (fleet / "9" / "config.json").exists()


def test_a_manifest_that_cannot_be_read_protects(fleet: Path) -> None:
    (fleet / "8" / "mtx2vllm.json").write_text("{}")
    before = holds(fleet / "8")
    assert "cannot be read" in prune(str(fleet), 1).kept[8] and holds(fleet / "8") == before


def test_a_killed_prune_is_finished_by_the_next(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(claim, "delete", die)
        patch.setattr(claim.Claim, "__exit__", lambda self, *_: self._stop.set())
        with pytest.raises(Killed):
            prune(str(fleet), 3)
    assert not (fleet / "8" / "mtx2vllm.json").exists() and (fleet / "8" / "canonical").exists()
    record = json.loads((fleet / "8" / claim.NAME).read_text()) | {"started": 1}
    (fleet / "8" / claim.NAME).write_text(json.dumps(record))
    assert prune(str(fleet), 3).removed == (8,) and not (fleet / "8").exists()


def test_no_root(fleet: Path) -> None:
    calls = (list_versions, lambda at: prune(at, 1), lambda at: pin(at, 9), unpin)
    for call in calls:
        with pytest.raises(InputError, match="does not exist"):
            call(str(fleet / "nowhere"))
        with pytest.raises(InputError, match="is a file"):
            call(str(fleet / "12"))
        with pytest.raises(InputError, match=f"is itself a version, .* give {fleet}$"):
            call(str(fleet / "9"))
    (fleet / "empty").mkdir()
    assert list_versions(str(fleet / "empty")).versions == ()
    assert prune(str(fleet / "empty"), 1).removed == ()
    (fleet / "empty" / "thesis").mkdir()
    with pytest.raises(InputError, match="holds no committed version"):
        prune(str(fleet / "empty"), 1)
