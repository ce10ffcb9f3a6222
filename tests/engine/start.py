"""Start a real engine on the CPU, small and quick. One engine, and one number of virtual devices, a process."""

import os
from pathlib import Path
from typing import Any

from . import cpu_backend

# What families need beyond their config.json; the reasons are in README.md of this folder.
FAMILY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma3": {"language_model_only": True},
    "llama4": {"language_model_only": True},
    "gemma4": {"language_model_only": True},
    "gemma4-moe": {"language_model_only": True},
    "gemma4-pages": {"language_model_only": True},
    "gemma4-moe-pages": {"language_model_only": True},
    "qwen3.5-moe": {"language_model_only": True},
    "qwen3.5-moe-gdn": {"language_model_only": True},
    "qwen3.5-moe-wide": {"language_model_only": True},
    "deepseek3": {
        "hf_overrides": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        "additional_config": {"sharding": {"sharding_strategy": {"enable_dp_attention": True}}},
    },
}


def start(model: str | Path, *, family: str = "", tp: int = 1, load_format: str = "auto", **arguments: Any) -> Any:
    """A `vllm.LLM` of `model` in this process over `tp` virtual devices, without a tokenizer.

    `arguments` go to LLM and win over the defaults here.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    chosen = FAMILY_ARGUMENTS.get(family, {}) | arguments
    if chosen.get("additional_config"):
        os.environ["NEW_MODEL_DESIGN"] = "1"  # which attention data parallelism demands
    cpu_backend.set_environment(tp)
    cpu_backend.install()
    from vllm import LLM
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # saves a start of Python for each new architecture
    defaults = {
        "tensor_parallel_size": tp,
        "load_format": load_format,
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    return LLM(str(model), **defaults | chosen)


def runner_of(llm: Any) -> Any:
    """The TPU model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def greedy(llm: Any, prompts: list[list[int]], tokens: int = 12) -> list[tuple[list[int], list[dict[int, float]]]]:
    """For each prompt: the greedy tokens, and each step's log-probabilities of the top tokens by id."""
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=4, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
    return [
        (
            list(out.outputs[0].token_ids),
            [{token: entry.logprob for token, entry in step.items()} for step in out.outputs[0].logprobs],
        )
        for out in outputs
    ]
