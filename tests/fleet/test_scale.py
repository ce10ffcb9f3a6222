"""Many replicas on one root: all end on the newest, none loads half a version, nobody storms the store."""

from pathlib import Path

import pytest

from fleet.simulation import Result, simulate


def check(result: Result, flat: float, idle_writes: float) -> None:
    assert result.on_newest == result.replicas
    assert result.mixtures == 0
    assert all(loads[-1] == result.versions for loads in result.loads)
    assert all(loads == sorted(set(loads)) for loads in result.loads)  # only forward, and none twice
    reads, writes = result.idle
    assert reads <= 300  # a listing and a stat each second, and what a look needs besides
    assert writes <= idle_writes
    assert result.busy[1] <= 70  # a lease is written once a second at most
    assert result.rss[1] <= result.rss[0] * flat


def test_eight_replicas(tmp_path: Path) -> None:
    result = simulate(tmp_path, poll=1.0, replicas=8, versions=12, pace=0.1, idle=1.0, followed=0.5)
    check(result, flat=1.5, idle_writes=70)  # too short to tell more
    assert sum(len(loads) for loads in result.loads) >= 12 * 4


@pytest.mark.soak
def test_sixty_four_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(tmp_path, poll=1.0, replicas=64, versions=100, pace=2.0, idle=60.0, followed=0.0)
    with capsys.disabled():
        print("\n" + result.table())
    check(result, flat=1.1, idle_writes=4)  # the heartbeat
