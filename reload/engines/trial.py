"""A vLLM engine of this process for one trial: started, filled, asked, and taken down again."""

import contextlib
import gc
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mtx2vllm.converter.errors import InputError, Mtx2vllmError, UsageError
from mtx2vllm.reload import accelerator
from mtx2vllm.reload.settings import PREFIX

_OURS = ("--model", "--load-format")
_WITHOUT_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine has to be in reach
_WATCH = PREFIX + "WATCH"

Entry = tuple[str, tuple[int, ...], str, str]  # dtype, shape, sharding, SHA-256 of the bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy generation: ids in, ids out, each token's log-probability with those of the likeliest, and the text."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    text: str | None


class Trial:
    """A running engine. `close` gives the device's memory back."""

    def __init__(self, llm: Any, seconds: float) -> None:
        self.llm, self.start_seconds = llm, seconds
        self.runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def state(self) -> dict[str, Entry]:
        """Every array on the device."""
        import jax
        import numpy as np

        found: dict[str, Entry] = {}
        for name, array in self.runner.state.items():
            data = np.ascontiguousarray(jax.device_get(array)).reshape(-1).view(np.uint8)
            digest = hashlib.sha256(data.data).hexdigest()
            found[name] = (str(array.dtype), tuple(array.shape), str(array.sharding), digest)
        return found

    def ask(self, prompt: str | Sequence[int], tokens: int) -> Answer:
        """Continue a text or token ids greedily by so many tokens.

        Raises:
            InputError: the engine does not take the prompt.
        """
        from vllm import SamplingParams, TokensPrompt

        spoken = isinstance(prompt, str)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=4, ignore_eos=True, detokenize=spoken)
        given: Any = prompt if spoken else TokensPrompt(prompt_token_ids=list(prompt))
        try:
            output = self.llm.generate([given], sampling, use_tqdm=False)[0]
        except Exception as error:
            raise InputError(f"the engine does not answer this prompt: {_first_line(error)}") from error
        answer = output.outputs[0]
        logprobs = tuple({int(i): float(entry.logprob) for i, entry in step.items()} for step in answer.logprobs)
        return Answer(
            tuple(output.prompt_token_ids), tuple(answer.token_ids), logprobs, answer.text if spoken else None
        )

    def close(self) -> None:
        """End the engine. Its arrays are deleted one by one: another engine may need their room at once."""
        import jax

        arrays = [*self.runner.state.values(), *jax.tree.leaves(getattr(self.runner, "kv_caches", []))]
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        for array in arrays:
            if isinstance(array, jax.Array):
                array.delete()
        self.llm = self.runner = None
        gc.collect()


def start(model: str, load_format: str, engine_args: Sequence[str], *, tokenizer: bool) -> Trial:
    """Start the installed vLLM on `model`.

    Args:
        model: a directory with a config.json.
        load_format: vLLM's name of how weights are loaded.
        engine_args: as for `vllm serve`, untouched.
        tokenizer: whether the model has one; without one the engine is started without.

    Raises:
        InputError: vLLM is not installed. UsageError: vLLM does not know an argument. Mtx2vllmError: the engine does not
            start, which says nothing against the version.
    """
    if find_spec("vllm") is None:
        raise InputError(
            "vLLM is not installed here, and validate runs it; run this where the sampler runs, or install "
            "mtx2vllm[engine] (Python 3.12, Linux x86-64)"
        )
    begun = time.monotonic()
    with _environment():
        arguments = _parse(model, load_format, engine_args, tokenizer=tokenizer)
        try:
            from vllm import LLM

            llm = LLM.from_engine_args(arguments)
        except Exception as error:
            raise Mtx2vllmError(_not_started(model, error)) from error
    return Trial(llm, time.monotonic() - begun)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Whatever is printed in here goes to stderr, what C++ prints included."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The engine in this process, and no agent of the plugin's in it."""
    before = {name: os.environ.get(name) for name in (*_WITHOUT_PROCESS, _WATCH)}
    os.environ.update(_WITHOUT_PROCESS)
    os.environ.pop(_WATCH, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _parse(model: str, load_format: str, engine_args: Sequence[str], *, tokenizer: bool) -> Any:
    given = {word.partition("=")[0].replace("_", "-") for word in engine_args if word.startswith("--")}
    if taken := sorted(given & set(_OURS)):
        raise UsageError(f"{' and '.join(taken)} cannot be given to the engine: validate chooses model and weights.")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm", add_help=False))

    def refuse(message: str) -> None:
        raise UsageError(f"vLLM does not take these engine arguments: {message}")

    parser.error = refuse
    words = ["--model", model, "--load-format", load_format, *engine_args]
    if not tokenizer and not given & {"--tokenizer", "--skip-tokenizer-init"}:
        words.append("--skip-tokenizer-init")
    return EngineArgs.from_cli_args(parser.parse_args(words))


def _not_started(model: str, error: Exception) -> str:
    why = accelerator.missing(os.environ)
    head = f"no TPU was found on this machine ({why}), and " if why else ""
    return f"{head}the engine does not start on {model}: {_first_line(error)} (engine arguments go behind --)"


def _first_line(error: Exception) -> str:
    """The heart of what vLLM says: one line, or of a pydantic error the field and what is wrong with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and "validation error" in lines[0]:
        lines = [f"{lines[1]}: {lines[2].partition(' [type=')[0]}"]
    return f"{type(error).__name__}: {lines[0]}" if lines else f"{type(error).__name__} in {_module(error)}"


def _module(error: Exception) -> str:
    """Where an exception without words was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "unknown code")) if frames else "unknown code"
