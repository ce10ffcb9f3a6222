"""What production runs with, all at once: prefix caching, chunked prefill, asynchronous scheduling, attention over
data-parallel ranks; and data parallelism in one engine core, where a swap is one for all ranks."""

import json
from typing import Any

import pytest

from engine.processes import report
from engine.test_exactness import check_exact

pytestmark = pytest.mark.engine

SETTINGS = {
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 32,  # less than a prompt, so that it comes in chunks
    "async_scheduling": True,
    "additional_config": {"sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 2}}},
}


@pytest.fixture(scope="module")
def production() -> dict[str, Any]:
    return report("qwen3.5-moe", 2, False, "exact,in_flight", json.dumps(SETTINGS))


def test_a_reload_is_exact_with_production_settings(production: dict[str, Any]) -> None:
    check_exact("qwen3.5-moe", production)


def test_requests_in_flight_with_production_settings(production: dict[str, Any]) -> None:
    found = production["in_flight"]
    assert all([version for version, _ in spans] == ["10", "11"] for spans in found["preempt"]["spans"])
    assert found["drain"]["spans"] == [[["10", 24]]] * 3
    assert found["preempt"]["continues"] == found["drain"]["continues"] == [True] * 3
    assert found["cached"]["after_swap"] == 0
    # The ranks' schedulers are processes of their own, whose blocks cannot be reached.
    assert "use preempt or drain" in found["keep_refused"]


def test_data_parallel_ranks_in_one_core_are_swapped_together() -> None:
    check_exact("qwen3", report("qwen3", 2, False, "exact", '{"data_parallel_size": 2, "tensor_parallel_size": 1}'))
