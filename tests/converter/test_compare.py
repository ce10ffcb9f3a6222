"""Comparison of directories: what vLLM itself holds against the Hugging Face files it was loaded from."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from versions import BF16, write_manifest, write_version

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.version.header import Stored
from mtx2vllm.converter.version.pieces import DTYPES, as_rows, fold, read_rows, recipes, row_blocks
from mtx2vllm.converter.version.verify import verify_version

NAMES = {dtype: name for name, dtype in DTYPES.items()}
DATA = Path(__file__).parents[1] / "data"
FAMILIES = {
    "deepseek3": "deepseek3", "gemma2": "gemma2", "gemma3": "gemma3", "gemma4": "gemma4", "gemma4-moe": "gemma4",
    "gpt-oss": "gpt_oss", "gpt-oss-hd64": "gpt_oss", "llama3.1": "llama", "mixtral": "mixtral", "olmo3": "olmo3",
    "qwen2.5": "qwen2",
    "qwen3": "qwen3", "qwen3-moe": "qwen3_moe", "qwen3-next": "qwen3_next", "qwen3-untied": "qwen3",
    "qwen3.5-moe": "qwen3_5_moe",
}  # fmt: skip


def dumped(name: str) -> dict[str, np.ndarray]:
    """What vLLM holds, to the bit: made from the Hugging Face file, and checked with the digests of vLLM's own dump."""
    header = load_file(DATA / name / "hf" / "model.safetensors")
    sources = {key: Stored(NAMES[value.dtype], value.shape, 0, value.nbytes) for key, value in header.items()}

    def read(source: str, offset: int, out: memoryview) -> None:
        out[:] = header[source].reshape(-1).view(np.uint8)[offset : offset + len(out)].data

    oracle = json.loads((DATA / name / "canonical_digests.json").read_text())
    buffers = DATA / name / "canonical_buffer_digests.json"
    oracle |= json.loads(buffers.read_text()) if buffers.exists() else {}
    found = recipes(sources, "hf", FAMILIES[name])
    tensors = {}
    for key, said in oracle.items():
        recipe = found.pop(fold(key))
        flat = as_rows(recipe)
        rows = [read_rows(flat, block, sources, read, said["dtype"]) for block in row_blocks(flat, 999)]
        tensors[key] = np.concatenate(rows).reshape(recipe.shape)
        assert hashlib.sha256(tensors[key].tobytes()).hexdigest() == said["sha256"], key
        assert list(recipe.shape) == said["shape"]
    assert not found
    return tensors


def canonical(tmp_path: Path, name: str, tensors: dict[str, np.ndarray] | None = None) -> Path:
    return write_version(tmp_path / "1", tensors or dumped(name), family=FAMILIES[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_vllm_holds_equals_the_hf_directory(tmp_path: Path, name: str) -> None:
    result = verify_version(str(canonical(tmp_path, name)), str(DATA / name / "hf"))
    assert result.problems == [] and result.differing == []
    assert result.ok and result.identical == result.tensors == len(dumped(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_one_element_is_found_in_every_tensor(tmp_path: Path, name: str) -> None:
    """The last element of each canonical tensor gets another lowest bit: all are found, one element each."""
    tensors = dumped(name)
    for key, value in tensors.items():
        bits = value.reshape(-1).view(np.uint8 if value.dtype.itemsize == 1 else f"u{value.dtype.itemsize}").copy()
        bits[-1] ^= 1
        tensors[key] = bits.view(value.dtype).reshape(value.shape)
    result = verify_version(str(canonical(tmp_path, name, tensors)), str(DATA / name / "hf"))
    assert not result.ok and len(result.differing) == len(tensors)
    assert {d.elements for d in result.differing} == {1}
    assert sum(d.of for d in result.differing) == sum(v.size for v in tensors.values())


def adopted(tmp_path: Path, name: str) -> Path:
    shutil.copytree(DATA / name / "hf", tmp_path / "2")
    write_manifest(tmp_path / "2", "hf", FAMILIES[name])
    return tmp_path / "2"


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma3", "qwen3.5-moe"])
def test_versions_of_both_layouts(tmp_path: Path, name: str) -> None:
    a, b = canonical(tmp_path, name), adopted(tmp_path, name)
    assert verify_version(str(a), str(b)).ok
    assert verify_version(str(b), str(a)).ok
    assert verify_version(str(b), str(DATA / name / "hf")).ok


def test_fused_experts_against_single_ones(tmp_path: Path) -> None:
    """The fused form, built with numpy from the single experts by the definition in transformers' model code."""
    one = load_file(next((DATA / "qwen3-moe" / "hf").glob("*.safetensors")))
    other = {k: v for k, v in one.items() if ".experts." not in k}
    for layer in {k.split(".experts.")[0] for k in one if ".experts." in k}:
        count = len({k.split(".experts.")[1].split(".")[0] for k in one if k.startswith(layer + ".experts.")})
        get = lambda e, n, at=layer: one[f"{at}.experts.{e}.{n}.weight"]  # noqa: E731
        pairs = [np.concatenate([get(e, "gate_proj"), get(e, "up_proj")]) for e in range(count)]
        other[f"{layer}.experts.gate_up_proj"] = np.stack(pairs)
        other[f"{layer}.experts.down_proj"] = np.stack([get(e, "down_proj") for e in range(count)])
    fused = tmp_path / "fused"
    fused.mkdir()
    shutil.copy(DATA / "qwen3-moe" / "hf" / "config.json", fused)
    save_file(other, fused / "model.safetensors", {"format": "pt"})
    assert verify_version(str(adopted(tmp_path, "qwen3-moe")), str(fused)).ok


def test_the_difference_is_measured(tmp_path: Path) -> None:
    tensors = dumped("qwen3")
    norm = tensors["model.norm.weight"].astype(np.float32)
    norm[:3] += [0.5, 0.25, 0.125]
    changed = norm.astype(BF16)
    expected = np.abs(changed.astype(np.float64) - tensors["model.norm.weight"].astype(np.float64))
    tensors["model.norm.weight"] = changed
    [found] = verify_version(str(canonical(tmp_path, "qwen3", tensors)), str(DATA / "qwen3" / "hf")).differing
    assert (found.name, found.elements, found.of) == ("model.norm.weight", int((expected > 0).sum()), changed.size)
    assert found.max_abs == expected.max()


def test_what_one_side_lacks(tmp_path: Path) -> None:
    tensors = dumped("qwen3-untied")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.extra.weight"] = np.zeros(3, BF16)
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"][:-1].copy()
    result = verify_version(str(canonical(tmp_path, "qwen3-untied", tensors)), str(DATA / "qwen3-untied" / "hf"))
    assert not result.ok and len(result.problems) == 3
    text = "\n".join(result.problems)
    assert "model.norm.weight is in " in text and "extra" in text and "down_proj" in text


def test_a_tied_head_that_is_written_out(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(DATA / "qwen3" / "hf", hf)
    file = next(hf.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, file, {"format": "pt"})
    version = canonical(tmp_path, "qwen3")
    assert verify_version(str(version), str(hf)).ok
    tensors["lm_head.weight"][0, 0] = 9
    save_file(tensors, file, {"format": "pt"})
    assert [d.name for d in verify_version(str(version), str(hf)).differing] == ["lm_head.weight"]


def test_nan_equals_itself_and_is_reported_against_numbers(tmp_path: Path) -> None:
    a = {"model.norm.weight": np.array([np.nan, 1, np.inf], BF16)}
    b = {"model.norm.weight": np.array([np.nan, 1, 2], BF16)}
    one, same = write_version(tmp_path / "1", a, shards=1), write_version(tmp_path / "2", a, shards=1)
    assert verify_version(str(one), str(same)).ok
    [found] = verify_version(str(one), str(write_version(tmp_path / "3", b, shards=1))).differing
    assert found.max_abs is None and json.dumps(verify_version(str(one)).to_json())


def test_other_types_are_compared_by_exact_values(tmp_path: Path) -> None:
    values = np.array([1.5, -0.1, 3e-3], BF16)
    one = write_version(tmp_path / "1", {"model.norm.weight": values}, shards=1)
    wide = write_version(tmp_path / "2", {"model.norm.weight": values.astype(np.float32)}, shards=1)
    off = write_version(tmp_path / "3", {"model.norm.weight": np.array([1.5, -0.1, 3e-3], np.float32)}, shards=1)
    assert verify_version(str(one), str(wide)).ok
    assert verify_version(str(one), str(off)).differing[0].elements == 2


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    version = canonical(tmp_path, "qwen3")
    with pytest.raises(InputError, match="neither a manifest nor"):
        verify_version(str(version), str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="canonical layout, but no manifest"):
        verify_version(str(version), str(version / "canonical"))


def test_a_damaged_version_is_not_compared(tmp_path: Path) -> None:
    version = canonical(tmp_path, "qwen3")
    (version / "config.json").unlink()
    result = verify_version(str(version), str(DATA / "qwen3" / "hf"))
    assert not result.ok and "config.json is missing" in result.problems[0]
