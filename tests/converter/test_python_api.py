"""The converter from Python: paths and sizes as Python people have them, and one sentence for a wrong name."""

import subprocess
import sys
from pathlib import Path

import pytest
from data_files import DATA, digests

from mtx2vllm.converter import InputError, Options, UsageError, convert, plan
from mtx2vllm.converter.version.adopt import adopt
from mtx2vllm.converter.version.fetch import fetch_version
from mtx2vllm.converter.version.verify import verify_version

RUN, CONFIG = DATA / "qwen3" / "scanned", DATA / "qwen3" / "hf"


def test_paths_are_paths(tmp_path: Path) -> None:
    by_path = convert(RUN, tmp_path / "a", hf_config=CONFIG, layout="hf", base=CONFIG)
    by_text = convert(str(RUN), str(tmp_path / "b"), hf_config=str(CONFIG), layout="hf", base=str(CONFIG))
    assert (by_path.out, by_text.out) == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert by_path.notes == by_text.notes
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert plan(CONFIG).tensors == plan(CONFIG / "config.json").tensors == plan(str(CONFIG)).tensors
    assert verify_version(tmp_path / "a", tmp_path / "b").ok
    assert fetch_version(tmp_path / "a", tmp_path / "c").directory == str(tmp_path / "c")
    assert digests(tmp_path / "c") == digests(tmp_path / "a")
    assert adopt(CONFIG, tmp_path / "root" / "1").out == str(tmp_path / "root" / "1")


def test_paths_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RUN.parent)
    assert convert(Path("scanned"), tmp_path / "out", hf_config=Path("hf")).tensors == 26


def test_a_bucket_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two slashes"):
        convert(Path("gs://bucket/run"), tmp_path / "out", hf_config=CONFIG)
    with pytest.raises(UsageError, match=r"hf_config 5 is no path"):
        convert(RUN, tmp_path / "out", hf_config=5)


def test_sizes_as_on_the_command_line(tmp_path: Path) -> None:
    chosen = Options(max_shard_size="100KiB", memory_budget="0.5 GiB")  # type: ignore[arg-type]
    assert (chosen.max_shard_size, chosen.memory_budget) == (102_400, 1 << 29)
    convert(RUN, tmp_path / "out", hf_config=CONFIG, max_shard_size="100KiB", memory_budget="512MiB", layout="hf")
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    assert all(shard.stat().st_size < 140_000 for shard in shards)
    with pytest.raises(UsageError) as caught:
        convert(RUN, tmp_path / "none", max_shard_size="4 bananas", memory_budget="0", workers=0)
    said = str(caught.value).splitlines()
    assert said[0].startswith("max_shard_size '4 bananas' is not a size; give a number of bytes, or a text like 4GiB")
    assert said[1].startswith("memory_budget '0' is not a size")
    assert said[2].startswith("workers 0")
    assert not (tmp_path / "none").exists()


def test_an_unknown_option_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        convert(RUN, tmp_path / "out", foo=1, hf_config=CONFIG)
    said = str(caught.value)
    assert said.startswith("there is no option foo; the options are hf_config, base, layout, step, dtype, rope")
    assert "\n" not in said


def test_help_shows_what_there_is() -> None:
    code = "import mtx2vllm.converter as c; print(sorted(n for n in dir(c) if n[0] != '_')); help(c)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    names = [
        "Converted", "DifferenceError", "InputError", "LostRace", "Mtx2vllmError", "NotCommitted", "Options", "Plan",
        "StorageError", "StoreUnavailable", "UsageError", "convert", "plan",
    ]  # fmt: skip
    assert said.splitlines()[0] == str(names)
    for words in ("Convert a MaxText checkpoint into a version directory", "max_shard_size: in bytes, or a text like"):
        assert words in said
