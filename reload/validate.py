"""`mtx2vllm validate VERSION`: does the engine that is installed here take this version, and does it say the same as one
that was started from the Hugging Face directory?

An engine is started with random weights, the version is pushed into it, and it generates. With `--against` a second
engine, with the same arguments, loads that directory, and state, tokens and log-probabilities are compared.
"""

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtx2vllm.converter.errors import DifferenceError, InputError, UsageError
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.converter.version.fetch import fetch_version
from mtx2vllm.converter.version.verify import load_manifest
from mtx2vllm.reload import accelerator
from mtx2vllm.reload.apply import LoadFailed, Report

TOKENS = 16  # generated
_PROMPT = (1, 2, 3)  # without --prompt and --token-ids; every vocabulary has these
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
_DIFFERENCE = {"invalid", "changed"}  # the bytes are not the manifest's
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """Against an engine that was started from a directory. `entries` are arrays on the device, without those that no
    text version brings; `logprob_difference` is the largest one, infinite where the likeliest tokens differ."""

    directory: str
    entries: int
    identical: int
    differing: tuple[str, ...]
    tokens_equal: bool
    logprob_difference: float
    left_out: int

    @property
    def ok(self) -> bool:
        """Whether nothing differs, to the last bit."""
        return self.identical == self.entries > 0 and self.tokens_equal and self.logprob_difference == 0.0


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found. Seconds: `start_seconds` until the engine ran, `seconds` of the push by phase and in all."""

    version: str
    layout: str
    family: str
    tensors: int
    nbytes: int
    mode: str
    seconds: dict[str, float]
    start_seconds: float
    untouched: tuple[str, ...]
    ignored: tuple[str, ...]
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    answer: str | None
    finite: bool
    comparison: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether the engine took the version, speaks, and (with `against`) is bit for bit the other one."""
        return self.finite and (self.comparison is None or self.comparison.ok)

    def to_json(self) -> dict[str, Any]:
        """What `validate --json` prints; an infinite difference is null."""
        found = {"ok": self.ok, **asdict(self)}
        if self.comparison is not None:
            difference = self.comparison.logprob_difference
            found["comparison"]["logprob_difference"] = difference if math.isfinite(difference) else None
            found["comparison"]["ok"] = self.comparison.ok
        return found

    def text(self) -> str:
        """For a person: one line a fact."""
        rate = self.nbytes / max(self.seconds["total"], 1e-9) / 1e9
        phases = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items() if name != "total")
        lines = [
            f"engine started with random weights in {self.start_seconds:.1f} s",
            f"{self.tensors} weights of {self.version} ({self.family}, {self.layout}) assigned in "
            f"{self.seconds['total']:.2f} s: {self.nbytes:,} bytes, {rate:.2f} GB/s ({self.mode}; {phases})",
        ]
        if self.untouched:
            lines.append(
                f"{len(self.untouched)} tensors of the engine are in no text version and stay: {_few(self.untouched)}"
            )
        if self.ignored:
            lines.append(
                f"{len(self.ignored)} tensors of the version have no place in the engine: {_few(self.ignored)}"
            )
        lines.append(f"tokens {list(self.prompt)} -> {list(self.tokens)}")
        if self.answer is not None:
            lines.append(f"text {self.answer!r}")
        if not self.finite:
            lines.append("DIFFERENCE: log-probabilities are not finite; the weights or the config are wrong")
        return "\n".join(lines + ([] if self.comparison is None else _verdict(self.comparison)))


def _verdict(found: Comparison) -> list[str]:
    mark = "equal" if found.ok else "DIFFERENCE"
    left_out = f", {found.left_out} left out that no text version brings" if found.left_out else ""
    lines = [
        f"{mark}: against an engine started from {found.directory}: {found.identical} of {found.entries} arrays identical"
        f"{left_out}, tokens {'equal' if found.tokens_equal else 'differ'}, largest difference of a log-probability "
        f"{found.logprob_difference:.3g}"
    ]
    if found.differing:
        lines.append(f"differing: {_few(found.differing)}")
    return lines


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def validate(
    version: str,
    engine_args: Sequence[str] = (),
    *,
    prompt: str | None = None,
    token_ids: str | Sequence[int] | None = None,
    against: str | None = None,
) -> Validation:
    """Try a version in the installed vLLM.

    Args:
        version: a directory with a manifest, local or gs://.
        engine_args: as for `vllm serve`, untouched.
        prompt: text to continue; `token_ids` instead: ids, or "1,2,3".
        against: a Hugging Face directory.

    Raises:
        InputError: it is no version, does not fit the engine, or there is no vLLM or no TPU here. Mtx2vllmError: the engine does not start.
        DifferenceError: its bytes are not its manifest's. UsageError: arguments that cannot be meant.
    """
    asked = _asked(prompt, token_ids)
    manifest, _ = load_manifest(version)
    _check_against(against)
    _check_tpu()
    from mtx2vllm.reload.engines import trial

    with _config_of(version) as model, trial.stdout_to_stderr():
        tokenizer = _has_tokenizer(model)
        if isinstance(asked, str) and not tokenizer and "--tokenizer" not in {w.partition("=")[0] for w in engine_args}:
            raise InputError(
                f"{version} has no tokenizer, so --prompt cannot be read: give --token-ids, or `-- --tokenizer DIR`"
            )
        engine = trial.start(model, "dummy", engine_args, tokenizer=tokenizer)
        try:
            report, untouched, seconds = _push(engine.llm, version)
            answer = engine.ask(asked, TOKENS)
            state = engine.state() if against is not None else {}
        finally:
            engine.close()
        comparison = None
        if against is not None:
            other = trial.start(against, "auto", engine_args, tokenizer=_has_tokenizer(against))
            try:
                comparison = _compare(
                    against, (state, answer), (other.state(), other.ask(answer.prompt, TOKENS)), untouched
                )
            finally:
                other.close()
    finite = all(math.isfinite(value) for step in answer.logprobs for value in step.values())
    return Validation(
        version, manifest.layout, manifest.family, report.tensors, report.nbytes, report.mode, seconds,
        engine.start_seconds, untouched, report.ignored, answer.prompt, answer.tokens, answer.text, finite, comparison,
    )  # fmt: skip


def _asked(prompt: str | None, token_ids: str | Sequence[int] | None) -> str | tuple[int, ...]:
    if prompt is not None and token_ids is not None:
        raise UsageError("--prompt and --token-ids both say what to continue; give one of them.")
    if prompt is not None:
        return prompt
    if token_ids is None:
        return _PROMPT
    words = token_ids.split(",") if isinstance(token_ids, str) else [str(i) for i in token_ids]
    if not words or not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise UsageError(f"--token-ids {token_ids!r} is no list of token ids such as 1,2,3.")
    return tuple(int(word) for word in words)


def _check_against(against: str | None) -> None:
    if against is None:
        return
    if not Path(against).is_dir():
        raise InputError(f"--against {against} is no local directory; it wants a Hugging Face model with its weights")
    if not any(Path(against).glob("*.safetensors")) and not any(Path(against).glob("*.bin")):
        raise InputError(
            f"--against {against} holds no Hugging Face weights (a canonical version has none); name the model's own directory"
        )


def _check_tpu() -> None:
    """An engine needs a minute to fail without one. Where vLLM is missing too, that is the first thing to say."""
    why = accelerator.missing(os.environ)
    if why is not None and find_spec("vllm") is not None:
        raise InputError(
            f"no TPU was found on this machine ({why}), and validate starts an engine: run it where the sampler runs "
            "(JAX_PLATFORMS=cpu is taken as meant, and goes on without one)"
        )


@contextlib.contextmanager
def _config_of(version: str) -> Iterator[str]:
    """A local directory with the version's config and tokenizer: vLLM reads no others."""
    store = store_for(version)
    if store.stat(join(version, "config.json")) is None:
        raise InputError(
            f"{version} holds no config.json, so no engine can be started for it; convert it again with --hf-config"
        )
    local = store.local(version)
    if local is not None:
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="mtx2vllm-") as folder:
        fetch_version(version, folder, config_only=True)
        yield folder


def _has_tokenizer(directory: str) -> bool:
    return any((Path(directory) / name).exists() for name in _TOKENIZERS)


def _push(llm: Any, version: str) -> tuple[Report, tuple[str, ...], dict[str, float]]:
    from mtx2vllm.reload.agent import load_version
    from mtx2vllm.reload.engines.tpu_inference import of_llm_engine

    begun = time.monotonic()
    engine = of_llm_engine(llm.llm_engine)
    try:
        report = load_version(engine, version)
    except LoadFailed as error:
        if error.reason in _DIFFERENCE:
            raise DifferenceError("\n".join(error.problems)) from None
        raise InputError(error.problems) from None
    seconds = {**report.seconds, "total": time.monotonic() - begun}
    return report, tuple(sorted(engine.untouched())), seconds


def _compare(directory: str, mine: tuple[Any, Any], theirs: tuple[Any, Any], untouched: Sequence[str]) -> Comparison:
    """(state, answer) of two engines. Arrays that come from `untouched` tensors are random in ours and left out."""
    (state, answer), (other_state, other_answer) = mine, theirs
    outside = {name.rpartition(".")[0] for name in untouched}  # the modules that they belong to

    def compared(names: set[str]) -> list[str]:
        return sorted(name for name in names if not any(f".{module}." in f".{name}" for module in outside))

    names = state.keys() | other_state.keys()
    kept = compared(names)
    differing = tuple(name for name in kept if state.get(name) != other_state.get(name))
    return Comparison(
        directory, len(kept), len(kept) - len(differing), differing, answer.tokens == other_answer.tokens,
        _largest_difference(answer.logprobs, other_answer.logprobs), len(names) - len(kept),
    )  # fmt: skip


def _largest_difference(mine: Sequence[dict[int, float]], theirs: Sequence[dict[int, float]]) -> float:
    if [step.keys() for step in mine] != [step.keys() for step in theirs]:
        return math.inf
    differences = [abs(a[i] - b[i]) for a, b in zip(mine, theirs, strict=True) for i in a]
    return max(differences, default=math.inf)
