"""adopt: somebody else's directory becomes a version, or is refused for all that is wrong with it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from click.testing import CliRunner
from data_files import DATA, arrays, raw_tensors
from safetensors.numpy import save_file

from mtx2vllm.converter.cli import main
from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError, LostRace
from mtx2vllm.converter.version import adopt as adopting
from mtx2vllm.converter.version.adopt import adopt
from mtx2vllm.converter.version.verify import verify_version

FAMILIES = sorted(path.parent.parent.name for path in DATA.glob("*/hf/model.safetensors"))
QWEN3 = DATA / "qwen3" / "hf"


def copy(tmp_path: Path, family: str = "qwen3") -> Path:
    return Path(shutil.copytree(DATA / family / "hf", tmp_path / "model"))


def split(home: Path, count: int = 3) -> dict[str, str]:
    """The same weights in several files with an index, as transformers saves a large model."""
    tensors = arrays(home)
    (home / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map: dict[str, str] = {}
    for i, file in enumerate(names):
        part = {n: np.array(tensors[n]) for n in sorted(tensors)[i::count]}
        save_file(part, str(home / file), {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_index(home, weight_map)
    return weight_map


def write_index(home: Path, weight_map: dict[str, str]) -> None:
    (home / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def rewrite(home: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = {n: np.array(a) for n, a in arrays(home).items()}
    change(tensors)
    save_file(tensors, str(home / "model.safetensors"), {"format": "pt"})


def configure(home: Path, **facts: object) -> None:
    path = home / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_transformers_wrote(family: str, tmp_path: Path) -> None:
    done = adopt(str(DATA / family / "hf"), str(tmp_path / "root" / "7"))
    out = tmp_path / "root" / "7"
    told = json.loads((out / "mtx2vllm.json").read_text())
    raw = raw_tensors(DATA / family / "hf")
    assert {n: t["blake3"] for n, t in told["tensors"].items()} == {
        n: blake3(b).hexdigest() for n, (_, _, b) in raw.items()
    }
    assert (told["layout"], told["source"]["kind"], told["source"]["step"]) == ("hf", "hf", 7)
    assert done.tensors == len(raw)
    assert verify_version(str(out), str(DATA / family / "hf")).ok


def test_an_adopted_version_equals_a_converted_one(tmp_path: Path) -> None:
    adopt(str(QWEN3), str(tmp_path / "1"))
    convert(str(DATA / "qwen3/scanned"), str(tmp_path / "2"), hf_config=str(QWEN3))
    assert verify_version(str(tmp_path / "2"), str(tmp_path / "1")).ok


def test_in_its_place(tmp_path: Path) -> None:
    home = copy(tmp_path)
    split(home)
    (home / "README.md").write_text("a model")
    before = {p.name: p.read_bytes() for p in home.iterdir()}
    answer = CliRunner().invoke(main, ["adopt", str(home), "--json"])
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout)
    assert (told["step"], told["layout"], told["linked"], told["copied"]) == (None, "hf", 0, 0)
    assert verify_version(str(home)).ok
    assert {p.name: p.read_bytes() for p in home.iterdir() if p.name != "mtx2vllm.json"} == before
    again = CliRunner().invoke(main, ["adopt", str(home)])
    assert (again.exit_code, "is a version already (layout hf)" in again.stderr) == (3, True)


def test_shards_are_linked_where_they_can_be(tmp_path: Path) -> None:
    home = copy(tmp_path)
    done = adopt(str(home), str(tmp_path / "root/100"))
    assert (done.linked, done.copied) == (1, 1)
    assert "1 shard hard-linked (never write into the source's in place), 1 file copied" in done.sentence()
    assert (home / "model.safetensors").samefile(tmp_path / "root/100/model.safetensors")
    shutil.rmtree(tmp_path / "root/100")
    adopt(str(home))
    assert verify_version(str(home)).ok


def test_a_source_that_is_saved_anew_leaves_the_version_as_it_was(tmp_path: Path) -> None:
    home, out = copy(tmp_path), tmp_path / "root/100"
    split(home)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (home / name).write_text("{}")
    adopt(str(home), str(out))
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    for path in home.iterdir():
        if path.suffix == ".safetensors":  # a new file in the old one's place
            new = path.with_suffix(".new")
            new.write_bytes(path.read_bytes()[::-1])
            new.replace(path)
        else:  # in place
            path.write_text('{"other": 1}')
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert len(before) == 3 + 1 + 3 + 1  # shards, index, config and two more, manifest
    assert verify_version(str(out)).ok


def test_a_copy_shares_nothing(tmp_path: Path) -> None:
    home, out = copy(tmp_path), tmp_path / "root/100"
    answer = CliRunner().invoke(main, ["adopt", str(home), "--as", str(out), "--copy"])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.endswith(", 2 files copied\n")
    for path in home.iterdir():
        path.write_bytes(b"rewritten in place")
    assert verify_version(str(out)).ok


def test_files_are_copied_where_they_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, real = copy(tmp_path), os.link

    def refuse(source: Any, target: Any) -> None:
        if Path(source).parent == home:
            raise OSError(18, "Invalid cross-device link")
        real(source, target)

    monkeypatch.setattr(os, "link", refuse)
    done = adopt(str(home), str(tmp_path / "root/100"))
    assert (done.linked, done.copied) == (0, 2)
    assert verify_version(str(tmp_path / "root/100")).ok


def test_a_cache_of_links_gives_real_files(tmp_path: Path) -> None:
    blobs = copy(tmp_path)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    adopt(str(snapshot), str(tmp_path / "root/1"))
    assert not any(p.is_symlink() for p in (tmp_path / "root/1").iterdir())
    assert verify_version(str(tmp_path / "root/1")).ok


def test_weights_of_another_kind_are_left_out(tmp_path: Path) -> None:
    home = copy(tmp_path)
    split(home)
    (home / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match=r"also holds pytorch_model\.bin"):
        adopt(str(home))
    assert not (home / "mtx2vllm.json").exists()
    done = adopt(str(home), str(tmp_path / "root/1"))
    assert done.notes == ("left out: pytorch_model.bin",)
    assert not (tmp_path / "root/1/pytorch_model.bin").exists()


def drop_norm(tensors: dict[str, Any]) -> None:
    del tensors["model.norm.weight"]


def transpose(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def swap_query_and_key(tensors: dict[str, Any]) -> None:
    """Together they have the rows that the fused tensor wants; apart they are wrong."""
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    tensors[q], tensors[k] = tensors[k], tensors[q]


def add(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.mlp.extra.weight"] = np.zeros((2, 2), np.float32)


def quantize(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn).view(np.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_norm, "are missing: model.norm.weight"),
        (transpose, r"model\.layers\.1\.mlp\.down_proj\.weight is \[.*\], config.json implies"),
        (swap_query_and_key, r"2 tensors have another shape"),
        (add, r"are not of the qwen3 model.*mlp\.extra"),
        (quantize, "quantized"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    home = copy(tmp_path)
    rewrite(home, change)
    with pytest.raises(InputError, match=words):
        adopt(str(home), str(tmp_path / "root/1"))
    assert not (tmp_path / "root/1").exists()


def test_a_head_that_a_tied_config_forbids(tmp_path: Path) -> None:
    home = copy(tmp_path)
    rewrite(home, lambda t: t.update({"lm_head.weight": np.array(t["model.embed_tokens.weight"])}))
    adopt(str(home), str(tmp_path / "root/1"))
    rewrite(home, lambda t: t.update({"lm_head.weight": np.array(t["model.embed_tokens.weight"]) * 2}))
    with pytest.raises(InputError, match="tie_word_embeddings"):
        adopt(str(home), str(tmp_path / "root/2"))


def test_a_damaged_file(tmp_path: Path) -> None:
    home = copy(tmp_path)
    path = home / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match="truncated"):
        adopt(str(home))


def test_an_index_that_disagrees(tmp_path: Path) -> None:
    home = copy(tmp_path)
    listed = split(home)
    first, *_, last = listed
    write_index(
        home, {n: f for n, f in listed.items() if n != first} | {"model.ghost": listed[last], last: listed[first]}
    )
    with pytest.raises(InputError) as caught:
        adopt(str(home))
    assert len(caught.value.problems) == 3
    (home / listed[last]).unlink()
    write_index(home, listed)
    with pytest.raises(InputError, match="is missing, though"):
        adopt(str(home))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"num_hidden_layers": 9}, "asks for are missing"),
        ({"hidden_size": 32}, "another shape"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized|quantization"),
        ({"architectures": ["BertModel"]}, "BertModel"),
    ],
)
def test_a_config_of_another_model(tmp_path: Path, facts: dict[str, object], words: str) -> None:
    home = copy(tmp_path)
    configure(home, **facts)
    with pytest.raises(InputError, match=words):
        adopt(str(home))


def test_what_is_no_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist or is empty"):
        adopt(str(tmp_path / "nowhere"))
    home = copy(tmp_path)
    (home / "model.safetensors").rename(home / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickle"):
        adopt(str(home))
    (home / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json is missing"):
        adopt(str(home))


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/3", "checkpoints/3/items"])
def test_a_maxtext_checkpoint_is_for_convert(below: str) -> None:
    place = str(DATA / "trained" / "qwen3-scanned" / below)
    with pytest.raises(InputError, match=f"is a MaxText checkpoint, .* mtx2vllm convert {place} OUT$"):
        adopt(place)


def test_a_file_is_not_a_directory() -> None:
    with pytest.raises(InputError, match=f"is a file; .* mtx2vllm adopt {QWEN3}$"):
        adopt(str(QWEN3 / "model.safetensors"))


def test_a_canonical_version_is_not_adopted(tmp_path: Path) -> None:
    convert(str(DATA / "qwen3/scanned"), str(tmp_path / "v"), hf_config=str(QWEN3))
    home = copy(tmp_path)
    shutil.copy(tmp_path / "v/canonical/model.safetensors", home)
    with pytest.raises(InputError, match="layout canonical"):
        adopt(str(home))


def test_a_version_is_not_adopted_again(tmp_path: Path) -> None:
    canonical, hf, free = (str(tmp_path / "root" / n) for n in "123")
    convert(DATA / "qwen3/scanned", canonical, hf_config=QWEN3)
    convert(DATA / "qwen3/scanned", hf, hf_config=QWEN3, layout="hf")
    for place, layout in ((canonical, "canonical"), (hf, "hf")):
        with pytest.raises(
            InputError, match=rf"^{place} is a version already \(layout {layout}\), and there is nothing"
        ):
            adopt(place)
        with pytest.raises(InputError, match=f"^{canonical} is a version already; give another step"):
            adopt(str(QWEN3), canonical)
    with pytest.raises(
        InputError, match=rf"^{canonical} is a version already \(layout canonical\).* fetch {canonical} {free}"
    ):
        adopt(canonical, free)
    assert not Path(free).exists()
    answer = CliRunner().invoke(main, ["fetch", canonical, free])
    assert answer.exit_code == 0 and verify_version(free).ok
    with pytest.raises(InputError, match=r"holds directories only \(1, 2, 3\)"):
        adopt(tmp_path / "root")
    adopt(hf, tmp_path / "root" / "4")
    assert verify_version(str(tmp_path / "root" / "4")).ok


def test_the_place_must_be_a_step_and_free(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ROOT/STEP"):
        adopt(str(QWEN3), str(tmp_path / "latest"))
    (tmp_path / "5").mkdir()
    (tmp_path / "5/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        adopt(str(QWEN3), str(tmp_path / "5"))
    assert [p.name for p in (tmp_path / "5").iterdir()] == ["notes.txt"]


def test_a_writer_that_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = copy(tmp_path)
    real = adopting._digests

    def meanwhile(*args: Any) -> dict[str, str]:
        found = real(*args)
        rewrite(home, lambda t: t["model.norm.weight"].__imul__(2))
        return found

    monkeypatch.setattr(adopting, "_digests", meanwhile)
    with pytest.raises(LostRace, match="was written while it was read"):
        adopt(str(home), str(tmp_path / "root/1"))
    assert not [p for p in (tmp_path / "root").rglob("*") if p.is_file()]
