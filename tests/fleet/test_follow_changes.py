"""Steps that change under a follower: replaced while they are read, written anew, copied slowly."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.run_source import STEPS
from fleet.test_follow import Fleet, fleet, settle
from mtx2vllm.converter.fleet import follow as following
from mtx2vllm.converter.fleet.follow import Follower
from mtx2vllm.converter.version.verify import verify_version

__all__ = ["fleet"]


def stamp(step: Path, seconds: float) -> None:
    """Say when a step was written."""
    for path in step.rglob("*"):
        os.utime(path, (seconds, seconds))


def one_turn(follower: Follower, before: Callable[[], object], after: Callable[[], object] = lambda: None) -> None:
    """One turn in which something happens before the weights are read, and something when that has failed."""
    real = following.carry_out

    def carry_out(*args: object, **chosen: object) -> object:
        before()
        try:
            return real(*args, **chosen)  # type: ignore[arg-type]
        finally:
            after()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "carry_out", carry_out)
        assert follower.turn()


def moved_away(fleet: Fleet, step: Path, aside: Path, follower: Follower) -> None:
    """And another one is renamed into its place before the next look."""
    one_turn(follower, lambda: step.rename(aside))
    assert not follower.turn()
    stamp(fleet.run.write(3, content=2), 2e9)


def replaced(fleet: Fleet, step: Path, aside: Path, follower: Follower) -> None:
    one_turn(follower, lambda: step.rename(aside), lambda: stamp(fleet.run.write(3, content=2), 2e9))


def moved_back(fleet: Fleet, step: Path, aside: Path, follower: Follower) -> None:
    """Its metadata stay all the time."""
    part = step / "items" / "ocdbt.process_0"
    one_turn(follower, lambda: part.rename(aside))
    assert not follower.turn()
    aside.rename(part)


@pytest.mark.parametrize("happens", [moved_away, replaced, moved_back])
def test_a_dropped_step_that_comes_back_is_converted_at_the_next_look(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture, happens: Callable[..., None]
) -> None:
    step = fleet.run.write(3)
    stamp(step, 1e9)
    follower = fleet.follower()
    happens(fleet, step, tmp_path / "aside", follower)
    assert (follower.status.counts["dropped"], fleet.versions()) == (1, [])
    assert follower.turn()  # the clock stands still
    assert fleet.versions() == [3] and verify_version(str(fleet.root / "3")).ok
    what = "another took its place" if happens is replaced else "the trainer deleted it"
    assert caplog.text.count(f"dropped 3: {what} while it was read") == 1
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_published_step_that_is_written_anew_is_told_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1, 9):
        stamp(fleet.run.write(number), 1e9)
    follower = fleet.follower(every=1)
    settle(follower)
    before = {n: (fleet.root / str(n) / "mtx2vllm.json").read_bytes() for n in fleet.versions()}
    assert len(before) == 8 and "was written after" not in caplog.text
    for number in (3, 8):
        new = fleet.run.checkpoints / f"{number}.orbax-checkpoint-tmp-9"
        shutil.copytree(STEPS / "2", new)
        stamp(new, 1e9 + 5)
        fleet.run.delete(number)
        new.rename(fleet.run.checkpoints / str(number))
    for _ in range(10):
        settle(follower)
    for number in (3, 8):
        assert caplog.text.count(f"step {number} was written after version {number} was published") == 1
    assert caplog.text.count("was written after") == 2
    assert {n: (fleet.root / str(n) / "mtx2vllm.json").read_bytes() for n in fleet.versions()} == before


def test_a_step_that_is_replaced_while_it_is_published_is_told(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = fleet.run.write(3)
    stamp(step, 1e9)
    real = following.carry_out

    def carry_out(*args: object, **chosen: object) -> object:
        done = real(*args, **chosen)  # type: ignore[arg-type]
        stamp(step, 1e9 + 5)
        return done

    monkeypatch.setattr(following, "carry_out", carry_out)
    settle(fleet.follower())
    assert caplog.text.count("step 3 was written after version 3 was published") == 1


def test_a_step_that_is_copied_slowly_is_a_warning(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    step = fleet.run.write(2)
    late = step / "items" / "ocdbt.process_0" / "d"
    data = {path: path.read_bytes() for path in late.iterdir()}
    for path in data:
        path.write_bytes(b"")
    follower = fleet.follower()
    for size in (1000, 2000, None):
        settle(follower)
        assert fleet.versions() == []
        for path, whole in data.items():
            path.write_bytes(whole[:size])
        fleet.clock.time += 3
    settle(follower)
    assert fleet.versions() == [2]
    told = [(r.levelname, r.getMessage()) for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0][0] == "WARNING"
    assert "step 2 cannot be read yet; it may still be being copied" in told[0][1]
    assert follower.status.counts["refused"] == 0 and follower.status.error is None


def test_a_copy_by_temporary_names_is_no_deletion(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """As rsync copies: files appear under another name first."""
    step = fleet.run.write(3)
    file = max(step.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    temporary = file.rename(file.with_name(f".{file.name}.x7"))
    follower = fleet.follower()
    one_turn(follower, lambda: None, lambda: temporary.rename(file))
    settle(follower)
    assert "dropped" not in caplog.text and "may still be being copied" in caplog.text
    fleet.clock.time += 3
    settle(follower)
    assert fleet.versions() == [3]  # though nothing has changed since the failure, only since the reading


def test_a_restart_with_nothing_to_do_says_so(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for number in (2, 3):
        fleet.run.write(number)
    first = fleet.follower()
    settle(first)
    first.lease.give_back()
    assert "up to date" not in caplog.text
    second = fleet.follower()
    for _ in range(3):
        settle(second)
    assert caplog.text.count("up to date at 3") == 1
