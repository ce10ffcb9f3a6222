"""Cold engines, one for each set of weights, that answer what a server was asked: `python -m engine.cold ASKED OUT`.

They load what others wrote (the original model, MaxText's export) with vLLM's own loader: nothing of this project's takes
part in their answers.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from .serving import ENGINE, ORIGINS
from .start import greedy, start


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    questions = asked["questions"]
    answers: list[Any] = [None] * len(questions)
    for content, origin in ORIGINS.items():
        mine = [i for i, question in enumerate(questions) if question["content"] == content]
        if not mine:
            continue
        llm = start(origin, enable_prefix_caching=False, **ENGINE)
        for i in mine:
            tokens, logprobs = greedy(llm, [questions[i]["before"]], questions[i]["tokens"])[0]
            answers[i] = {"tokens": tokens, "logprobs": logprobs}
    report = {"answers": answers}
    if "version" in asked:
        report["started_from"] = _started_from(asked["version"], asked["root"], asked["prompt"])
    Path(sys.argv[2]).write_text(json.dumps(report))


def _started_from(version: str, root: str, prompt: list[int]) -> dict[str, Any]:
    """An engine that `--load-format mtx2vllm` starts from a version, with the plugin's agent on a root."""
    os.environ["MTX2VLLM_WATCH"] = root
    from mtx2vllm.reload import plugin

    plugin._registered.clear()  # the engines before this one followed nothing
    plugin.register()
    llm = start(version, load_format="mtx2vllm", enable_prefix_caching=False, **ENGINE)
    agent = llm.llm_engine.engine_core.mtx2vllm_agent
    status = agent.status()
    tokens, logprobs = greedy(llm, [prompt], 8)[0]
    agent.stop()
    return {
        "ready": status.ready, "loaded": status.loaded, "reloads": agent.status().reloads, "tokens": tokens,
        "logprobs": logprobs, "weight_version": llm.llm_engine.get_weight_version(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
