"""Who serves what, and what may be removed: every combination of newest, pinned, leased and half written."""

import itertools
import json
import os
import time
from pathlib import Path

import pytest
from versions import arrays, write_version

from mtx2vllm.converter.errors import InputError, UsageError
from mtx2vllm.converter.fleet import root
from mtx2vllm.converter.fleet.versions import QUIET_S, list_versions, pin, prune, unpin
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
    unpin(str(fleet))
    unpin(str(fleet))
    assert root.read_pin(str(fleet)) is None
    with pytest.raises(InputError, match=r"holds no complete version 77; it holds 11, 10, 9, 8\."):
        pin(str(fleet), 77)
    with pytest.raises(InputError, match="it holds none"):
        pin(str(fleet / "nowhere"), 1)


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
    (fleet / "25" / "old").write_bytes(b"left behind")
    os.utime(fleet / "25" / "old", (NOW - QUIET_S - 5, NOW - QUIET_S - 5))
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

    def and_pin(store, location, step):
        remove(store, location, step)
        pin(location, 8)

    monkeypatch.setattr(versions, "_remove", and_pin)
    result = prune(str(fleet), 1)
    assert result.removed == (10, 9) and result.kept == {11: "newest", 8: "pinned"}
    assert (fleet / "8" / "mtx2vllm.json").exists()


def test_a_manifest_that_cannot_be_read_is_shown(fleet: Path) -> None:
    (fleet / "9" / "mtx2vllm.json").write_text("{}")
    row = next(row for row in list_versions(str(fleet)).versions if row.step == 9)
    assert row.complete and row.bytes is None and row.problem is not None and "not a valid manifest" in row.problem


def test_no_root(tmp_path: Path) -> None:
    found = list_versions(str(tmp_path / "nowhere"))
    assert found.versions == () and found.replicas == ()
    assert prune(str(tmp_path / "nowhere"), 1).removed == ()
