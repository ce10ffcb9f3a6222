"""Safetensors files laid out before any data exists: tiling, limits, and what readers make of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mtx2vllm.converter import shards
from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.plan import Tensor
from mtx2vllm.converter.shards import ShardFile, layout

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(["bfloat16", "float32", "int8"])), min_size=1, max_size=12)


def made(found: list[tuple[tuple[int, ...], str]]) -> list[Tensor]:
    return [Tensor(f"tensor.{n}.weight", shape, dtype) for n, (shape, dtype) in enumerate(found)]


@settings(deadline=None)
@given(TENSORS, st.one_of(st.none(), st.integers(1, 5000)))
def test_tensors_tile_every_file(found: list[tuple[tuple[int, ...], str]], limit: int | None) -> None:
    tensors = made(found)
    files = layout(tensors, limit, {"layout": "hf"})
    assert sorted(n for f in files for n in f.offsets) == list(range(len(tensors)))
    assert len({f.name for f in files}) == len(files)
    for file in files:
        assert len(file.header) % 4096 == 0
        assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
        end = len(file.header)
        for number, offset in sorted(file.offsets.items(), key=lambda item: (item[1], tensors[item[0]].nbytes)):
            assert offset == end
            end += tensors[number].nbytes
        assert end == file.size
        size = sum(tensors[n].nbytes for n in file.offsets)
        assert limit is None or size <= limit or len([n for n in file.offsets if tensors[n].nbytes]) == 1


@settings(deadline=None)
@given(TENSORS)
def test_other_readers_see_the_same(tmp_path_factory: pytest.TempPathFactory, found: list[tuple[tuple[int, ...], str]]) -> None:
    tensors = [t for t in made(found) if t.dtype != "bfloat16"]
    for file in layout(tensors, 2000, {"layout": "hf"}) if tensors else []:
        path: Path = tmp_path_factory.mktemp("f") / "model.safetensors"
        path.write_bytes(file.header + bytes(range(256)) * (file.size // 256 + 1))
        with path.open("r+b") as out:
            out.truncate(file.size)
        data = path.read_bytes()
        with safe_open(path, "np") as opened:
            assert opened.metadata() == {"format": "pt", "layout": "hf"}
            for number, offset in file.offsets.items():
                tensor = tensors[number]
                values = opened.get_tensor(tensor.name)
                assert (values.shape, values.dtype) == (tensor.shape, np.dtype(tensor.dtype))
                assert values.tobytes() == data[offset : offset + tensor.nbytes]


def test_names_of_any_alphabet_stand_in_the_header() -> None:
    [file] = layout([Tensor('modèle."层"\\x', (1,), "float32")], None, {"layout": "hf"})
    assert 'modèle."层"\\x' in json.loads(file.header[8:])


def test_one_file_has_the_plain_name_and_many_are_numbered() -> None:
    tensors = made([((8,), "float32")] * 3)
    assert [f.name for f in layout(tensors, None, {})] == ["model.safetensors"]
    assert [f.name for f in layout(tensors, 64, {})] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_header_that_readers_refuse_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shards.HEADER_LIMIT == 100_000_000
    monkeypatch.setattr(shards, "HEADER_LIMIT", 5000)
    tensors = made([((1,), "float32")] * 100)
    with pytest.raises(InputError, match=r"100 tensors.*--max-shard-size"):
        layout(tensors, None, {})
    files: list[ShardFile] = layout(tensors, 40, {})
    assert len(files) == 10


def test_a_type_that_safetensors_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match=r"complex64.*--dtype"):
        layout([Tensor("a", (1,), "complex64")], None, {})
