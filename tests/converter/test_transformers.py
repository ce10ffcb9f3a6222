"""The hf layout is loaded by transformers itself, and computes the original's logits."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from data_files import DATA

from mtx2vllm.converter.conversion import convert

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Families with MaxText's own logits are compared with those: test_logits.
FAMILIES = sorted(
    p.parent.parent.name for p in DATA.glob("*/hf/config.json") if not (p.parents[1] / "logits.npz").exists()
)
# A scale was folded into bf16 on the way in, so the last bit of some weights (up to 15 % of a tensor) is gone for good:
# relative rms of the logits. A wrong rotary convention or scale would be 9e-2 or more. Where a router's choice tips, the
# difference is larger.
LOST = {"llama3.1": 8e-3, "mixtral": 8e-3, "gemma2": 8e-3, "gemma3": 8e-3, "gemma4": 1.5e-2, "gemma4-moe": 5e-2}
TOKENS = [[1, 17, 200, 3, 99, 54, 255, 0, 42, 7, 128, 64]]


def loaded(directory: Path, auto: Any) -> Any:
    """A model in float32, and what transformers found missing or left over (nothing, for a right conversion)."""
    model, info = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, local_files_only=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def text_logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor(TOKENS), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_originals(family: str, tmp_path: Path) -> None:
    source = DATA / family
    scan = "scanned" if (source / "scanned").is_dir() else "unscanned"
    out = tmp_path / "out"
    convert(str(source / scan), str(out), hf_config=str(source / "hf"), layout="hf")
    config = transformers.AutoConfig.from_pretrained(out, local_files_only=True)
    assert "text_config" not in config.to_dict()
    written = json.loads((out / "config.json").read_text())
    assert written["architectures"] == [config.architectures[0]]
    assert written["architectures"][0].endswith("ForCausalLM")
    wrapped = "text_config" in json.loads((source / "hf/config.json").read_text())
    original = loaded(
        source / "hf", transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    )
    mine = loaded(out, transformers.AutoModelForCausalLM)
    assert type(mine).__name__ == written["architectures"][0]
    expected, got = text_logits(original), text_logits(mine)
    assert expected.shape == got.shape
    relative = ((expected - got).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()).item()
    assert relative <= LOST.get(family, 0.0)
