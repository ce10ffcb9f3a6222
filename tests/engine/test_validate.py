"""`mtx2vllm validate` with the real engine."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
from data_files import DATA

from engine.processes import TESTS
from engine.validations import ADDITIONAL
from mtx2vllm.converter.conversion import convert

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("validate")
    convert(str(DATA / "qwen3/scanned"), str(home / "qwen3"), hf_config=str(DATA / "qwen3/hf"))
    shutil.copytree(home / "qwen3", home / "misfit")
    config = json.loads((home / "misfit/config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (home / "misfit/config.json").write_text(json.dumps(config))
    out = home / "out.json"
    command = [sys.executable, "-m", "engine.validations", str(home), str(out)]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1500, check=False)
    assert out.exists(), run.stderr[-5000:]
    assert not run.stdout.strip()  # stdout is for the result
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_a_good_version_is_the_cold_engine_to_the_last_bit(found: dict[str, Any]) -> None:
    said = found["same"]["json"]
    assert said["ok"]
    assert said["tensors"] == len(json.loads((DATA / "qwen3/canonical_digests.json").read_text()))
    assert said["prompt"] == [5, 6, 7]
    assert len(said["tokens"]) == 16
    comparison = said["comparison"]
    assert comparison["identical"] == comparison["entries"] >= said["tensors"]
    assert comparison["tokens_equal"]
    assert comparison["logprob_difference"] == 0.0
    assert f"{said['tensors']} weights" in found["same"]["text"]
    assert "equal: against" in found["same"]["text"]


def test_other_weights_are_a_difference(found: dict[str, Any]) -> None:
    said = found["other"]["json"]
    assert not said["ok"]
    assert said["comparison"]["identical"] < said["comparison"]["entries"]
    assert any("embed_tokens" in name for name in said["comparison"]["differing"])
    assert said["comparison"]["logprob_difference"] != 0.0
    assert "DIFFERENCE: against" in found["other"]["text"]


def test_text_needs_a_tokenizer_and_takes_one(found: dict[str, Any]) -> None:
    said = found["prompt"]["json"]
    assert len(said["prompt"]) == 5
    assert isinstance(said["answer"], str)
    assert said["comparison"] is None


def test_engine_arguments_pass_through(found: dict[str, Any]) -> None:
    assert found["additional_config"] == ADDITIONAL
    assert found["argument"]["error"].startswith("UsageError: vLLM does not take these engine arguments: ")
    assert "--no-such-thing" in found["argument"]["error"]
    assert found["start"]["error"].startswith("Mtx2vllmError: the engine does not start on ")
    assert "max_num_seqs" in found["start"]["error"]


def test_a_version_of_another_model_is_refused_by_name(found: dict[str, Any]) -> None:
    assert found["misfit"]["error"].startswith("InputError: ")
    assert "tensors that the engine does not have: model.layers.2." in found["misfit"]["error"]
