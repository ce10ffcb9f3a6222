"""Engines that cannot take canonical weights say so in a sentence, before anything is attached to them."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.processes import report
from mtx2vllm.reload.agent import engine_of
from mtx2vllm.reload.engines.layers import Unsupported
from mtx2vllm.reload.engines.tpu_inference import TpuInference

pytestmark = pytest.mark.engine


def core(*, model: Any = "torchax", worker: bool = True, ranks: int = 1, rank: int = 0, **config: Any) -> Any:
    """A core that has what is looked at."""
    inner = SimpleNamespace(vllm_model=SimpleNamespace(named_parameters=list)) if model == "torchax" else object()
    settings = SimpleNamespace(**{"speculative_config": None, "lora_config": None} | config)
    runner = SimpleNamespace(model=SimpleNamespace(model=inner), vllm_config=settings)
    driver = SimpleNamespace(worker=SimpleNamespace(model_runner=runner)) if worker else None
    parallel = SimpleNamespace(data_parallel_size=ranks, data_parallel_index=rank)
    return SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=driver), vllm_config=SimpleNamespace(parallel_config=parallel)
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"worker": False}, "workers in other processes"),
        ({"model": "flax"}, "MODEL_IMPL_TYPE=vllm"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "without --enable-lora"),
        ({"ranks": 2}, "TPU_MULTIPROCESS_DP=0"),
        ({"rank": 1}, "TPU_MULTIPROCESS_DP=0"),
    ],
)
def test_what_stands_in_the_way_is_named(made: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        TpuInference(core(**made))
    assert len(caught.value.problems) == 1 and "\n" not in caught.value.problems[0]


LLM = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object()))


@pytest.mark.parametrize(
    "given",
    [LLM, LLM.llm_engine, SimpleNamespace(llm=LLM, _driver=None), SimpleNamespace(llm=None, _driver=LLM)],
    ids=["LLM", "LLMEngine", "Tunix's sampler", "Tunix's sampler in server mode"],
)
def test_an_engine_in_another_process_is_not_reached_from_here(given: Any) -> None:
    with pytest.raises(Unsupported, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        engine_of(given)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("qwen3-fp8", '{"load_format": "auto"}', "unquantized engines only"),
        ("qwen3", '{"enable_lora": true}', "without --enable-lora"),
    ],
)
def test_a_real_engine_with_other_layers_is_refused(model: str, settings: str, words: str) -> None:
    problems = report(model, 1, False, "exact", settings)["unsupported"]
    assert problems and all(words in problem for problem in problems)
