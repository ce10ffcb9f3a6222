"""The follower's decisions, turn by turn: real checkpoints, real versions, time by hand."""

import itertools
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from data_files import DATA, digests, oracle
from versions import arrays, write_version

from fleet.run_source import CONFIG, Run
from mtx2vllm.converter.conversion import Options
from mtx2vllm.converter.errors import InputError, LostRace, Mtx2vllmError, UsageError
from mtx2vllm.converter.fleet import follow as following
from mtx2vllm.converter.fleet import follow_run
from mtx2vllm.converter.fleet.follow import Follower, Following, Stop
from mtx2vllm.converter.fleet.follow_lease import RootLease
from mtx2vllm.converter.version.verify import load_manifest, verify_version


class Clock:
    def __init__(self) -> None:
        self.time = time.time() + 60

    def __call__(self) -> float:
        return self.time


class Fleet:
    """A run, a root, and followers over them."""

    def __init__(self, home: Path) -> None:
        self.run, self.root, self.clock = Run(home / "run"), home / "root", Clock()
        self.stop = Stop()

    def follower(self, every: int | None = None, **options: object) -> Follower:
        chosen = Following(
            str(self.run.home), str(self.root), Options(**{"hf_config": CONFIG, **options}), every, poll=0.05
        )  # type: ignore[arg-type]
        found = Follower(chosen, RootLease(str(self.root), self.clock), self.stop, self.clock)
        assert found.lease.take() is None
        found.resume()
        return found

    def versions(self) -> list[int]:
        return sorted(int(p.parent.name) for p in self.root.glob("*/mtx2vllm.json"))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def settle(follower: Follower) -> None:
    while follower.turn():
        pass


def test_a_run_that_does_not_exist_yet_is_waited_for(fleet: Fleet) -> None:
    follower = fleet.follower()
    assert not follower.turn()
    fleet.run.write(0, content=0)
    settle(follower)
    assert fleet.versions() == [0]


def test_what_is_published_is_maxtext_s_own_export(fleet: Fleet) -> None:
    fleet.run.write(3)
    settle(fleet.follower(layout="hf", dtype="float32"))
    assert digests(fleet.root / "3") == oracle(DATA / "trained/qwen3-scanned/maxtext_hf_step3_digests.json")


def test_newest_first_and_the_older_ones_are_skipped(fleet: Fleet) -> None:
    for step in (9, 10, 100):
        fleet.run.write(step)
    follower = fleet.follower()
    settle(follower)
    assert fleet.versions() == [100]
    assert follower.status.counts["skipped"] == 2
    fleet.run.write(110)
    settle(follower)
    assert fleet.versions() == [100, 110]


def test_all_steps_newest_first(fleet: Fleet) -> None:
    for step in (9, 10, 100):
        fleet.run.write(step)
    follower = fleet.follower(every=1)
    order = []
    while follower.turn():
        order.append(follower._settled.copy())
    assert [sorted(s) for s in order] == [[100], [10, 100], [9, 10, 100]]
    assert fleet.versions() == [9, 10, 100]


def test_every_n(fleet: Fleet) -> None:
    for step in (0, 5, 10, 15, 20):
        fleet.run.write(step)
    settle(fleet.follower(every=10))
    assert fleet.versions() == [0, 10, 20]


def test_a_step_that_is_still_written_is_left_alone(fleet: Fleet) -> None:
    written = fleet.run.write(7)
    written.rename(written.with_name("7.orbax-checkpoint-tmp-3"))
    follower = fleet.follower()
    assert not follower.turn()
    (fleet.run.checkpoints / "7.orbax-checkpoint-tmp-3").rename(written)
    settle(follower)
    assert fleet.versions() == [7]


def test_unchanged_tensors_are_counted_by_digest(fleet: Fleet) -> None:
    follower = fleet.follower()
    fleet.run.write(1, content=2)
    settle(follower)
    fleet.run.write(2, content=3)
    settle(follower)
    ours = {s: load_manifest(str(fleet.root / str(s)))[0] for s in (1, 2)}
    raw = {s: digests(fleet.root / str(s) / "canonical") for s in (1, 2)}
    equal = sum(raw[1][n]["sha256"] == raw[2][n]["sha256"] for n in raw[2])
    assert ours[2].unchanged is not None
    assert (ours[2].unchanged.version, ours[2].unchanged.tensors) == (1, equal)
    assert 0 < equal < len(raw[2])
    assert ours[1].unchanged is None


def test_a_restart_goes_on_and_pruned_versions_stay_pruned(fleet: Fleet) -> None:
    for step in (1, 2, 3):
        fleet.run.write(step)
    first = fleet.follower(every=1)
    settle(first)
    first._tell(None)
    first.lease.give_back()
    shutil.rmtree(fleet.root / "1")
    fleet.run.write(4)
    settle(fleet.follower(every=1))
    assert fleet.versions() == [2, 3, 4]


def test_a_step_deleted_while_it_is_read_is_dropped_with_a_line(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.run.write(1)
    fleet.run.write(2)
    real = following.carry_out

    def carry_out(*args: object, **chosen: object) -> object:
        for half in (fleet.run.checkpoints / "2").rglob("d"):  # retention is half done: the metadata is still there
            shutil.rmtree(half)
        return real(*args, **chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(following, "carry_out", carry_out)
    follower = fleet.follower()
    assert follower.turn()
    assert follower.status.counts["dropped"] == 1
    assert "dropped 2: the trainer deleted it while it was read" in caplog.text
    assert not any(r.exc_info for r in caplog.records)
    monkeypatch.setattr(following, "carry_out", real)
    fleet.run.delete(2)
    settle(follower)
    assert fleet.versions() == [1]
    assert not (fleet.root / "2").exists()


def test_a_bad_step_is_reported_once_and_tried_again_when_it_changes(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.run.write(1)
    bad = fleet.run.write(2)
    whole = {p: p.read_bytes() for p in (bad / "items" / "ocdbt.process_0" / "d").iterdir()}
    for path, data in whole.items():
        path.write_bytes(data[: len(data) // 2])
    follower = fleet.follower()
    settle(follower)
    assert fleet.versions() == [1]
    assert not [r for r in caplog.records if r.levelname == "ERROR"]  # it may still be being copied
    for _ in range(20):
        fleet.clock.time += 60
        settle(follower)
    assert follower.status.counts["refused"] == 1
    assert caplog.text.count("step 2 cannot be converted") == 1
    for path, data in whole.items():
        path.write_bytes(data)
    fleet.clock.time += 60
    settle(follower)
    assert fleet.versions() == [1, 2]
    assert verify_version(str(fleet.root / "2")).ok


def test_a_config_that_does_not_fit_is_the_input_s_fault_until_it_is_mended(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run.write(1)
    config = json.loads((Path(CONFIG) / "config.json").read_text())
    own = tmp_path / "config.json"
    own.write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    follower = fleet.follower(hf_config=str(own))
    settle(follower)
    assert (follower.status.counts["refused"], fleet.versions()) == (1, [])
    own.write_text(json.dumps(config))
    fleet.clock.time += 60
    settle(follower)
    assert fleet.versions() == [1]


def test_foreign_files_in_its_place_are_left_alone_until_they_are_gone(fleet: Fleet) -> None:
    fleet.run.write(1)
    foreign = fleet.root / "1" / "thesis.pdf"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"mine")
    follower = fleet.follower()
    settle(follower)
    assert (follower.status.counts["refused"], fleet.versions(), foreign.read_bytes()) == (1, [], b"mine")
    foreign.unlink()
    fleet.clock.time += 60
    settle(follower)
    assert fleet.versions() == [1]


def test_bad_luck_is_tried_again_with_growing_pauses(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.run.write(1)
    tries: list[float] = []
    real = following.carry_out

    def full(*args: object, **chosen: object) -> object:
        tries.append(fleet.clock.time)
        raise Mtx2vllmError("the disk is full")

    monkeypatch.setattr(following, "carry_out", full)
    follower = fleet.follower()
    for _ in range(600):
        follower.turn()
        fleet.clock.time += 1
    pauses = [b - a for a, b in itertools.pairwise(tries)]
    assert pauses[0] <= 3
    assert len(tries) < 12
    assert all(b >= a for a, b in itertools.pairwise(pauses))
    monkeypatch.setattr(following, "carry_out", real)
    fleet.clock.time += 300
    settle(follower)
    assert fleet.versions() == [1]
    assert follower.status.error is None


def test_contradicting_options_end_the_follower(fleet: Fleet) -> None:
    fleet.run.write(1)
    with pytest.raises(UsageError):
        fleet.follower(base=CONFIG).turn()


def test_asked_to_stop_within_its_grace_it_finishes_and_after_it_abandons(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.run.write(1)
    real = Follower._progress

    def stopping(self: Follower, done: int, total: int) -> None:
        fleet.stop.set()
        real(self, done, total)

    monkeypatch.setattr(Follower, "_progress", stopping)
    abandoning = fleet.follower()
    abandoning.deadline = fleet.clock.time
    abandoning.turn()
    assert (abandoning.status.counts["abandoned"], fleet.versions()) == (1, [])
    assert not (fleet.root / "1").exists()
    abandoning.lease.give_back()
    fleet.stop._asked = False
    finishing = fleet.follower()
    finishing.deadline = fleet.clock.time + 20
    finishing.turn()
    assert fleet.versions() == [1]


def test_a_lost_lease_abandons_what_is_under_way(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.run.write(1)
    follower = fleet.follower()
    monkeypatch.setattr(follower.lease, "held", lambda: False)
    follower.turn()
    assert (follower.status.counts["abandoned"], fleet.versions()) == (1, [])


def test_a_second_follower_exits_by_flag(fleet: Fleet) -> None:
    fleet.follower()
    other = Following(str(fleet.run.home), str(fleet.root), Options(hf_config=CONFIG), wait=False)
    second = Follower(other, RootLease(str(fleet.root), fleet.clock), fleet.stop, fleet.clock)
    with pytest.raises(LostRace, match="has a follower already: process"):
        follow_run.follow(other, fleet.stop, second)


def test_a_config_that_does_not_exist_ends_it_at_once(fleet: Fleet) -> None:
    chosen = Following(str(fleet.run.home), str(fleet.root), Options(hf_config="/nowhere/config.json"))
    with pytest.raises(InputError, match="--hf-config"):
        follow_run.follow(chosen, fleet.stop, Follower(chosen, RootLease(str(fleet.root)), fleet.stop))


def test_a_store_that_is_away_ends_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.run.write(1)
    chosen = Following(str(fleet.run.home), str(fleet.root), Options(hf_config=CONFIG), poll=0.001)
    follower = Follower(chosen, RootLease(str(fleet.root), fleet.clock), fleet.stop, fleet.clock)
    turn, calls = follower.turn, []

    def unreliable() -> bool:
        calls.append(1)
        if len(calls) < 4:
            raise OSError(5, "the mount is away")
        if len(calls) > 5:
            fleet.stop.set()
        return turn()

    monkeypatch.setattr(follower, "turn", unreliable)
    follow_run.follow(chosen, fleet.stop, follower)
    assert fleet.versions() == [1]


def test_a_run_that_was_started_anew_is_told_to_take_another_root(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.run.write(10)
    follower = fleet.follower()
    settle(follower)
    assert "written after" not in caplog.text
    before = (fleet.root / "10/mtx2vllm.json").read_bytes()
    fleet.run.delete(10)
    fleet.run.write(5)
    settle(follower)
    assert "serve 10, which is newer" in caplog.text
    fleet.run.write(10)
    for path in (fleet.run.checkpoints / "10").rglob("*"):
        os.utime(path, (time.time() + 60,) * 2)
    settle(follower)
    assert caplog.text.count("step 10 was written after version 10 was published") == 1
    assert (fleet.root / "10/mtx2vllm.json").read_bytes() == before


def test_what_a_killed_follower_left_is_removed(fleet: Fleet) -> None:
    half = fleet.root / "7"
    (half / "canonical").mkdir(parents=True)
    (half / "canonical/model.safetensors").write_bytes(b"half")
    claim = {"host": "elsewhere", "pid": 1, "heartbeat": 0, "ttl_s": 0, "files": ["canonical/model.safetensors"]}
    (half / ".mtx2vllm.claim.json").write_text(json.dumps(claim))
    foreign = fleet.root / "8"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"somebody is copying")
    whole = write_version(fleet.root / "6", arrays(6))
    (whole / ".mtx2vllm.claim.json").write_text(json.dumps(claim))  # killed right after publishing
    old, young = fleet.root / ".mtx2vllm-0123", fleet.root / ".mtx2vllm-4567"
    for path, age in ((old, 1000), (young, 0)):
        path.write_bytes(b"{")
        os.utime(path, (time.time() - age,) * 2)
    fleet.follower()
    assert (old.exists(), young.exists()) == (False, True)  # somebody may be writing the young one
    assert not [p for p in half.rglob("*") if p.is_file()]
    assert verify_version(str(whole)).ok
    assert not (whole / ".mtx2vllm.claim.json").exists()
    assert (foreign / "model.safetensors").exists()
