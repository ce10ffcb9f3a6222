"""Versions with one thing wrong each: the sentence must name it; several wrong things are named at once."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from versions import BF16, arrays, write_manifest, write_version

from mtx2vllm.converter.errors import InputError, NotCommitted
from mtx2vllm.converter.storage import store_for
from mtx2vllm.converter.version.header import read_header
from mtx2vllm.converter.version.verify import CHUNK, verify_version

SHARD = "canonical/model-00001-of-00002.safetensors"
OTHER = "canonical/model-00002-of-00002.safetensors"


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return write_version(tmp_path / "100", arrays(1))


def problems(version: Path) -> list[str]:
    result = verify_version(str(version))
    assert result.ok == (not result.problems)
    return result.problems


def test_a_sound_version(version: Path) -> None:
    result = verify_version(str(version))
    assert (result.ok, result.tensors, result.identical, result.problems) == (True, 6, 6, [])
    assert result.to_json()["differing"] == []


def test_no_manifest_is_not_a_version(tmp_path: Path) -> None:
    directory = write_version(tmp_path / "1", arrays(1), commit=False)
    with pytest.raises(NotCommitted, match=r"holds no mtx2vllm\.json.*adopt"):
        verify_version(str(directory))
    with pytest.raises(NotCommitted):
        verify_version(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1}', "null", "\xff"])
def test_a_manifest_that_is_none(version: Path, text: str) -> None:
    (version / "mtx2vllm.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="not a valid manifest"):
        verify_version(str(version))


def test_a_manifest_that_leads_out_of_its_directory(version: Path) -> None:
    path = version / "mtx2vllm.json"
    path.write_text(path.read_text().replace(SHARD, "../" + SHARD))
    with pytest.raises(InputError, match="leads out of the version directory"):
        verify_version(str(version))


@pytest.mark.parametrize(
    "cut",
    [lambda size, header: size - 1, lambda size, header: header, lambda size, header: 0],
    ids=["one byte short", "header only", "empty"],
)
def test_truncated(version: Path, cut) -> None:
    path = version / SHARD
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[: cut(len(data), header)])
    [problem] = problems(version)
    assert str(path) in problem and "truncated" in problem


@pytest.mark.parametrize(
    "cut", [lambda s, h: s - 1, lambda s, h: h, lambda s, h: h - 1, lambda s, h: 7, lambda s, h: 0]
)
def test_truncated_before_the_manifest_was_made(version: Path, cut) -> None:
    """The manifest agrees with the file's size; the header must give it away."""
    path = version / SHARD
    data = path.read_bytes()
    size = cut(len(data), 8 + int.from_bytes(data[:8], "little"))
    path.write_bytes(data[:size])
    manifest = json.loads((version / "mtx2vllm.json").read_text())
    manifest["files"][SHARD]["size"] = size
    manifest["tensors"] = {k: t for k, t in manifest["tensors"].items() if t["file"] != SHARD}
    (version / "mtx2vllm.json").write_text(json.dumps(manifest))
    assert any(str(path) in problem and "truncated" in problem for problem in problems(version))


def test_header_longer_than_safetensors_allows(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(InputError, match="header of 100000001 bytes, more than the 100000000"):
        read_header(store_for(str(path)), str(path), 200_000_000)


def crafted(tmp_path: Path, header: str, data: int) -> InputError:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(data))
    with pytest.raises(InputError) as caught:
        read_header(store_for(str(path)), str(path), path.stat().st_size)
    return caught.value


def entry(begin: int, end: int, dtype: str = "U8", shape: str | None = None) -> str:
    return f'{{"dtype":"{dtype}","shape":{shape or [end - begin]},"data_offsets":[{begin},{end}]}}'


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ("[]", 0, "not an object"),
        ("{", 0, "no valid JSON"),
        ("[" * 100_000, 0, "no valid JSON"),
        (f'{{"a":{entry(0, 4)},"a":{entry(0, 4)}}}', 4, "occurs twice"),
        (f'{{"a":{entry(0, 4)},"b":{entry(2, 6)}}}', 6, "overlaps"),
        (f'{{"a":{entry(0, 4)},"b":{entry(5, 6)}}}', 6, "hole"),
        (f'{{"a":{entry(1, 4)}}}', 4, "hole"),
        (f'{{"a":{entry(0, 4)}}}', 5, "belong to nobody"),
        (f'{{"a":{entry(0, 4)}}}', 3, "truncated"),
        (f'{{"a":{entry(0, 4, "F32", "[2]")}}}', 4, "needs 8 bytes"),
        (f'{{"a":{entry(0, 4, "Q9")}}}', 4, "unknown type"),
        ('{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,4]}}', 4, "not lists of sizes"),
        ('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', 1, "not lists of sizes"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,8]}}', 4, "not lists of sizes"),
        ('{"a":7}', 0, "not an object"),
        ('{"__metadata__":{"x":1}}', 0, "not a table of texts"),
    ],
)
def test_crafted_headers(tmp_path: Path, header: str, data: int, said: str) -> None:
    assert said in str(crafted(tmp_path, header, data))


def test_two_things_wrong_in_one_header_are_both_named(tmp_path: Path) -> None:
    error = crafted(tmp_path, f'{{"a":{entry(0, 4, "Q9")},"b":{entry(0, 4, "Q8")}}}', 4)
    assert len(error.problems) == 2


def test_flipped_bit_in_data(version: Path) -> None:
    path = version / SHARD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tensors = json.loads((version / "mtx2vllm.json").read_text())["tensors"]
    last = max((t["offset"], name) for name, t in tensors.items() if t["file"] == SHARD)[1]
    [problem] = problems(version)
    assert "another digest" in problem and repr(last) in problem
    assert verify_version(str(version)).identical == 5


def test_header_and_manifest_disagree(version: Path) -> None:
    path = version / "mtx2vllm.json"
    manifest = json.loads(path.read_text())
    names = list(manifest["tensors"])
    manifest["tensors"][names[0]]["shape"] = manifest["tensors"][names[0]]["shape"][::-1]
    manifest["tensors"][names[1]]["dtype"] = "F16"
    del manifest["tensors"][names[2]]
    path.write_text(json.dumps(manifest))
    text = "\n".join(problems(version))
    assert all(f"{name!r}" in text for name in names[:3])
    assert "is not in the manifest" in text and "in the file, but" in text


def test_everything_wrong_is_named_at_once(version: Path) -> None:
    (version / SHARD).unlink()
    (version / "config.json").write_text("{}")
    data = bytearray((version / OTHER).read_bytes())
    data[-1] ^= 1
    (version / OTHER).write_bytes(data)
    (version / "canonical" / "model-stray.safetensors").write_bytes(b"")
    text = "\n".join(problems(version))
    for part in (SHARD, "config.json", OTHER, "model-stray"):
        assert part in text


def test_layout_of_header_and_manifest(tmp_path: Path) -> None:
    directory = write_version(tmp_path / "1", arrays(1))
    path = directory / "mtx2vllm.json"
    path.write_text(path.read_text().replace('"layout": "canonical"', '"layout": "hf"'))
    assert all("layout 'canonical'" in problem for problem in problems(directory))
    assert len(problems(directory)) == 2


def test_an_index_that_lies(version: Path) -> None:
    index = version / "canonical" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))
    write_manifest(version)
    [problem] = problems(version)
    assert "disagree on 1 tensors" in problem and "model.norm.weight" in problem


def test_memory_is_bounded_by_the_chunk(tmp_path: Path) -> None:
    big = {"model.embed_tokens.weight": np.zeros((64, CHUNK // 16), BF16)}  # 8 chunks
    directory = write_version(tmp_path / "1", big, shards=1)
    tracemalloc.start()
    try:
        assert verify_version(str(directory)).ok
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * CHUNK
