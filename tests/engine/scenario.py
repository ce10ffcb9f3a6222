"""One engine process: start it with random weights, run named checks against it, print one JSON object.

    python -m engine.scenario FAMILY --tp N [--expert-parallel] --checks exact,faults OUT.json

The number of devices, and much of vLLM, is fixed for a process; so the tests start one for each family and TP, and
assert over what it reports. A check returns plain facts (counts, equalities), never a verdict.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .canonical import Tensors, canonical, other
from .start import greedy, runner_of, start
from .variants import directory

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(20, 60))]


@dataclass
class Session:
    """The engine under test, attached, and two sets of weights for it."""

    family: str
    arguments: dict[str, Any]
    llm: Any
    engine: Any
    a: Tensors
    b: Tensors

    def swap(self, weights: Any, version: int, **options: Any) -> Any:
        """One swap; doubled unless `options` says otherwise."""
        from mtx2vllm.reload.engine import Change

        return self.engine.swap(Change(version, weights, **options))

    def cold(self) -> Any:
        """A second engine, of the same settings, which loaded the Hugging Face directory itself."""
        return start(directory(self.family), family=self.family, **self.arguments)


Check = Callable[[Session], dict[str, Any]]


def open_session(family: str, tp: int, expert_parallel: bool, **more: Any) -> Session:
    """Start `family` with random weights and attach to it."""
    arguments = {"tp": tp, **({"enable_expert_parallel": True} if expert_parallel else {}), **more}
    llm = start(directory(family), family=family, **{"load_format": "dummy"} | arguments)
    from mtx2vllm.reload.engines.tpu_inference import of_llm_engine

    engine = of_llm_engine(llm.llm_engine)
    a = canonical(family)
    return Session(family, arguments, llm, engine, a, other(a))


def state_of(llm: Any) -> dict[str, tuple[Any, ...]]:
    """Every entry of the runner's state: dtype, shape, sharding, bytes."""
    import jax
    import numpy as np

    state = runner_of(llm).state
    return {
        k: (str(v.dtype), v.shape, str(v.sharding), np.asarray(jax.device_get(v)).tobytes()) for k, v in state.items()
    }


def generated(llm: Any) -> tuple[list[list[int]], list[Any]]:
    """(tokens, log-probabilities) of the prompts, greedy."""
    answers = greedy(llm, PROMPTS)
    return [tokens for tokens, _ in answers], [logprobs for _, logprobs in answers]


def main(given: list[str] | None = None) -> None:
    from . import checks, endurance

    known = vars(checks) | vars(endurance)
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--settings", default="{}", help="more engine arguments, JSON")
    parser.add_argument("--checks", default="exact")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(given)
    from mtx2vllm.reload.engines.layers import Unsupported

    try:
        session = open_session(options.family, options.tp, options.expert_parallel, **json.loads(options.settings))
        report = {name: known[name](session) for name in options.checks.split(",")}
    except Unsupported as error:
        report = {"unsupported": error.problems}
    options.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
