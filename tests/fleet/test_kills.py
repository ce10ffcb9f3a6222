"""Kill -9 of the follower at any moment: nothing half is ever published, and everything is there in the end."""

import contextlib
import json
import random
import time
from pathlib import Path

import pytest

from fleet.live import CONTENTS, FollowerProcess, RootWatcher, Trainer, content_of, until
from fleet.run_source import CONFIG
from mtx2vllm.converter.conversion import convert

CLAIM = ".mtx2vllm.claim.json"


def is_writing(root: Path, pid: int) -> bool:
    """Whether a version is claimed by a process and not committed."""
    for claim in root.glob(f"[0-9]*/{CLAIM}"):
        with contextlib.suppress(FileNotFoundError):
            if json.loads(claim.read_text())["pid"] == pid and not (claim.parent / "mtx2vllm.json").exists():
                return True
    return False


def events(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def survive(home: Path, kills: int, seed: int) -> tuple[int, int]:
    """A run with so many kills; how many of them hit a version under way, and how many versions there were."""
    chance = random.Random(seed)
    run, root = home / "run", home / "root"
    root.mkdir(parents=True)
    trainer, watcher = Trainer(run, 1.0), RootWatcher(root)
    follower = FollowerProcess(run, root, home / "log", "--layout", "hf", "--all")
    watcher.start()
    trainer.start()
    hits, steps = 0, []
    try:
        for number in range(kills):
            follower.start()
            if number % 2:  # any moment, the start of the process included
                time.sleep(chance.uniform(0.0, 3.0))
            else:  # while a version is written
                until(lambda: is_writing(root, follower.pid) or not follower.running(), 60, "a version under way")
                time.sleep(chance.uniform(0.0, 0.03) if number else 0.0)
            assert follower.running()
            follower.kill()
            hits += is_writing(root, follower.pid)
        steps = trainer.finish()
        follower.start()
        while len(watcher.seen) < len(steps):
            so_far = len(watcher.seen)
            until(lambda: len(watcher.seen) > so_far, 60, f"more than {so_far} of {len(steps)} versions")  # noqa: B023
        assert follower.stop() == 0
    finally:
        follower.kill()
        trainer.finish()
        watcher.finish()
    assert watcher.problems == []
    assert set(watcher.seen) == set(steps)
    leftovers = [p for p in root.glob("[0-9]*/**/*") if p.name.startswith((".mtx2vllm-", CLAIM))]
    assert leftovers == []
    assert not [e for e in events(home / "log") if e["level"] == "error"]
    return hits, len(steps)


def test_four_kills(tmp_path: Path) -> None:
    hits, _ = survive(tmp_path, 4, seed=1)
    assert hits >= 1  # or the test would show nothing


@pytest.mark.soak
def test_thirty_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hits, versions = survive(tmp_path, 30, seed=time.time_ns())
    with capsys.disabled():
        print(f"\n30 kills of the follower, {hits} within a version; {versions} versions, all whole, none wrong")
    assert hits >= 5


def test_sigterm_ends_cleanly_and_a_standby_takes_over(tmp_path: Path) -> None:
    run, root = tmp_path / "run", tmp_path / "root"
    root.mkdir()
    first = FollowerProcess(run, root, tmp_path / "first", "--layout", "hf")
    second = FollowerProcess(run, root, tmp_path / "second", "--layout", "hf")
    trainer, watcher = Trainer(run, 0.1), RootWatcher(root)
    watcher.start()
    try:
        first.start()
        until((root / ".follower.json").exists, 60, "the lease")
        second.start()
        until(lambda: any(e.get("event") == "standby" for e in events(tmp_path / "second")), 60, "the standby")
        trainer.write(10)
        until(lambda: 10 in watcher.seen, 60, "the first version")
        assert first.stop() == 0
        assert events(tmp_path / "first")[-1]["event"] == "stopped"
        trainer.write(20)
        trainer.write(30)
        until(lambda: 30 in watcher.seen, 60, "the last version")
        assert second.stop() == 0
    finally:
        first.kill()
        second.kill()
        watcher.finish()
    assert watcher.problems == []
    assert not [e for e in events(tmp_path / "second") if e["level"] == "error"]


def test_the_watcher_is_not_blind(tmp_path: Path) -> None:
    """The versions of two steps, taken for those of one; then a flipped bit."""
    root = tmp_path / "root"
    for step in (10, 20):
        convert(str(CONTENTS[content_of(step)]), str(root / str(step)), layout="hf", hf_config=CONFIG)
    watcher = RootWatcher(root)
    watcher.look()
    assert watcher.problems == []
    confused = RootWatcher(root, lambda step: "trained")
    confused.look()
    assert all(text.startswith("10: tensor") for text in confused.problems)
    assert len(confused.problems) > 1
    shard = root / "20" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    late = RootWatcher(root)
    late.look()
    assert any("20: " in text for text in late.problems)
