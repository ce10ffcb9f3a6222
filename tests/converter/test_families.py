"""Every family's real checkpoint, in both layouts, against what others hold: the original that transformers saved,
MaxText's own export, and vLLM's own parameters after loading. Bits, not tolerances."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from data_files import DATA, arrays, digests, folded, is_text, oracle, raw_tensors

from mtx2vllm.converter.conversion import convert

CASES = sorted(
    (family.name, scan)
    for family in DATA.iterdir()
    if (family / "canonical_digests.json").exists()
    for scan in ("scanned", "unscanned")
    if (family / scan).is_dir()
)
# Saved in bf16 after MaxText's own arithmetic: these bits are gone, and MaxText's export is the oracle; where it has
# none, its logits are (test_logits).
LOST = {
    "llama2": ("self_attn.q_proj.weight",),
    "llama3": ("self_attn.q_proj.weight",),
    "llama3.3": ("self_attn.q_proj.weight",),
    "mistral": ("self_attn.q_proj.weight",),
    "gemma2-27b": ("self_attn.q_proj.weight", "model.embed_tokens.weight"),
    "llama3.1": ("self_attn.q_proj.weight",),
    "mixtral": ("self_attn.q_proj.weight",),
    "gemma2": ("self_attn.q_proj.weight", "model.embed_tokens.weight"),
    "gemma3": ("model.embed_tokens.weight",),
    "gemma4": ("model.embed_tokens.weight",),
    "gemma4-moe": ("model.embed_tokens.weight",),
}
EXPECTED_FAMILIES = 16


def test_the_fixtures_are_all_there() -> None:
    assert len({family for family, _ in CASES}) >= EXPECTED_FAMILIES
    assert {"qwen3", "deepseek3", "gpt-oss"} <= {family for family, scan in CASES if scan == "unscanned"}


def _convert(family: str, scan: str, out: Path, layout: Literal["hf", "canonical"]) -> None:
    config = str(DATA / family / "hf")
    vision = (family, scan) == ("llama4", "unscanned")  # the one checkpoint that holds a vision encoder
    convert(str(DATA / family / scan), str(out), hf_config=config, layout=layout, text_only=vision)


@pytest.mark.parametrize(("family", "scan"), CASES)
def test_hf_layout(family: str, scan: str, tmp_path: Path) -> None:
    _convert(family, scan, tmp_path / "out", "hf")
    got = {folded(n): d for n, d in digests(tmp_path / "out").items()}
    original = {folded(n): d for n, d in digests(DATA / family / "hf").items() if is_text(n)}
    assert got.keys() == original.keys()
    lost = {n for n in got if n.endswith(LOST.get(family, ("\0",)))}
    assert {n for n in got if got[n] != original[n]} <= lost
    if (DATA / family / "maxtext_hf_digests.json").exists() and lost:
        export = {folded(n): d for n, d in oracle(DATA / family / "maxtext_hf_digests.json").items()}
        assert {n: got[n] for n in lost} == {n: export[n] for n in lost}


@pytest.mark.parametrize(("family", "scan"), CASES)
def test_canonical_layout(family: str, scan: str, tmp_path: Path) -> None:
    _convert(family, scan, tmp_path / "out", "canonical")
    got = digests(tmp_path / "out" / "canonical")
    vllm = oracle(DATA / family / "canonical_digests.json")
    buffers = DATA / family / "canonical_buffer_digests.json"
    if buffers.exists():
        vllm |= oracle(buffers)
    assert {n: (d["dtype"], d["shape"]) for n, d in got.items()} == {
        n: (d["dtype"], d["shape"]) for n, d in vllm.items()
    }
    lost = tuple(n.replace("q_proj", "qkv_proj").removeprefix("model.") for n in LOST.get(family, ("\0",)))
    differ = {n for n in got if got[n] != vllm[n]}
    assert all(n.endswith(lost) for n in differ)
    if differ:
        _same_rows_as_hf(family, scan, differ, tmp_path)


def _same_rows_as_hf(family: str, scan: str, names: set[str], tmp_path: Path) -> None:
    """Where vLLM's own bits cannot be had, the rows are those of the hf layout, which has MaxText's bits."""
    _convert(family, scan, tmp_path / "hf", "hf")
    hf = {folded(n): a for n, a in arrays(tmp_path / "hf").items()}
    canonical = {folded(n): a for n, a in arrays(tmp_path / "out" / "canonical").items()}
    for name in (folded(n) for n in names):
        if name.endswith("embed_tokens.weight"):
            rows = hf[name]
            assert not canonical[name][len(rows) :].any()
        else:
            rows = np.concatenate([hf[name.replace("qkv_proj", f"{x}_proj")] for x in "qkv"])
        assert canonical[name][: len(rows)].tobytes() == rows.tobytes()


@pytest.mark.parametrize("variant", ["qwen3-scanned-zarr2", "qwen3-scanned-noocdbt"])
def test_other_storages_hold_the_same(variant: str, tmp_path: Path) -> None:
    convert(str(DATA / "variants" / variant), str(tmp_path), hf_config=str(DATA / "qwen3" / "hf"), layout="hf")
    assert raw_tensors(tmp_path) == raw_tensors(DATA / "qwen3" / "hf")


def test_float32_checkpoint_gives_the_original_bits(tmp_path: Path) -> None:
    """With nothing lost to bf16 on the way in, every tensor of the original comes back, q included."""
    convert(
        str(DATA / "variants" / "llama3.1-scanned-fp32"),
        str(tmp_path),
        hf_config=str(DATA / "llama3.1" / "hf"),
        layout="hf",
    )
    assert raw_tensors(tmp_path) == raw_tensors(DATA / "llama3.1" / "hf")


@pytest.mark.parametrize(
    ("checkpoint", "config", "export"),
    [
        (
            "trained/qwen3-scanned",
            "trained/qwen3-scanned/maxtext_hf_step3",
            "trained/qwen3-scanned/maxtext_hf_step3_digests.json",
        ),
        ("param_only/qwen3-scanned", "param_only/qwen3-scanned", "param_only/qwen3-scanned/maxtext_hf_digests.json"),
        ("param_only/qwen3-unrolled", "param_only/qwen3-scanned", "param_only/qwen3-scanned/maxtext_hf_digests.json"),
        ("nnx_rl/qwen3-scanned", "nnx_rl/qwen3-scanned", "nnx_rl/qwen3-scanned/maxtext_hf_digests.json"),
    ],
)
def test_every_wrapper_equals_maxtexts_own_export(checkpoint: str, config: str, export: str, tmp_path: Path) -> None:
    expected = oracle(DATA / export)
    dtype = {"F32": "float32", "BF16": "bfloat16"}[next(iter(expected.values()))["dtype"]]
    convert(str(DATA / checkpoint), str(tmp_path), hf_config=str(DATA / config), layout="hf", dtype=dtype)
    assert digests(tmp_path) == expected


@pytest.mark.parametrize("family", ["llama2", "llama3", "mistral", "llama4"])
def test_families_without_a_maxtext_export_equal_the_original(family: str, tmp_path: Path) -> None:
    """All but q, which bf16 lost (Llama 4 scales no q: everything); test_logits.py compares their function."""
    convert(str(DATA / family / "scanned"), str(tmp_path), hf_config=str(DATA / family / "hf"), layout="hf")
    got = {folded(n): d for n, d in digests(tmp_path).items()}
    original = {folded(n): d for n, d in digests(DATA / family / "hf").items() if is_text(n)}
    assert {n: d["shape"] for n, d in got.items()} == {n: d["shape"] for n, d in original.items()}
    lost = () if family == "llama4" else ("self_attn.q_proj.weight",)
    assert all(n.endswith(lost) if lost else False for n in got if got[n] != original[n])


@pytest.mark.parametrize("family", ["gemma3", "gemma4-moe", "qwen3.5-moe"])
def test_base_gives_the_whole_model_back(family: str, tmp_path: Path) -> None:
    """Vision tower and projector are the original's bytes, names are the wrapper's; text differs where bf16 lost bits."""
    original = DATA / family / "hf"
    convert(str(DATA / family / "scanned"), str(tmp_path), hf_config=str(original), layout="hf", base=str(original))
    got, expected = digests(tmp_path), digests(original)
    assert got.keys() == expected.keys()
    lost = LOST.get(family, ("\0",))
    assert all(folded(n).endswith(lost) for n in got if got[n] != expected[n])
