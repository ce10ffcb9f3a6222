"""`convert --layout hf`, then `vllm serve` on the directory: no further flag, and what transformers computes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_files import DATA

from engine.processes import TESTS
from mtx2vllm.converter.conversion import convert

pytestmark = pytest.mark.engine

FAMILIES = [
    "deepseek3", "gemma2", "gemma3", "gpt-oss-hd64", "llama2", "llama3", "llama3.1", "llama3.3", "mistral", "mixtral", "olmo3",
    "qwen2.5", "qwen3", "qwen3-moe", "qwen3-next", "qwen3-untied", "qwen3.5-moe",
]  # fmt: skip
# The engine's bf16 against fp32: 0.004 to 0.08 were seen. A wrong position or scale is 0.5 away or more.
TOLERANCE = 0.15
# Latent attention on a CPU adds nothing (README.md of this folder, "What is not shown here"), whoever wrote the
# directory: what the engine makes of the original is compared instead, to the bit.
ENGINE_DIFFERS = {"deepseek3"}


def exported(family: str, home: Path) -> Path:
    """A directory written from the checkpoint, the original's config, and a tokenizer beside it."""
    source, out = home / "source", home / "out"
    source.mkdir()
    for file in (DATA / family / "hf/config.json", *(DATA / "tokenizer").iterdir()):
        shutil.copyfile(file, source / file.name)
    scan = "scanned" if (DATA / family / "scanned").is_dir() else "unscanned"
    convert(str(DATA / family / scan), str(out), hf_config=str(source), layout="hf")
    return out


def served(directory: Path, home: Path) -> dict[str, Any]:
    out = home / "report.json"
    command = [sys.executable, "-m", "engine.exported", str(directory), str(out)]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1500, check=False)
    assert out.exists(), run.stderr[-5000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def of_transformers(directory: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    """The log-probability that transformers gives each token, in fp32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad():
        steps = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].log_softmax(-1)
    return [steps[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens)]


def check(family: str, home: Path) -> None:
    directory = exported(family, home)
    found = served(directory, home)
    assert found["architecture"] == json.loads((directory / "config.json").read_text())["architectures"][0]
    assert found["dtype"] == "torch.bfloat16"
    assert found["text"]
    if family in ENGINE_DIFFERS:
        original = home / "original"
        shutil.copytree(home / "source", original)
        shutil.copyfile(DATA / family / "hf/model.safetensors", original / "model.safetensors")
        assert served(original, home / "original") == found
        return
    expected = of_transformers(directory, found["prompt"], found["tokens"])
    assert max(abs(a - b) for a, b in zip(found["logprobs"], expected, strict=True)) < TOLERANCE


def test_a_text_model_taken_out_of_its_wrapper_is_served(tmp_path: Path) -> None:
    check("qwen3.5-moe", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)
