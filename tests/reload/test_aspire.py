"""Which version is wanted, as a table; and quarantine."""

import pytest

from mtx2vllm.converter.storage import Stat
from mtx2vllm.reload.aspire import Choice, Held, Look, Quarantine, choose
from mtx2vllm.reload.settings import Policy

LATEST = Policy()


def chosen(steps, committed, *, pin=None, policy=LATEST, held=None, blocked=(), created=None) -> Choice:
    stats = {step: Stat(1, step * 10, 0.0) for step in committed}
    stat_of = stats.get
    return choose(
        Look(tuple(sorted(steps, reverse=True)), pin), policy, held,
        (stat_of, lambda step, generation: step in blocked, lambda step: (created or {}).get(step, "")),
    )  # fmt: skip


def held(step: int, generation: int | None = None, created: str = "5") -> Held:
    return Held(step, step * 10 if generation is None else generation, created)


@pytest.mark.parametrize(
    ("given", "step", "wanted", "uncommitted"),
    [
        ({"steps": [], "committed": []}, None, None, ()),
        ({"steps": [9, 10], "committed": [9, 10]}, 10, 10, ()),
        ({"steps": [9, 10], "committed": [9]}, 9, 9, (10,)),
        ({"steps": [9, 10], "committed": []}, None, None, (10, 9)),
        ({"steps": [9, 10], "committed": [9, 10], "held": held(10)}, None, 10, ()),
        ({"steps": [9, 10], "committed": [9, 10], "held": held(9)}, 10, 10, ()),
        ({"steps": [9, 10, 11], "committed": [9, 10], "held": held(10)}, None, 10, (11,)),
        # written again under the same name
        ({"steps": [10], "committed": [10], "held": held(10, generation=7)}, 10, 10, ()),
        # the newest is in quarantine: the best that is newer than what is served, never one that is older
        ({"steps": [9, 10, 11], "committed": [9, 10, 11], "blocked": [11]}, 10, 11, ()),
        ({"steps": [9, 10, 11], "committed": [9, 10, 11], "blocked": [11], "held": held(9)}, 10, 11, ()),
        ({"steps": [9, 10, 11], "committed": [9, 10, 11], "blocked": [11], "held": held(10)}, None, 11, ()),
        ({"steps": [9, 10], "committed": [9, 10], "blocked": [10], "held": held(10, generation=7)}, None, 10, ()),
        ({"steps": [9, 10], "committed": [9, 10], "blocked": [9, 10]}, None, 10, ()),
        # the served one is gone: older ones only where they were made later
        ({"steps": [3], "committed": [3], "held": held(10), "created": {3: "4"}}, None, 3, ()),
        ({"steps": [3], "committed": [3], "held": held(10), "created": {3: "6"}}, 3, 3, ()),
        ({"steps": [3, 10], "committed": [3], "held": held(10), "created": {3: "6"}}, None, 3, (10,)),
        ({"steps": [], "committed": [], "held": held(10)}, None, None, ()),
        # pin and policy
        ({"steps": [9, 10], "committed": [9, 10], "pin": 9}, 9, 9, ()),
        ({"steps": [9, 10], "committed": [9, 10], "pin": 9, "held": held(10)}, 9, 9, ()),
        ({"steps": [9, 10], "committed": [9, 10], "pin": 9, "held": held(9)}, None, 9, ()),
        ({"steps": [9, 10], "committed": [9, 10], "pin": 9, "policy": Policy(10)}, 9, 9, ()),
        ({"steps": [9, 10], "committed": [9, 10], "policy": Policy(9), "held": held(10)}, 9, 9, ()),
        ({"steps": [9, 10], "committed": [10], "pin": 9}, None, 9, (9,)),
        ({"steps": [10], "committed": [10], "pin": 9}, None, 9, ()),
        ({"steps": [9, 10], "committed": [9, 10], "pin": 9, "blocked": [9]}, None, 9, ()),
    ],
)
def test_the_choice(given: dict, step: int | None, wanted: int | None, uncommitted: tuple[int, ...]) -> None:
    found = chosen(**given)
    assert (found.step, found.wanted, found.uncommitted) == (step, wanted, uncommitted)


def test_why_nothing_is_loaded() -> None:
    assert "version 9 is pinned, but it is not there" in str(chosen([10], [10], pin=9).why)
    assert "asked for by the policy" in str(chosen([], [], policy=Policy(9)).why)
    assert chosen([10], [10], pin=9, held=held(9)).why is None  # it is served, though it is gone
    assert chosen([10], [10]).why is None


def test_an_older_version_is_not_opened_to_see_its_age_while_the_served_one_is_there() -> None:
    def never(step: int) -> str:
        raise AssertionError(step)

    stats = {9: Stat(1, 90, 0.0)}
    found = choose(Look((10, 9)), LATEST, held(10), (stats.get, lambda *_: False, never))
    assert found.step is None


def test_quarantine_doubles_its_pauses() -> None:
    quarantine = Quarantine()
    bad = [quarantine.add(5, 1, "invalid", 0.0) for _ in range(10)]
    assert bad == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    passing = [quarantine.add(6, 1, "vanished", 0.0) for _ in range(8)]
    assert passing == [1, 2, 4, 8, 16, 32, 60, 60]
    assert quarantine.steps == (5, 6) and quarantine.next_try(0.0) == 60


def test_a_pause_that_is_over_is_no_reason_to_look() -> None:
    """Else a version that nobody wants any more would make the agent look without end."""
    quarantine = Quarantine()
    quarantine.add(5, 1, "invalid", 0.0)
    quarantine.add(6, 1, "vanished", 3.0)
    assert [quarantine.next_try(now) for now in (0.0, 4.0, 4.5, 5.0)] == [4.0, 5.0, 5.0, None]


def test_quarantine_ends_with_its_pause_or_with_a_change() -> None:
    quarantine = Quarantine()
    quarantine.add(5, 1, "invalid", 100.0)
    assert quarantine.holds(5, 1, 104.9) and not quarantine.holds(5, 1, 105.0) and not quarantine.holds(5, 2, 100.0)
    assert quarantine.add(5, 2, "invalid", 100.0) == 5  # another version: it counts anew
    quarantine.clear(5)
    assert not quarantine.holds(5, 2, 100.0) and quarantine.next_try(100.0) is None
    quarantine.add(7, 1, "swap", 0.0)
    quarantine.keep_only([6])
    assert quarantine.steps == ()
