"""An exported directory in the engine, with nothing but the directory: `python -m engine.exported DIRECTORY OUT`.

The engine's sizes are those that a CPU can bear; of the model nothing is said but where it lies. deepseek3 is the
exception: tpu-inference demands data-parallel attention for latent attention, whoever wrote the directory.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from . import cpu_backend

LATENT = {"additional_config": {"sharding": {"sharding_strategy": {"enable_dp_attention": True}}}}


def main() -> None:
    directory, out = map(Path, sys.argv[1:])
    latent = "kv_lora_rank" in json.loads((directory / "config.json").read_text())
    more: dict[str, Any] = LATENT if latent else {}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if latent:
        os.environ["NEW_MODEL_DESIGN"] = "1"
    cpu_backend.set_environment(1)
    cpu_backend.install()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
    llm = LLM(str(directory), max_num_batched_tokens=64, max_num_seqs=4, **more)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    output = llm.generate(["Hello, world"], sampling, use_tqdm=False)[0]
    answer = output.outputs[0]
    report = {
        "prompt": list(output.prompt_token_ids), "tokens": list(answer.token_ids), "text": answer.text,
        "logprobs": [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)],
        "dtype": str(llm.model_config.dtype), "architecture": llm.model_config.architecture,
    }  # fmt: skip
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
