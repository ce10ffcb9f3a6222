"""versions, pin, unpin, prune, as typed; what decides lies in converter/fleet/versions.py and is tested there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from versions import arrays, write_version

from fleet.run_source import CONFIG, Run
from mtx2vllm.converter.cli import main
from mtx2vllm.converter.commands.show_fleet import duration

NOW = time.time()


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def lease(root: Path, replica: str, loaded: int | None, age: float = 5.0, **facts: object) -> None:
    path = root / ".agents" / f"{replica}.json"
    path.parent.mkdir(exist_ok=True)
    content = {"replica": replica, "loaded": loaded, "state": "serving", "heartbeat": time.time() - age, "ttl_s": 120}
    path.write_text(json.dumps(content | facts))
    os.utime(path, (time.time() - age,) * 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        write_version(tmp_path / str(step), arrays(step))
    write_version(tmp_path / "110", arrays(110), commit=False)
    lease(tmp_path, "sampler-0", 100)
    lease(tmp_path, "sampler-1", 10, error="version 100 is refused")
    lease(tmp_path, "sampler-2", 9, age=1000)
    return tmp_path


def lines(result: Result) -> dict[str, str]:
    """Rows of the tables by their first word."""
    return {line.split()[0]: line for line in result.stdout.splitlines() if line.split()}


def test_the_table_says_who_serves_what_and_who_lags(root: Path) -> None:
    shown = lines(run("versions", root))
    assert "complete, newest" in shown["100"]
    assert shown["100"].endswith("sampler-0")
    assert "complete" not in shown["110"]
    assert shown["9"].rstrip().endswith("complete")  # a dead replica serves nothing
    assert "up to date" in shown["sampler-0"]
    assert "1 version, 90 steps" in shown["sampler-1"]
    assert "version 100 is refused" in shown["sampler-1"]
    assert "dead (lease expired)" in shown["sampler-2"]
    assert list(shown)[1:5] == ["110", "100", "10", "9"]


def test_as_json(root: Path) -> None:
    told = json.loads(run("versions", root, "--json").stdout)
    assert [v["step"] for v in told["versions"]] == [110, 100, 10, 9]
    assert {r["replica"]: r["alive"] for r in told["replicas"]} == {
        "sampler-0": True,
        "sampler-1": True,
        "sampler-2": False,
    }


def test_pin_and_unpin(root: Path) -> None:
    assert run("pin", root, 10).exit_code == 0
    shown = lines(run("versions", root))
    assert "pinned" in shown["10"]
    assert "90 steps ahead of the pin" in shown["sampler-0"]
    assert "up to date" in shown["sampler-1"]
    assert run("unpin", root).stdout == f"{root} is no longer pinned (was 10)\n"
    assert run("unpin", root).stdout == f"{root} is not pinned\n"
    assert not (root / ".pin.json").exists()


def test_what_is_not_complete_cannot_be_pinned(root: Path) -> None:
    result = run("pin", root, 110)
    assert result.exit_code == 3
    assert "holds no complete version 110" in result.stderr
    assert not (root / ".pin.json").exists()


def test_prune_shows_first_and_keeps_what_is_served(root: Path) -> None:
    shown = run("prune", root, "--keep", 1, "--dry-run")
    assert "would remove 9" in shown.stdout
    assert (root / "9").exists()
    shown = run("prune", root, "--keep", 1)
    assert "keeps 10: served by sampler-1" in shown.stdout
    assert "removed 1 version," in shown.stdout
    assert sorted(p.name for p in root.iterdir() if p.name[0] != ".") == ["10", "100", "110"]


def test_what_others_wrote_is_shown_and_stays(root: Path) -> None:
    (root / "5" / "items").mkdir(parents=True)
    (root / "5" / "items" / "_METADATA").write_text("{}")
    (root / "9" / "mine.txt").write_text("")
    os.utime(root / "5" / "items" / "_METADATA", (0, 0))
    assert lines(run("versions", root))["5"].rstrip().endswith("not a version (foreign files)")
    shown = run("prune", root, "--keep", 1).stdout
    assert "keeps 5: not a version: it holds files that mtx2vllm did not write (items/_METADATA)" in shown
    assert "9: the directory stays for files that mtx2vllm did not write (mine.txt)" in shown


@pytest.mark.parametrize("words", [("versions",), ("prune", "--keep", 1), ("unpin",)])
def test_what_is_no_root(root: Path, words: tuple[object, ...]) -> None:
    for place in (root / "nowhere", root / "9", root / "9" / "config.json"):
        result = run(*words, place)
        assert result.exit_code == 3 and str(place) in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [("versions",), ("versions", "--json"), ("prune", "--keep", 1)])
@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_trainer_s_directory_is_no_root(tmp_path: Path, words: tuple[object, ...], below: str) -> None:
    Run(tmp_path).write(3)
    result = run(*words, tmp_path / below)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"{tmp_path / below} is a trainer's checkpoint directory, not a root of versions" in result.stderr
    assert ("nothing was removed" in result.stderr) == (words[0] == "prune")


def test_an_empty_root(tmp_path: Path) -> None:
    assert "holds no versions" in run("versions", tmp_path).stdout


def test_every_and_all_contradict(tmp_path: Path) -> None:
    assert run("follow", tmp_path, tmp_path, "--every", 2, "--all").exit_code == 2


@pytest.mark.parametrize(
    ("run_dir", "root_dir", "words"),
    [
        ("run", "run", "are the same directory"),
        ("run", "run/checkpoints", "lies inside the run"),
        ("run", "run/versions", "lies inside the run"),
        ("run", "link/versions", "lies inside the run"),
        ("run/checkpoints", "run/checkpoints/", "are the same directory"),
        ("run", ".", "lies inside the root"),
        ("run/checkpoints", "run", "lies inside the root"),
        ("file", "root", "is a file"),
        ("run", "file", "is a file"),
    ],
)
def test_a_run_and_its_root_lie_apart(tmp_path: Path, run_dir: str, root_dir: str, words: str) -> None:
    Run(tmp_path / "run").write(3)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    result = run("follow", f"{tmp_path}/{run_dir}", f"{tmp_path}/{root_dir}", "--hf-config", CONFIG)
    assert (result.exit_code, words in result.stderr) == (3, True), result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_hf_without_a_config(tmp_path: Path) -> None:
    Run(tmp_path / "run").write(3)
    result = run("follow", tmp_path / "run", tmp_path / "root", "--layout", "hf")
    assert result.exit_code == 3 and "pass --hf-config" in result.stderr
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("word", ["abc", "-1", "007x"])
def test_a_step_is_a_number(root: Path, word: str) -> None:
    result = run("pin", root, "--", word)
    assert result.exit_code == 2 and f"{word!r} is not a step" in result.stderr


def test_help_costs_nothing() -> None:
    heavy = "{'numpy', 'tensorstore', 'pydantic', 'rich', 'yaml', 'prometheus_client', 'google'} & set(sys.modules)"
    code = f"import sys, mtx2vllm.converter.commands.fleet; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200000, "2 d")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_follower_does_not_write_into_a_version(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mtx2vllm.json").write_text("{}")
    found = run("follow", tmp_path / "run", tmp_path / "1")
    assert found.exit_code == 3 and "is itself a version" in found.output
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["mtx2vllm.json"]


@pytest.mark.parametrize("option", ["--poll", "--grace"])
def test_seconds_are_numbers(tmp_path: Path, option: str) -> None:
    found = run("follow", tmp_path / "run", tmp_path / "root", option, "nan")
    assert found.exit_code == 2 and "is not a number of seconds" in found.output
