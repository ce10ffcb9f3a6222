"""Canonical weights pushed into the real engine, against the same engine that loaded the Hugging Face directory."""

from typing import Any

import pytest

from engine.processes import report

pytestmark = pytest.mark.engine

# (family, TP, expert parallel, checks): a few in every run, chosen so that each kind of layer is in one of them.
EVERY_RUN = [
    ("qwen3", 4, False),  # tied, KV heads repeated
    ("qwen2.5", 1, False),  # biases
    ("gemma3", 1, False),  # sliding and full attention, inside a multimodal wrapper
    ("qwen3-moe", 4, True),  # experts over devices
    ("gpt-oss-hd64", 1, False),  # sinks, expert biases, interleaved experts
    ("deepseek3", 1, False),  # latent attention, score-correction bias, dense and expert layers
    ("qwen3.5-moe", 2, True),  # delta net, shared expert, experts over devices, inside a multimodal wrapper
]
FAMILIES = [
    "qwen3", "qwen3-untied", "llama3.1", "qwen2.5", "gemma2", "gemma3", "olmo3", "mixtral", "qwen3-moe", "qwen3-next",
    "qwen3.5-moe", "gpt-oss-hd64", "deepseek3", "llama4", "llama4-dense", "gemma4-pages", "gemma4-moe-pages",
]  # fmt: skip
WIDE = ["qwen3-next-wide", "qwen3.5-moe-wide"]  # variants with four linear key heads
EXPERTS = ["mixtral", "qwen3-moe", "qwen3-next", "qwen3.5-moe", "gpt-oss-hd64", "llama4-dense", *WIDE]
# The delta net's key heads must divide by TP, and the fixtures have two of them; olmo3: see README.md of this folder.
WIDEST = dict.fromkeys([*FAMILIES, *WIDE], 4) | {"qwen3-next": 2, "qwen3.5-moe": 2, "olmo3": 1}
MATRIX = [(f, tp, False) for f in FAMILIES for tp in sorted({1, WIDEST[f]})]
MATRIX += [(f, 4, False) for f in WIDE] + [(f, WIDEST[f], True) for f in EXPERTS]

ENGINES_OWN = {"_k_scale", "_v_scale", "_q_scale", "_prob_scale", "cos_sin_cache", "normalizer", "root_size"}
# tpu-inference divides by the largest float where the KV cache is not quantized, and the quotient is flushed to zero: a
# cold start has the same zeros. The state's comparison covers W_UK_T and W_UV; the log-probabilities do NOT depend on them.
ZERO_SCALES = {"deepseek3": {"W_UK_T_scale", "W_UV_scale"}}


def check_exact(family: str, found: dict[str, Any]) -> None:
    exact = found["exact"]
    assert exact["specs"] == exact["canonical"] == exact["plan"]
    assert exact["differing"] == []
    assert exact["identical"] == exact["entries"]
    assert exact["tokens_equal"]
    assert exact["logprobs_equal"]
    # Random weights were there before: what the swap left alone belongs to the engine, and the answers say something.
    kept = {name.rpartition(".")[2] for name in exact["unchanged_by_swap"] if not name.endswith("_inv_freq")}
    assert kept <= ENGINES_OWN | ZERO_SCALES.get(family, set())
    assert exact["distinct_tokens"] > 2


@pytest.mark.parametrize(("family", "tp", "expert_parallel"), EVERY_RUN)
def test_a_reload_is_what_a_cold_start_is(family: str, tp: int, expert_parallel: bool) -> None:
    check_exact(family, report(family, tp, expert_parallel, "exact"))


@pytest.mark.soak
@pytest.mark.parametrize(("family", "tp", "expert_parallel"), MATRIX)
def test_a_reload_is_what_a_cold_start_is_in_every_family(family: str, tp: int, expert_parallel: bool) -> None:
    check_exact(family, report(family, tp, expert_parallel, "exact"))
