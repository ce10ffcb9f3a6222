"""What validate refuses before any engine is started, and how it speaks."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from data_files import DATA

from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError, NotCommitted, UsageError
from mtx2vllm.reload import accelerator
from mtx2vllm.reload import validate as module
from mtx2vllm.reload.engines import trial
from mtx2vllm.reload.validate import Comparison, Validation, _compare, validate


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("validate") / "version"
    convert(str(DATA / "qwen3/scanned"), str(out), hf_config=str(DATA / "qwen3/hf"))
    return out


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (trial, module):
        monkeypatch.setattr(place, "find_spec", lambda _: None)


def test_without_vllm(version: Path) -> None:
    with pytest.raises(InputError, match="vLLM is not installed here"):
        validate(str(version))


def test_without_a_tpu_no_engine_is_started(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **options: Any) -> None:
        raise AssertionError("an engine was to start")

    monkeypatch.setattr(module, "find_spec", lambda _: True)
    monkeypatch.setattr(trial, "start", start)
    monkeypatch.setattr(accelerator, "devices", list)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(
        InputError, match=r"no TPU was found .*/dev/vfio/\* is there\), and validate starts an engine"
    ) as found:
        validate(str(version))
    assert found.value.exit_status == 3
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(AssertionError, match="an engine was to start"):
        validate(str(version))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "a", "token_ids": "1"}, "give one of them"),
        ({"token_ids": "1,x"}, "no list of token ids"),
        ({"token_ids": ""}, "no list of token ids"),
        ({"token_ids": "-1"}, "no list of token ids"),
    ],
)
def test_arguments_that_cannot_be_meant(version: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate(str(version), **options)  # type: ignore[arg-type]


def test_no_version(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted):
        validate(str(tmp_path))


def test_text_for_a_version_without_tokenizer(version: Path) -> None:
    with pytest.raises(InputError, match="has no tokenizer, so --prompt cannot be read"):
        validate(str(version), prompt="Hello")


def test_a_version_without_config(version: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(version, bare)
    (bare / "config.json").unlink()
    with pytest.raises(InputError, match="holds no config"):
        validate(str(bare))


def test_against_needs_weights(version: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no local directory"):
        validate(str(version), against=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="holds no Hugging Face weights"):
        validate(str(version), against=str(version))


@pytest.mark.parametrize("word", ["--model", "--load-format=auto", "--load_format"])
def test_what_validate_chooses_itself(word: str) -> None:
    with pytest.raises(UsageError, match="validate chooses model and weights"):
        trial._parse("model", "dummy", [word, "x"], tokenizer=True)


class _Answer:
    def __init__(self, tokens: tuple[int, ...], *logprobs: dict[int, float]) -> None:
        self.tokens, self.logprobs = tokens, logprobs


def test_a_comparison_counts_what_differs_and_leaves_out_what_no_version_brings() -> None:
    mine = {"p.model.a": (1,), "p.model.b": (2,), "p.vision.tower.w": (3,)}
    theirs = {"p.model.a": (1,), "p.model.b": (9,), "p.vision.tower.w": (4,)}
    answers = _Answer((1, 2), {1: -0.5, 7: -1.0}), _Answer((1, 2), {1: -0.5, 7: -1.25})
    found = _compare("hf", (mine, answers[0]), (theirs, answers[1]), ["vision.tower.w"])
    assert found == Comparison("hf", 2, 1, ("p.model.b",), True, 0.25, 1)
    assert not found.ok
    same = _compare("hf", (mine, answers[0]), (mine, answers[0]), [])
    assert same.ok
    assert math.isinf(
        _compare("hf", (mine, answers[0]), (mine, _Answer((1, 2), {1: -0.5, 8: -1.0})), []).logprob_difference
    )
    assert not _compare("hf", ({}, answers[0]), ({}, answers[0]), []).ok  # nothing compared is nothing shown


def validation(**changes: Any) -> Validation:
    facts: dict[str, Any] = {
        "version": "V", "layout": "canonical", "family": "qwen3", "tensors": 3, "nbytes": 10**9, "mode": "double",
        "seconds": {"stage": 1.5, "total": 2.0}, "start_seconds": 9.0, "untouched": (), "ignored": (), "prompt": (1,),
        "tokens": (2, 3), "answer": None, "finite": True, "comparison": None,
    }  # fmt: skip
    return Validation(**facts | changes)


def test_words() -> None:
    text = validation().text()
    assert "3 weights of V (qwen3, canonical) assigned in 2.00 s: 1,000,000,000 bytes, 0.50 GB/s" in text
    assert "tokens [1] -> [2, 3]" in text
    assert (
        "6 tensors of the engine are in no text version and stay: a, b, c, d, e and 1 more"
        in validation(untouched=("a", "b", "c", "d", "e", "f")).text()
    )
    assert not validation(finite=False).ok
    assert "not finite" in validation(finite=False).text()
    differing = validation(comparison=Comparison("hf", 2, 1, ("x",), False, math.inf, 0))
    assert differing.to_json()["comparison"]["logprob_difference"] is None
    assert differing.to_json()["ok"] is False
