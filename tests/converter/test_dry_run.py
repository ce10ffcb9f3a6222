"""A dry run says what the run would say: the same refusals, the same status, and not a byte changed."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from data_files import DATA

from mtx2vllm.converter.cli import main
from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.version.adopt import adopt

RUN, CONFIG = DATA / "qwen3" / "scanned", DATA / "qwen3" / "hf"


def finished(out: Path) -> None:
    convert(RUN, out, hf_config=CONFIG)


def foreign(out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine")


def foreign_in_a_version(out: Path) -> None:
    finished(out)
    (out / "notes.txt").write_text("mine")


def adopted(out: Path) -> None:
    adopt(CONFIG, out)


def a_file(out: Path) -> None:
    out.write_text("mine")


def claimed(out: Path) -> None:
    out.mkdir()
    claim = {"host": f"not-{socket.gethostname()}", "pid": os.getpid(), "heartbeat": time.time(), "ttl_s": 3600.0}
    (out / ".mtx2vllm.claim.json").write_text(json.dumps(claim))


def contents(place: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in [place, *place.rglob("*")] if p.is_file()}


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (finished, [], "is a finished version already"),
        (foreign, [], "holds files that mtx2vllm did not write (notes.txt)"),
        (foreign_in_a_version, ["--overwrite"], "holds files that mtx2vllm did not write (notes.txt)"),
        (adopted, ["--overwrite"], "is an adopted Hugging Face directory"),
        (a_file, [], "is a file; OUT must be a directory"),
        (claimed, [], "is being written by process"),
    ],
)
def test_what_a_run_refuses_a_dry_run_refuses(
    make: Callable[[Path], None], options: list[str], words: str, tmp_path: Path
) -> None:
    out = tmp_path / "7"
    make(out)
    before = contents(out)
    arguments = ["convert", str(RUN), str(out), "--hf-config", str(CONFIG), *options]
    for extra in (["--dry-run"], ["--dry-run", "--json"], []):
        answer = CliRunner().invoke(main, [*arguments, *extra])
        assert (answer.exit_code, answer.stdout) == (3, ""), (extra, answer.output)
        errors = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and words in errors[0]
        assert contents(out) == before


def test_inside_the_checkpoint() -> None:
    inside = str(RUN / "0" / "out")
    answer = CliRunner().invoke(main, ["convert", str(RUN), inside, "--hf-config", str(CONFIG), "--dry-run"])
    assert answer.exit_code == 3 and "lies inside the checkpoint" in answer.stderr


def test_an_old_version_may_be_overwritten_and_a_killed_run_s_rest_taken(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    claimed(tmp_path / "dead")
    claim = tmp_path / "dead" / ".mtx2vllm.claim.json"
    told = json.loads(claim.read_text()) | {"heartbeat": 0.0, "ttl_s": 1.0, "files": ["canonical/model.safetensors"]}
    claim.write_text(json.dumps(told))
    (tmp_path / "dead" / "canonical").mkdir()
    (tmp_path / "dead" / "canonical" / "model.safetensors").write_text("half")
    os.utime(claim, (0, 0))
    before = contents(tmp_path)
    for out, options in (("out", ["--overwrite"]), ("dead", []), ("new", [])):
        arguments = ["convert", str(RUN), str(tmp_path / out), "--hf-config", str(CONFIG), "--dry-run", *options]
        answer = CliRunner().invoke(main, arguments)
        assert (answer.exit_code, "would write" in answer.stdout) == (0, True), answer.output
    assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()
    convert(RUN, tmp_path / "dead", hf_config=CONFIG)
