"""Llama 4: vLLM's own order of query and key rows, made while staging a version in Hugging Face's layout."""

import hashlib
import json
from pathlib import Path

import pytest
from data_files import DATA

from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.version.pieces import DTYPES, recipes, row_blocks
from mtx2vllm.reload.aspire import open_version
from mtx2vllm.reload.engine import TensorSpec
from mtx2vllm.reload.match import fit
from mtx2vllm.reload.stage import Options, Stager

FAMILY = DATA / "llama4-dense"


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("root") / "1"
    convert(str(FAMILY / "scanned"), str(out), hf_config=str(FAMILY / "hf"), layout="hf")
    return out


def test_staging_makes_what_vllm_holds(version: Path) -> None:
    oracle = json.loads((FAMILY / "canonical_digests.json").read_text())
    specs = {name: TensorSpec(tuple(said["shape"]), DTYPES[said["dtype"]]) for name, said in oracle.items()}
    opened = open_version(str(version))
    stager = Stager(Options())
    try:
        staged = stager.stage(opened, fit(opened.manifest, specs).targets)
        found = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in staged.weights.items()}
    finally:
        stager.close()
    assert found == {name: said["sha256"] for name, said in oracle.items()}


def test_without_the_head_size_it_is_refused(version: Path) -> None:
    tensors = open_version(str(version)).manifest.tensors
    with pytest.raises(InputError, match="head_dim"):
        recipes(tensors, "hf", "llama4")


def test_blocks_of_rows_hold_whole_heads(version: Path) -> None:
    tensors = open_version(str(version)).manifest.tensors
    recipe = recipes(tensors, "hf", "llama4", 8)["model.layers.0.self_attn.qkv_proj.weight"]
    blocks = list(row_blocks(recipe, 10 * recipe.nbytes // recipe.shape[0]))
    assert len(blocks) > 1 and all(low % 8 == 0 for low, _ in blocks) and blocks[-1][1] == recipe.shape[0]
