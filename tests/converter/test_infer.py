"""Without a config.json: the family and its sizes from keys and shapes, or an honest refusal."""

import json
import shutil
from pathlib import Path

import pytest
from data_files import DATA, digests

from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.expect import predict, units
from mtx2vllm.converter.infer import infer
from mtx2vllm.schemas.model import model_of, schema_of

PLAIN = ["qwen2.5", "qwen3", "qwen3-untied", "qwen3-moe", "mixtral", "gemma3", "gpt-oss", "gpt-oss-hd64", "olmo3"]
AMBIGUOUS = {
    "llama2": "rotary convention", "llama3.1": "rotary convention", "mistral": "rotary convention",
    "gemma2": "query_pre_attn_scalar", "gemma4": "layer types", "qwen3.5-moe": "key heads", "deepseek3": "head size",
}  # fmt: skip


def alone(family: str, tmp_path: Path) -> Path:
    """A run with no config.json anywhere above it."""
    scan = "scanned" if (DATA / family / "scanned").is_dir() else "unscanned"
    return shutil.copytree(DATA / family / scan, tmp_path / "a/b/c/d/e" / "run")


@pytest.mark.parametrize("family", PLAIN)
def test_the_same_tensors_as_with_the_config(family: str, tmp_path: Path) -> None:
    run = alone(family, tmp_path)
    done = convert(str(run), str(tmp_path / "without"))
    assert any("no config.json was found" in note for note in done.notes)
    assert not (tmp_path / "without/config.json").exists()
    convert(str(run), str(tmp_path / "with"), hf_config=str(DATA / family / "hf"))
    got, expected = digests(tmp_path / "without/canonical"), digests(tmp_path / "with/canonical")
    # Without the config nothing tells that the text model had a wrapper around it.
    assert {n.removeprefix("language_model."): d for n, d in got.items()} == {
        n.removeprefix("language_model."): d for n, d in expected.items()
    }


@pytest.mark.parametrize("family", AMBIGUOUS)
def test_what_only_a_config_tells_is_asked_for(family: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=AMBIGUOUS[family]) as caught:
        convert(str(alone(family, tmp_path)), str(tmp_path / "out"))
    assert "--hf-config" in str(caught.value)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "out").exists()


def test_a_config_is_found_in_the_parents(tmp_path: Path) -> None:
    run = alone("qwen3", tmp_path)
    for place in ("a/b/c/config.json", "a/b/c/d/e/config.json", "a/b/c/d/e/run/config.json"):
        shutil.copy(DATA / "qwen3/hf/config.json", tmp_path / place)
        done = convert(str(run), str(tmp_path / "out"), layout="hf", overwrite=True)
        assert f"config: {tmp_path}/{place}" in done.notes
    done = convert(str(run), str(tmp_path / "out"), layout="hf", overwrite=True, hf_config=str(DATA / "qwen3/hf"))
    assert f"config: {DATA}/qwen3/hf/config.json" in done.notes


def test_a_relative_path_finds_a_config_above_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = alone("qwen3", tmp_path)
    shutil.copy(DATA / "qwen3/hf/config.json", run.parent / "config.json")
    monkeypatch.chdir(run)
    assert any(str(run.parent) in note for note in convert(".", str(tmp_path / "out"), layout="hf").notes)


@pytest.mark.parametrize(
    "name", ["qwen3-0.6b", "qwen3-30b-a3b", "qwen2.5-7b", "olmo3-32b", "gpt-oss-120b", "gemma3-27b", "mixtral-8x22b"]
)
@pytest.mark.parametrize("scanned", [True, False])
def test_sizes_of_public_models_come_back(name: str, scanned: bool) -> None:
    config = json.loads((DATA / "configs" / f"{name}.json").read_text())
    schema = schema_of(config)
    model = model_of(config, schema)
    found, solved = infer(predict(units(schema, model, scanned)))
    assert found.family == schema.family
    assert solved.layers == model.layers
    assert dict(solved.sizes).items() <= dict(model.sizes).items()


def test_a_leaf_too_many_settles_nothing(tmp_path: Path) -> None:
    config = json.loads((DATA / "configs/qwen3-0.6b.json").read_text())
    schema = schema_of(config)
    leaves = predict(units(schema, model_of(config, schema), True))
    leaves["decoder.layers.mlp.extra.kernel"] = next(iter(leaves.values()))
    with pytest.raises(InputError, match=r"do not settle the family.*--hf-config"):
        infer(leaves)
