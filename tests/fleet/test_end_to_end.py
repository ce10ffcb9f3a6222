"""Trainer, follower and sampler, all real, none knowing of another: kill -9 of any of them at any moment.

What must hold: nothing half is ever published or served, every token is of the version that it names, and everything
catches up by itself.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine.serving import ServerProcess, bare_model, differences

from fleet.client import Client
from fleet.live import FollowerProcess, RootWatcher, Trainer, content_of, until

pytestmark = pytest.mark.engine

_PACE_S = 8.0  # a step of the trainer
_MOST_SPANS = 400  # that cold engines repeat


class Fleet:
    """Everything that lives, in one place."""

    def __init__(self, home: Path, seed: int) -> None:
        self.run, self.root = home / "run", home / "root"
        self.root.mkdir(parents=True)
        self.log = home
        self.chance = random.Random(seed)
        self.trainer, self.watcher = Trainer(self.run, _PACE_S), RootWatcher(self.root)
        self.follower = FollowerProcess(self.run, self.root, home / "follower.log", "--layout", "hf", "--all")
        self.server = ServerProcess(
            bare_model(home / "model"), self.root, home / "server.log", "--load-format", "dummy"
        )
        self.client = Client(self.server, seed)
        self.rows: list[str] = []

    def start(self) -> None:
        self.watcher.start()
        self.follower.start()
        self.server.start()
        self.trainer.start()
        self.client.start()

    def end(self) -> None:
        self.client.finish()
        self.follower.kill()
        self.server.kill()
        self.trainer.finish()
        self.watcher.finish()

    def answered(self) -> None:
        """Wait until the engine has answered something new."""
        before = len(self.client.answers)
        self.server.wait(lambda: len(self.client.answers) > before, 600, "an answer")

    def kill(self, what: str) -> None:
        """kill -9 at a random moment, and start it again."""
        moment = self.chance.uniform(0.0, 3.0)
        time.sleep(moment)
        serving, published = self.server.loaded(), max(self.watcher.seen, default=None)
        assert self.follower.running()
        if what in {"engine", "both"}:
            self.client.kills += 1
            self.server.kill()
        if what in {"follower", "both"}:
            self.follower.kill()
        begun = time.monotonic()
        if what in {"engine", "both"}:
            assert self.server.left() == []
            self.server.start()
        if what in {"follower", "both"}:
            self.follower.start()
        newer = max([published or 0, *self.trainer.written[-1:]])
        self.server.wait(lambda: (self.server.loaded() or 0) >= newer, 600, f"version {newer}")
        self.answered()
        self.rows.append(
            f"| {len(self.rows) + 1} | {what} | {moment:.2f} | {serving} | {published} | {self.server.loaded()} "
            f"| {time.monotonic() - begun:.1f} |"
        )

    def catch_up(self) -> list[int]:
        """Let the trainer end, and everything else arrive at its last step."""
        steps = self.trainer.finish()
        until(lambda: len(self.watcher.seen) >= len(steps), 300, "all versions")
        self.server.wait(lambda: self.server.loaded() == max(steps), 120, "the last version")
        self.answered()
        return steps


def survive(home: Path, kills: Sequence[str], seed: int) -> Fleet:
    """A run with these kills, judged."""
    fleet = Fleet(home, seed)
    try:
        fleet.start()
        fleet.answered()
        for what in kills:
            fleet.kill(what)
        steps = fleet.catch_up()
        assert fleet.follower.stop() == 0
        fleet.client.finish()
        assert fleet.server.stop() == 0
        assert fleet.server.left() == []
    finally:
        fleet.end()
    assert fleet.watcher.problems == []
    assert set(fleet.watcher.seen) == set(steps)
    assert fleet.client.problems == []
    judge(fleet, steps)
    return fleet


def judge(fleet: Fleet, steps: list[int]) -> None:
    """Every answer, by version."""
    spans = fleet.client.spans()
    versions = [int(span.version) for span in spans]
    assert set(versions) <= set(steps)  # never the random weights that the engine began with
    assert versions == sorted(versions)
    assert versions[-1] == max(steps)
    assert sum(len(answer) > 1 for answer in fleet.client.answers) >= 1  # a request that went through a swap
    chosen = [span for answer in fleet.client.answers if len(answer) > 1 for span in answer]
    chosen = [*chosen, *(span for answer in fleet.client.answers if len(answer) == 1 for span in answer)][:_MOST_SPANS]
    assert {content_of(int(span.version)) for span in chosen} == {"trained", "original"}
    problems, _ = differences(chosen, content_of)
    assert problems == []
    fleet.rows.append(
        f"{len(fleet.client.answers)} answers, {fleet.client.interrupted} interrupted by a kill, {len(set(versions))} versions "
        f"served of {len(steps)} published; {len(chosen)} spans repeated by cold engines, all equal"
    )


def show(fleet: Fleet) -> None:
    print(
        "\n| # | kill -9 of | after s | served | published | serves then | back after s |\n|---|---|---|---|---|---|---|"
    )
    print("\n".join(fleet.rows))


def test_kills_of_follower_engine_and_both(tmp_path: Path) -> None:
    show(survive(tmp_path, ("follower", "engine", "follower", "both"), seed=1))


@pytest.mark.soak
def test_thirty_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = time.time_ns()
    kills = random.Random(seed).choices(("follower", "engine", "both"), k=30)
    fleet = survive(tmp_path, kills, seed)
    with capsys.disabled():
        show(fleet)
