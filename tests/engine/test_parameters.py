"""The converter's plan against vLLM's own models, live: names, shapes and types of every canonical tensor."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.canonical import DATA
from engine.processes import TESTS
from mtx2vllm.converter.job import plan

pytestmark = pytest.mark.engine

# Experts first, deepseek3 last: see `parameters`.
FAMILIES = [
    "qwen3-moe", "mixtral", "qwen3-next", "qwen3-next-gdn", "qwen3.5-moe", "qwen3.5-moe-gdn", "gpt-oss", "gpt-oss-hd64",
    "gemma4-moe", "llama4", "llama4-dense", "qwen3", "qwen3-untied", "llama2", "llama3", "llama3.1", "llama3.3",
    "mistral", "qwen2.5", "gemma2", "gemma2-27b", "gemma3", "gemma4", "olmo3", "deepseek3",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("models") / "parameters.json"
    command = [sys.executable, "-m", "engine.parameters", str(out), *FAMILIES]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert out.exists(), run.stderr[-5000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_what_vllm_holds(models: dict[str, Any], family: str) -> None:
    planned = plan(str(DATA / family / "hf"), layout="canonical").tensors
    assert {tensor.name: [list(tensor.shape), tensor.dtype] for tensor in planned} == models[family]


def test_every_family_with_a_dump_is_looked_at() -> None:
    assert {names.parent.name for names in Path(DATA).glob("*/vllm_names.json")} <= set(FAMILIES)
