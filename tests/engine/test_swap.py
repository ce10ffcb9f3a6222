"""Swaps in the real engine: both ways, faults at every place, requests in flight, the engine's own loader."""

from typing import Any

import pytest

from engine.processes import report

pytestmark = pytest.mark.engine

CHECKS = "round_trips,partial,refusals,device_memory,faults_sampled,in_flight,concurrent,misfits,reloads,native"


@pytest.fixture(scope="module")
def qwen3() -> dict[str, Any]:
    return report("qwen3", 1, False, CHECKS)


def test_there_and_back_again_is_where_one_was(qwen3: dict[str, Any]) -> None:
    trips = qwen3["round_trips"]
    assert len(trips) == 3
    assert len({trip.pop("b") for trip in trips.values()}) == 1  # either way leads to the same state
    assert all(all(facts.values()) for facts in trips.values())


def test_tensors_can_be_swapped_one_by_one(qwen3: dict[str, Any]) -> None:
    assert qwen3["partial"] == {"b_again": True, "swaps": 26}


def test_what_does_not_fit_is_refused_by_name(qwen3: dict[str, Any]) -> None:
    found = qwen3["refusals"]
    assert found["unchanged"]
    assert set(found["messages"]) == {"unknown", "shape", "dtype"}
    assert all(message.startswith("SwapFailed: ") for message in found["messages"].values())
    assert found["first"] in found["messages"]["shape"]
    assert "no.such.tensor" in found["messages"]["unknown"]


def test_a_version_of_another_model_is_refused_whole(qwen3: dict[str, Any]) -> None:
    found = qwen3["misfits"]
    assert found["unchanged"] and found["version"]
    assert set(found["messages"]) == {"smaller", "another", "part", "wider"}
    assert all(message.startswith("LoadFailed: ") and "misfit" in message for message in found["messages"].values())
    assert "26 tensors have another shape or type" in found["messages"]["smaller"]


def check_memory(found: dict[str, Any], count: int) -> None:
    assert found["reloads"] == count
    assert found["states"] == [1, 1]  # each version is the same state every time
    settled, last = found["arrays"]
    assert settled == last
    assert found["grown"] < 64 << 20


def test_reloads_do_not_pile_up(qwen3: dict[str, Any]) -> None:
    check_memory(qwen3["reloads"], 10)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_fifty_reloads_do_not_pile_up(family: str) -> None:
    check_memory(report(family, 1, False, "reloads_50")["reloads_50"], 50)


def test_in_place_needs_no_more_device_memory_than_a_layer(qwen3: dict[str, Any]) -> None:
    memory = qwen3["device_memory"]
    assert memory["transient"] <= memory["largest_layer"] < memory["model"] / 2


def check_faults(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert found["answers"]
    assert found["version"] == "1"


def test_a_fault_leaves_the_previous_version(qwen3: dict[str, Any]) -> None:
    found = qwen3["faults_sampled"]
    check_faults(found)
    assert min(found["faults"].values()) >= 8


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3", "gpt-oss-hd64", "qwen3.5-moe", "deepseek3"])
def test_a_fault_at_any_place_leaves_the_previous_version(family: str) -> None:
    check_faults(report(family, 1, False, "faults")["faults"])


def check_in_flight(found: dict[str, Any]) -> None:
    assert found["async_scheduling"]
    for requests in ("preempt", "keep"):
        assert all([version for version, _ in spans] == ["10", "11"] for spans in found[requests]["spans"])
        assert all(sum(count for _, count in spans) == 24 for spans in found[requests]["spans"])
    assert found["drain"]["spans"] == [[["10", 24]]] * 3
    assert found["preempt"]["continues"] == found["drain"]["continues"] == [True] * 3
    assert found["cached"]["warm"] > 0
    assert found["cached"]["after_swap"] == 0


def test_every_token_is_of_the_version_it_names(qwen3: dict[str, Any]) -> None:
    check_in_flight(qwen3["in_flight"])


def test_swaps_from_another_thread_do_not_disturb(qwen3: dict[str, Any]) -> None:
    found = qwen3["concurrent"]
    assert found["errors"] == []
    assert found["swaps"] > 3
    assert found["stopped"]
    assert found["answers"] == [12] * 18


def test_the_engines_own_loader_is_used_where_there_is_one(qwen3: dict[str, Any]) -> None:
    found = qwen3["native"]
    assert found.pop("specs") == found.pop("tensors")
    assert found.pop("calls") == 6
    assert found.pop("double_fault") == found.pop("inplace_fault") == "SwapFailed"
    assert all(found.values())
