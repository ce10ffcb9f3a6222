"""One writer a root: who gets the lease, who keeps it, and when a dead one's is free."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtx2vllm.converter.fleet.follow_lease import RootLease
from mtx2vllm.converter.fleet.root import read_follower
from mtx2vllm.converter.version import process


class Clock:
    def __init__(self) -> None:
        self.time = 2_000_000_000.0  # later than any file's own time, so that this clock alone decides

    def __call__(self) -> float:
        return self.time


def lease(root: Path, clock: Clock) -> RootLease:
    return RootLease(str(root), clock, heartbeat_s=3600)


def rewrite(root: Path, **facts: object) -> None:
    path = root / ".follower.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_of_many_exactly_one_gets_it(tmp_path: Path) -> None:
    clock = Clock()
    leases = [lease(tmp_path, clock) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: one.take(), leases))
    assert answers.count(None) == 1
    for one in leases:
        one.give_back()


def test_given_back_it_is_free_at_once_and_remembers_what_is_settled(tmp_path: Path) -> None:
    clock = Clock()
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    assert first.take() is None
    first.tell(None, (1, 2))
    busy = second.take()
    assert busy is not None
    assert str(os.getpid()) in busy
    first.give_back()
    assert not first.held()
    assert second.take() is None
    assert second.settled == (1, 2)
    second.give_back()
    assert first.take() is None  # and back again: nothing of the first term is left
    assert first.held()
    first.give_back()


def test_another_host_s_lease_expires(tmp_path: Path) -> None:
    clock = Clock()
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    assert first.take() is None
    rewrite(tmp_path, host="elsewhere", pid=1)
    clock.time += 119
    assert second.take() is not None
    clock.time += 2
    assert second.take() is None
    assert not first.held()
    first.beat()  # finds another's lease in its place, and must not take it back
    assert not first.held()
    assert second.held()
    second.give_back()


def test_a_killed_process_of_this_host_is_recognised_at_once(tmp_path: Path) -> None:
    clock = Clock()
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    assert first.take() is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    rewrite(tmp_path, pid=child.pid, started=process.started(child.pid))
    assert second.take() is not None
    child.kill()
    child.wait()
    assert second.take() is None
    second.give_back()


def test_a_process_number_that_was_used_again_is_no_sign_of_life(tmp_path: Path) -> None:
    clock = Clock()
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    assert first.take() is None
    rewrite(tmp_path, started=1)
    assert second.take() is None
    second.give_back()


def test_another_container_s_process_numbers_mean_nothing(tmp_path: Path) -> None:
    clock = Clock()
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    assert first.take() is None
    rewrite(tmp_path, started=1, namespace="pid:[1]")
    assert process.namespace() != "pid:[1]"
    assert second.take() is not None
    clock.time += 121
    assert second.take() is None
    second.give_back()


def test_a_store_that_refuses_heartbeats_ends_the_lease_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    one = lease(tmp_path, clock)
    assert one.take() is None

    def refuse(*_: object) -> None:
        raise OSError(5, "away")

    monkeypatch.setattr(one._store, "replace", refuse)
    clock.time += 100
    one.beat()
    assert one.held()
    clock.time += 21
    one.beat()
    assert not one.held()
    monkeypatch.undo()
    one.beat()
    assert one.held()
    one.give_back()


def test_an_answer_that_was_lost_costs_nothing(tmp_path: Path) -> None:
    clock = Clock()
    one = lease(tmp_path, clock)
    assert one.take() is None
    one._generation -= 1  # as if the write had happened and the answer had not come
    one.beat()
    assert one.held()
    generation = one._generation
    one.beat()
    assert one._generation != generation
    one.give_back()


def test_a_file_that_is_no_lease_counts_until_it_is_old(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / ".follower.json"
    path.write_text('{"holder": "x", ')
    clock.time = path.stat().st_mtime + 5
    one = lease(tmp_path, clock)
    assert one.take() is not None
    clock.time += 120
    assert one.take() is None
    seen = read_follower(str(tmp_path), clock.time)
    assert seen is not None
    assert seen.lease.pid == os.getpid()
    one.give_back()
