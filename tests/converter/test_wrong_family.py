"""The config of another family: what the checkpoint looks like comes first, not a line a leaf."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from data_files import DATA
from make_run import read_step, write_step

from mtx2vllm.converter.cli import main


def errors(checkpoint: Path, config: str, out: Path, *options: str) -> list[str]:
    arguments = ["convert", str(checkpoint), str(out), "--hf-config", str(DATA / config / "hf"), *options]
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 3, answer.output
    assert not out.exists()
    return [line.removeprefix("error: ") for line in answer.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("checkpoint", "looks", "config", "says"),
    [
        ("qwen3", "qwen3", "gemma2", "gemma2"),
        ("qwen3", "qwen3", "qwen2.5", "qwen2"),
        ("qwen3", "qwen3", "llama3.1", "llama"),
        ("qwen3-moe", "qwen3_moe", "qwen3", "qwen3"),
        ("qwen2.5", "qwen2", "qwen3", "qwen3"),
        ("llama3.1", "llama", "qwen3", "qwen3"),
        ("gemma2", "gemma2", "qwen3", "qwen3"),
        ("gemma3", "gemma3", "gemma2", "gemma2"),
        ("gemma4", "gemma4", "gemma3", "gemma3"),
        ("deepseek3", "deepseek_v3", "mixtral", "mixtral"),
        ("qwen3-next", "qwen3_5_moe or qwen3_next", "qwen3-moe", "qwen3_moe"),
        ("gpt-oss", "gpt_oss", "mixtral", "mixtral"),
    ],
)
def test_the_families_are_named_first(checkpoint: str, looks: str, config: str, says: str, tmp_path: Path) -> None:
    scan = "scanned" if (DATA / checkpoint / "scanned").is_dir() else "unscanned"
    said = errors(DATA / checkpoint / scan, config, tmp_path / "out")
    assert said[0] == (
        f"the checkpoint looks like {looks} by its keys and shapes, but config.json says {says}; pass the config of the "
        "model that was trained with --hf-config"
    )
    assert len(said) == 2


def test_the_rest_is_counted(tmp_path: Path) -> None:
    """Of MaxText's qwen3 tree, gemma2's table knows the embedding and the last norm; its own layers are two a block."""
    said = errors(DATA / "qwen3" / "scanned", "gemma2", tmp_path / "out")
    keys = {key for key in read_step(DATA / "qwen3" / "scanned" / "0") if ".decoder.layers." in key}
    assert said[1].endswith(f" {len(keys)} are unknown")


def test_vision_weights_do_not_hide_the_family(tmp_path: Path) -> None:
    found = read_step(DATA / "qwen3" / "scanned" / "0")
    found["params.params.vision_encoder.patch.kernel"] = np.zeros((2, 2), np.float32)
    run = write_step(tmp_path / "run" / "0", found).parent
    assert errors(run, "gemma2", tmp_path / "out")[0].startswith("the checkpoint looks like qwen3 by its keys")


def test_a_misfit_of_the_right_family_is_told_leaf_by_leaf(tmp_path: Path) -> None:
    found = read_step(DATA / "qwen3" / "scanned" / "0")
    del found["params.params.decoder.decoder_norm.scale"]
    found["params.params.decoder.layers.mlp.extra.kernel"] = np.zeros((2, 3), np.float32)
    found["params.params.decoder.layers.mlp.wo.kernel"] = np.zeros((2, 3, 2), np.float32)
    said = errors(write_step(tmp_path / "run" / "0", found).parent, "qwen3", tmp_path / "out")
    assert len(said) >= 4
    assert not any("looks like" in line for line in said)
    for words in (
        "decoder_norm.scale is missing",
        "mlp.extra.kernel [2, 3] is not known",
        "axis ffn is 2 in the checkpoint and 96 by config.json",
    ):
        assert any(words in line for line in said), words
