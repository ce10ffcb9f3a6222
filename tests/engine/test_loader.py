"""`--load-format mtx2vllm` into a module that has a model's parameters and nothing else."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from data_files import DATA, oracle

from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError
from mtx2vllm.reload.staged import StageFailed

pytestmark = pytest.mark.engine  # vLLM's own layer types are imported

FAMILY = "gemma3"  # a text model inside a multimodal wrapper
_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("loader") / "version"
    convert(str(DATA / FAMILY / "scanned"), str(out), hf_config=str(DATA / FAMILY / "hf"))
    return out


class Wrapper(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Every tensor that vLLM's own model holds, by vLLM's names and shapes, filled with ones."""

    def __init__(self, *more: str) -> None:
        super().__init__()
        for name, entry in oracle(DATA / FAMILY / "canonical_digests.json").items():
            self.add(name, torch.ones(entry["shape"], dtype=_TORCH[entry["dtype"]]))
        for name in more:
            self.add(name, torch.ones(2))

    def add(self, name: str, values: Any) -> None:
        owner: Any = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]
        owner.register_parameter(leaf, torch.nn.Parameter(values, requires_grad=False))

    def get_language_model(self) -> Any:
        return self.language_model


def bits(model: Any) -> dict[str, str]:
    return {
        name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }


def load(model: Any, location: Path) -> None:
    from mtx2vllm.reload.engines import loader

    loader.load(model, str(location))


def test_every_parameter_is_vllms_own(version: Path) -> None:
    model = Wrapper()
    load(model, version)
    expected = {name: entry["sha256"] for name, entry in oracle(DATA / FAMILY / "canonical_digests.json").items()}
    found = bits(model)
    differing = [name for name in expected if found[name] != expected[name]]
    # MaxText's import rounded this one (tests/data/README.md), so no conversion can bring it back.
    assert differing == ["language_model.model.embed_tokens.weight"]
    assert found.keys() == expected.keys()


def test_a_vision_tower_would_have_no_values(version: Path) -> None:
    model = Wrapper("vision_tower.a", "vision_tower.b")
    before = bits(model)
    with pytest.raises(
        InputError, match=r"2 tensors of the engine would have no values: vision_tower\.a, vision_tower\.b\."
    ):
        load(model, version)
    assert bits(model) == before


def test_a_damaged_version_changes_nothing(version: Path, tmp_path: Path) -> None:
    shutil.copytree(version, tmp_path / "bad")
    shard = tmp_path / "bad/canonical/model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    model = Wrapper()
    before = bits(model)
    with pytest.raises(StageFailed, match="digest"):
        load(model, tmp_path / "bad")
    assert bits(model) == before
