"""Values that nobody trained (NaN, infinity, beyond bfloat16) go through as they are, without numpy's own warnings."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from data_files import DATA, raw_tensors
from make_run import read_step, write_step

LEAF = "params.params.decoder.layers.mlp.wo.kernel"


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 on the bits: to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def test_flipped_bits_give_one_warning_a_tensor(tmp_path: Path) -> None:
    found = read_step(DATA / "qwen3" / "scanned" / "0")
    shape = found[LEAF].shape  # (inner, layers, hidden)
    bits = np.random.default_rng(7).integers(0, 1 << 32, shape, np.uint32)
    bits[0, :, :4] = [0x7F800001, 0xFFC12345, 0x7F800000, 0x7F7FFFFF]  # signalling NaN, NaN, infinity, the largest
    found[LEAF] = bits.view(np.float32)
    run = write_step(tmp_path / "run" / "0", found).parent
    code = "import sys; from mtx2vllm.converter.cli import main; main(sys.argv[1:])"
    arguments = [
        "convert",
        str(run),
        str(tmp_path / "out"),
        "--hf-config",
        str(DATA / "qwen3" / "hf"),
        "--layout",
        "hf",
    ]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeWarning" not in ended.stderr
    warnings = [line for line in ended.stderr.splitlines() if "arning" in line]
    assert len(warnings) == shape[1]
    assert all(line.startswith("warning: tensor model.layers.") and " NaN and " in line for line in warnings)
    written = raw_tensors(tmp_path / "out")
    for layer in range(shape[1]):
        dtype, _, data = written[f"model.layers.{layer}.mlp.down_proj.weight"]
        got = np.frombuffer(data, ml_dtypes.bfloat16)
        source = np.ascontiguousarray(bits[:, layer].T).view(np.float32).ravel()
        nan = np.isnan(source)
        assert dtype == "BF16" and nan.sum() > 10
        assert np.isnan(got[nan].astype(np.float32)).all()
        assert (got[~nan].view(np.uint16) == rounded(source[~nan]).view(np.uint16)).all()
