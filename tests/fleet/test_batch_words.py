"""What `batch` says of bad files and of weights that are not finite, as typed; and `follow --help`."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from make_run import read_step, write_step

from fleet.run_source import CONFIG, STEPS
from mtx2vllm.converter.cli import main

WEIGHT = "params.params.decoder.layers.mlp.wo.kernel"


def run(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(main, [str(word) for word in words])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("jobs: []", "jobs is empty; at least one job must stand there"),
        ("jobs:", "jobs = None: a list was expected"),
        ("jobs: 3", "jobs = 3: a list was expected"),
        ("jobs: [{checkpoint: '', out: a}]", "jobs.0.checkpoint is empty; something must stand there"),
    ],
)
def test_plain_words(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "jobs.yaml").write_text(text)
    result = run("batch", tmp_path / "jobs.yaml")
    assert result.exit_code == 3 and f"jobs.yaml:1: {sentence}\n" in result.stderr


def test_weights_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    arrays = read_step(STEPS / "3")
    arrays[WEIGHT] = arrays[WEIGHT].copy()
    arrays[WEIGHT][3, :2, 5] = np.nan, np.inf  # of two layers
    write_step(tmp_path / "run" / "3", arrays)
    job = {"hf_config": CONFIG, "layout": "hf"}
    jobs = [job | {"checkpoint": "run", "out": "bad"}, job | {"checkpoint": str(STEPS), "out": "good"}]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    table = run("batch", tmp_path / "jobs.yaml").stdout
    assert table.count("converted, NaN or infinity in 2 tensors") == 1
    assert table.endswith("2 of 2 are there (0 were before), 0 failed; 1 with NaN or infinity\n")
    for path in (tmp_path / "bad", tmp_path / "good"):
        path.rename(path.with_suffix(".old"))
    told = json.loads(run("batch", tmp_path / "jobs.yaml", "--json").stdout)
    assert [(job["result"], job["nonfinite"]) for job in told["jobs"]] == [("converted", 2), ("converted", 0)]
    again = json.loads(run("batch", tmp_path / "jobs.yaml", "--json").stdout)
    assert [(job["result"], job["nonfinite"]) for job in again["jobs"]] == [("done before", None)] * 2


def test_help_names_the_argument_that_is_there() -> None:
    assert "CKPT" not in run("follow", "--help").stdout and "looked for at RUN" in run("follow", "--help").stdout
    assert "looked for at CKPT" in run("convert", "--help").stdout
