"""The command line: what it prints, where, and the status it ends in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from data_files import DATA

from mtx2vllm.converter.cli import COMMANDS, main
from mtx2vllm.converter.commands.convert import Size
from mtx2vllm.converter.commands.show import verification_text
from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.version.verify import Differing, Verification

RUN, CONFIG = str(DATA / "qwen3" / "scanned"), str(DATA / "qwen3" / "hf")


def test_help_imports_click_alone() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from mtx2vllm.converter.cli import main\n"
        "try: main(['--version'])\nexcept SystemExit as done: assert done.code == 0\n"
        "heavy = {'numpy', 'pydantic', 'tensorstore', 'jax', 'orbax', 'rich', 'google', 'ml_dtypes', 'vllm', 'torch'}\n"
        "assert not heavy & {name.partition('.')[0] for name in set(sys.modules) - before}, 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_converting_imports_neither_orbax_nor_jax_nor_vllm(tmp_path: Path) -> None:
    code = (
        "import sys; from mtx2vllm.converter.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as done: assert done.code == 0, done.code\n"
        "heavy = {'orbax', 'jax', 'vllm', 'torch', 'maxtext', 'transformers', 'ray'}\n"
        "found = heavy & {name.partition('.')[0] for name in sys.modules}\nassert not found, found\n"
    )
    arguments = ["convert", RUN, str(tmp_path / "out"), "--hf-config", CONFIG]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_nothing_warns(tmp_path: Path) -> None:
    code = "import sys; from mtx2vllm.converter.cli import main; main(sys.argv[1:])"
    arguments = ["convert", RUN, str(tmp_path / "out"), "--hf-config", CONFIG, "--layout", "hf"]
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "warn" not in ended.stderr.lower()


def test_every_command_of_this_file_has_help() -> None:
    for name, module in COMMANDS.items():
        if module.endswith("cli_convert"):
            answer = CliRunner().invoke(main, [name, "--help"])
            assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["nonsense"], ["convert"], ["convert", RUN], ["convert", RUN, "out", "--layout", "gguf"],
        ["convert", RUN, "out", "--dtype", "int4"], ["convert", RUN, "out", "--step", "-1"], ["convert", RUN, "out", "--step", "x"],
        ["convert", RUN, "out", "--max-shard-size", "0"], ["convert", RUN, "out", "--max-shard-size", "4 bananas"],
        ["convert", RUN, "out", "--memory-budget", "-1GiB"], ["convert", RUN, "out", "--max-shard-size", "9" * 400],
        ["convert", RUN, "out", "--workers", "0"], ["convert", RUN, "out", "--rope", "spiral"], ["convert", RUN, "out", "--bad"],
        ["plan"], ["plan", "--hf-config", CONFIG, "--layout", "x"], ["verify"], ["inspect"], ["fetch", "x"],
    ],
)  # fmt: skip
def test_usage_is_status_2(arguments: list[str]) -> None:
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 2
    assert "Traceback" not in answer.output
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--base", CONFIG], "--base belongs to --layout hf"),
        (["--base", CONFIG, "--layout", "hf", "--text-only"], "choose one"),
        (["--rope", "half"], "--rope is for Llama"),
        (["--ray-address", "auto"], "--ray-address belongs to --executor ray"),
    ],
)
def test_options_that_contradict_each_other(options: list[str], words: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(main, ["convert", RUN, str(tmp_path / "out"), "--hf-config", CONFIG, *options])
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert not (tmp_path / "out").exists()


def test_all_contradictions_at_once(tmp_path: Path) -> None:
    options = ["--base", CONFIG, "--text-only", "--ray-address", "auto"]
    answer = CliRunner().invoke(main, ["convert", RUN, str(tmp_path / "out"), *options])
    assert answer.exit_code == 2
    assert answer.stderr.count("error: ") == 3


@pytest.mark.parametrize(
    "chosen",
    [{"layout": "gguf"}, {"dtype": "int8"}, {"rope": "x"}, {"workers": 0}, {"max_shard_size": 1.5}, {"step": "3"}],
)
def test_the_same_from_python(chosen: dict[str, object], tmp_path: Path) -> None:
    from mtx2vllm.converter.errors import UsageError

    with pytest.raises(UsageError, match=next(iter(chosen))):
        convert(RUN, str(tmp_path / "out"), hf_config=CONFIG, **chosen)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1073741824", 1 << 30), ("1.5 kib", 1536), ("2t", 2 * 10**12), (7, 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


def test_convert_prints_one_object(tmp_path: Path) -> None:
    answer = CliRunner().invoke(main, ["convert", RUN, str(tmp_path / "out"), "--hf-config", CONFIG, "--json"])
    assert answer.exit_code == 0
    told = json.loads(answer.stdout)
    assert {"out", "layout", "family", "tensors", "bytes", "seconds", "peak_rss"} <= told.keys()
    assert (told["layout"], told["family"], told["tensors"]) == ("canonical", "qwen3", 26)
    shard = tmp_path / "out/canonical/model.safetensors"
    assert 0 < shard.stat().st_size - told["bytes"] < 20_000
    assert told["peak_rss"] > 10 << 20


def test_convert_says_one_line_on_stdout(tmp_path: Path) -> None:
    answer = CliRunner().invoke(main, ["convert", RUN, str(tmp_path / "out"), "--hf-config", CONFIG])
    assert len(answer.stdout.splitlines()) == 1
    assert "26 tensors" in answer.stdout
    assert "config: " in answer.stderr


def test_a_dry_run_writes_nothing_and_reads_no_weights(tmp_path: Path) -> None:
    import shutil

    run = shutil.copytree(RUN, tmp_path / "run")
    for file in (run / "0/items/ocdbt.process_0/d").iterdir():
        if file.stat().st_size > 60_000:
            file.write_bytes(b"")  # the weights themselves
    arguments = ["convert", str(run), str(tmp_path / "out"), "--hf-config", CONFIG, "--dry-run"]
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 0, answer.output
    assert "nothing was written" in answer.stdout
    told = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert told["tensors"] == 26
    assert not (tmp_path / "out").exists()


def test_plan_lists_on_demand() -> None:
    brief = json.loads(CliRunner().invoke(main, ["plan", "--hf-config", CONFIG, "--json"]).stdout)
    assert brief == {
        "family": "qwen3", "architecture": "Qwen3ForCausalLM", "layout": "canonical", "tensors": 26, "bytes": brief["bytes"],
        "leaves": 13,
    }  # fmt: skip
    full = json.loads(CliRunner().invoke(main, ["plan", "--hf-config", CONFIG, "--json", "--full"]).stdout)
    assert len(full["tensor_list"]) == 26
    assert len(full["leaf_list"]) == 13
    unscanned = json.loads(CliRunner().invoke(main, ["plan", "--hf-config", CONFIG, "--json", "--unscanned"]).stdout)
    assert unscanned["leaves"] == 35
    assert (unscanned["tensors"], unscanned["bytes"]) == (26, brief["bytes"])
    assert (
        "model.layers.*.self_attn.qkv_proj.weight" in CliRunner().invoke(main, ["plan", "--hf-config", CONFIG]).stdout
    )


def test_inspect(tmp_path: Path) -> None:
    answer = CliRunner().invoke(main, ["inspect", str(DATA / "trained/qwen3-scanned"), "--json"])
    told = json.loads(answer.stdout)
    assert told["step"] == 3
    assert told["steps"] == [0, 2, 3]
    assert {d["path"] for d in told["not_weights"]} >= {"opt_state", "step"}
    assert CliRunner().invoke(main, ["inspect", str(DATA / "trained/qwen3-scanned"), "--step", "2"]).exit_code == 0
    assert CliRunner().invoke(main, ["inspect", str(tmp_path)]).exit_code == 3


def test_verify_ends_in_4_where_something_differs(tmp_path: Path) -> None:
    convert(RUN, str(tmp_path / "a"), hf_config=CONFIG)
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "a")]).exit_code == 0
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "a"), "--against", CONFIG]).exit_code == 0
    shard = tmp_path / "a/canonical/model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    answer = CliRunner().invoke(main, ["verify", str(tmp_path / "a"), "--json"])
    assert answer.exit_code == 4
    assert json.loads(answer.stdout)["ok"] is False
    assert CliRunner().invoke(main, ["verify", str(tmp_path)]).exit_code == 3


def test_a_fault_of_ours_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("mtx2vllm.converter.conversion.plan", broken)
    answer = CliRunner().invoke(main, ["plan", "--hf-config", CONFIG])
    assert answer.exit_code == 1
    assert "fault in mtx2vllm" in answer.stderr
    assert "Traceback" not in answer.stderr
    monkeypatch.setenv("MTX2VLLM_TRACEBACK", "1")
    assert isinstance(CliRunner().invoke(main, ["plan", "--hf-config", CONFIG]).exception, ZeroDivisionError)


def test_too_little_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mtx2vllm.converter.conversion.plan", broken)
    answer = CliRunner().invoke(main, ["plan", "--hf-config", CONFIG])
    assert answer.exit_code == 1
    assert "--memory-budget" in answer.stderr


def test_many_problems_are_not_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtx2vllm.converter.errors import InputError

    def broken(*_: object, **__: object) -> None:
        raise InputError(f"problem {n}" for n in range(1000))

    monkeypatch.setattr("mtx2vllm.converter.conversion.plan", broken)
    answer = CliRunner().invoke(main, ["plan", "--hf-config", CONFIG])
    assert answer.exit_code == 3
    assert len(answer.stderr.splitlines()) == 51
    assert "950 more" in answer.stderr


def test_verify_names_the_first_differing_tensors_and_counts_the_rest() -> None:
    differing = [Differing(f"t{i}", 1, 2, 0.5) for i in range(23)]
    lines = verification_text(Verification(False, 30, 7, differing), "OTHER").splitlines()
    assert len(lines) == 22
    assert lines[0] == "difference: t0: 1 of 2 elements, at most 0.5"
    assert lines[-2:] == [
        "difference: and 3 more tensors; --json lists all",
        "NOT verified: 7 of 30 tensors are identical to those of OTHER",
    ]
    alone = verification_text(Verification(True, 30, 30))
    assert alone == "verified: 30 of 30 tensors have the bytes that the manifest names"
