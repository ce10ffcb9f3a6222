"""Function, not names: MaxText's own logits (stored beside each checkpoint, computed in float32) against transformers'
on the converted result. The rotary convention is what bits cannot show."""

import os
from pathlib import Path

import numpy as np
import pytest
from data_files import DATA
from numpy.typing import NDArray

from mtx2vllm.converter.conversion import convert

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RIGHT, WRONG = 1e-5, 1e-2  # relative root mean square; measured: right about 4e-7, wrong about 9e-2


def _distance(family: str, out: Path, rope: str | None = None, config: str = "hf", file: str = "logits") -> float:
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = next(p for name in ("scanned", "unscanned") if (p := DATA / family / name).is_dir())
    convert(str(checkpoint), str(out), hf_config=str(DATA / family / config), layout="hf", dtype="float32", rope=rope)
    stored = np.load(DATA / family / f"{file}.npz")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor(stored["tokens"], dtype=torch.long)).logits.numpy()
    expected = stored["logits"][..., : logits.shape[-1]]
    return float(np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2)))


FAMILIES = sorted(p.parent.name for p in DATA.glob("*/logits.npz"))


def test_the_traps_are_all_there() -> None:
    assert {"llama2", "llama3", "mistral", "llama4"} <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_maxtexts_logits_come_back(family: str, tmp_path: Path) -> None:
    assert _distance(family, tmp_path) < RIGHT


def test_one_checkpoint_in_the_other_convention(tmp_path: Path) -> None:
    """MaxText with rope_type=llama3.1 reads the same llama3.3 weights as interleaved, and scales the frequencies."""
    config, file = "hf_rope_llama3.1", "logits_rope_llama3.1"
    assert _distance("llama3.3", tmp_path / "1", None, config, file) < RIGHT  # the default for rope_type llama3
    assert _distance("llama3.3", tmp_path / "2", "half", config, file) > WRONG


@pytest.mark.parametrize("family", ["llama2", "mistral"])
def test_the_other_rotary_convention_is_another_function(family: str, tmp_path: Path) -> None:
    assert _distance(family, tmp_path, "interleaved") > WRONG
