"""batch: validated as a whole, resumable, and honest about what is done."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from data_files import DATA, digests, oracle

from mtx2vllm.converter.cli import main
from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError, Mtx2vllmError
from mtx2vllm.converter.fleet import batch as batches
from mtx2vllm.converter.fleet.batch import check_batch, run_batch
from mtx2vllm.converter.version.verify import verify_version

RUN = DATA / "trained" / "qwen3-scanned"
QWEN3 = DATA / "qwen3" / "hf"
GEMMA2 = DATA / "gemma2"


def write(home: Path, text: str) -> str:
    path = home / "jobs.yaml"
    path.write_text(text)
    return str(path)


def release(home: Path) -> str:
    return write(
        home,
        f"""
defaults:
  layout: hf
  hf_config: {QWEN3}
jobs:
  - checkpoint: {RUN}
    steps: [2, 3]
    layout: [hf, canonical]
    out: out/qwen3-{{step}}-{{layout}}
  - checkpoint: {GEMMA2}/scanned
    hf_config: {GEMMA2}/hf
    out: out/gemma2
""",
    )


def test_a_release(tmp_path: Path) -> None:
    outcomes = run_batch(release(tmp_path))
    assert [(o.result, o.step, o.layout) for o in outcomes] == [
        ("converted", 2, "hf"), ("converted", 2, "canonical"), ("converted", 3, "hf"), ("converted", 3, "canonical"),
        ("converted", 0, "hf"),
    ]  # fmt: skip
    for outcome in outcomes:
        assert verify_version(outcome.out).ok
    assert verify_version(str(tmp_path / "out/qwen3-3-canonical"), str(tmp_path / "out/qwen3-3-hf")).ok
    again = run_batch(release(tmp_path))
    assert {o.result for o in again} == {"done before"}


def test_what_it_writes_is_maxtext_s_own_export(tmp_path: Path) -> None:
    text = f"jobs:\n- {{checkpoint: {RUN}, out: three, layout: hf, dtype: float32, hf_config: {QWEN3}}}\n"
    assert run_batch(write(tmp_path, text))[0].step == 3
    assert digests(tmp_path / "three") == oracle(RUN / "maxtext_hf_step3_digests.json")


def test_a_killed_batch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, runs = release(tmp_path), batches.carry_out, []

    def killed(*args: object, **chosen: object) -> object:
        runs.append(1)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return real(*args, **chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(batches, "carry_out", killed)
    with pytest.raises(KeyboardInterrupt):
        run_batch(path)
    monkeypatch.setattr(batches, "carry_out", real)
    results = [o.result for o in run_batch(path)]
    assert results == ["done before"] * 2 + ["converted"] * 3


def test_what_a_killed_conversion_left_is_cleaned(tmp_path: Path) -> None:
    path = release(tmp_path)
    out = tmp_path / "out/qwen3-2-hf"
    out.mkdir(parents=True)
    (out / "model.safetensors").write_bytes(b"half")
    claim = {"host": "elsewhere", "pid": 1, "heartbeat": 0, "ttl_s": 0, "files": ["model.safetensors"]}
    (out / ".mtx2vllm.claim.json").write_text(json.dumps(claim))
    assert all(o.ok for o in run_batch(path))
    assert verify_version(str(out)).ok


def test_a_failed_job_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = release(tmp_path), batches.carry_out

    def failing(job: object, checkpoint: str, out: str, **chosen: object) -> object:
        if out.endswith("2-canonical"):
            raise Mtx2vllmError("the disk is full")
        return real(job, checkpoint, out, **chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(batches, "carry_out", failing)
    answer = CliRunner().invoke(main, ["batch", path, "--json"])
    assert answer.exit_code == 1
    told = json.loads(answer.stdout)
    assert not told["ok"]
    assert [j["result"] for j in told["jobs"]] == ["converted", "failed"] + ["converted"] * 3
    assert told["jobs"][1]["errors"] == ["the disk is full"]
    monkeypatch.setattr(batches, "carry_out", real)
    answer = CliRunner().invoke(main, ["batch", path])
    assert answer.exit_code == 0
    assert "5 of 5 are there (4 were before), 0 failed" in answer.stdout


BAD = [
    ("jobs: []", 1, "jobs"),
    ("jobs:\n- checkpoint: a\n", 2, "jobs.0.out is missing"),
    ("defaults:\n  layuot: hf\njobs:\n- {checkpoint: a, out: b}\n", 2, "defaults.layuot is not known"),
    ("jobs:\n- checkpoint: a\n  out: b\n  layout: huggingface\n", 4, "jobs.0.layout"),
    ("jobs:\n- checkpoint: a\n  out: b\n  max_shard_size: four\n", 4, "'four' is not a size"),
    ("jobs:\n- checkpoint: a\n  out: b\n  step: -1\n", 4, "jobs.0.step"),
    ("jobs:\n- checkpoint: a\n  out: b\n  step: 1\n  steps: [2]\n", 2, "step and steps cannot both be given"),
    ("jobs:\n- checkpoint: a\n  out: b/{name}\n", 2, "{name}"),
    ("jobs:\n- checkpoint: a\n  out: b\n  out: c\n", 4, "'out' stands twice"),
    ("jobs:\n- checkpoint: a\n\tout: b\n", 3, "not valid YAML"),
    ("- checkpoint: a\n", 1, "a mapping with `jobs`"),
]


@pytest.mark.parametrize(("text", "line", "words"), BAD)
def test_a_bad_file_names_the_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        check_batch(path)
    assert any(p.startswith(f"{path}:{line}: ") and words in p for p in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("layout: huggingface", "jobs.0.layout = 'huggingface': canonical, hf, or a list of these was expected"),
        ("layout: []", "jobs.0.layout = []: canonical, hf, or a list of these was expected"),
        ("layout: [hf, x]", "jobs.0.layout = ['hf', 'x']: canonical, hf, or a list of these was expected"),
        ("step: last", "jobs.0.step = 'last': a step's number or newest was expected"),
        ("step: -3", "jobs.0.step = -3: a step's number or newest was expected"),
        ("steps: [1, a]", "jobs.0.steps = [1, 'a']: a list of steps' numbers, or all, was expected"),
        ("dtype: fp8", "jobs.0.dtype = 'fp8': input should be 'bfloat16', 'float32' or 'source'"),
    ],
)
def test_one_line_for_a_value_of_the_wrong_kind(tmp_path: Path, line: str, sentence: str) -> None:
    path = write(tmp_path, f"jobs:\n- checkpoint: a\n  out: b\n  {line}\n")
    with pytest.raises(InputError) as caught:
        check_batch(path)
    assert list(caught.value.problems) == [f"{path}:4: {sentence}"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jobs:\n- {checkpoint: a, out: b, hf-config: c}\n", "jobs.0.hf-config is not known; did you mean hf_config?"),
        (
            "jobs:\n- {checkpoint: a, out: b}\ndefaults: {Layout: hf}\n",
            "defaults.Layout is not known; did you mean layout?",
        ),
        ("jobs:\n- {checkpoint: a, out: b}\ndefault: {layout: hf}\n", "default is not known; did you mean defaults?"),
    ],
)
def test_a_misspelt_setting_is_guessed(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_batch(write(tmp_path, text))
    assert words in str(caught.value)


def test_all_problems_at_once_and_nothing_runs(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.pdf").write_bytes(b"mine")
    path = write(
        tmp_path,
        f"""jobs:
- {{checkpoint: nowhere, out: a, hf_config: {QWEN3}}}
- {{checkpoint: {RUN}, out: b, hf_config: {GEMMA2}/hf}}
- {{checkpoint: {RUN}, out: c, hf_config: {QWEN3}, step: 7}}
- {{checkpoint: {RUN}, out: foreign, hf_config: {QWEN3}}}
- {{checkpoint: {RUN}, out: d, hf_config: {QWEN3}, steps: [2, 3]}}
- {{checkpoint: {RUN}, out: e, hf_config: {QWEN3}}}
- {{checkpoint: {RUN}, out: e/, hf_config: {QWEN3}}}
- {{checkpoint: {RUN}, out: e/f, hf_config: {QWEN3}}}
""",
    )
    answer = CliRunner().invoke(main, ["batch", path])
    assert answer.exit_code == 3
    lines = [f"error: {path}:{n}: " for n in (2, 3, 4, 5, 6, 8, 9)]
    assert all(any(text.startswith(line) for text in answer.stderr.splitlines()) for line in lines), answer.stderr
    assert not {p.name for p in tmp_path.iterdir()} - {"jobs.yaml", "foreign"}
    assert [p.name for p in foreign.iterdir()] == ["thesis.pdf"]


def job(home: Path, **more: object) -> str:
    return write(home, "jobs:\n- " + json.dumps({"checkpoint": str(RUN), "out": "a", "hf_config": str(QWEN3), **more}))


@pytest.mark.parametrize(
    ("made", "asked", "words"),
    [
        ({"step": 2}, {}, "holds step 2, and this job wants step 3"),
        ({}, {"layout": "hf"}, "layout canonical, and this job says hf"),
        ({}, {"dtype": "float32"}, "dtype bfloat16, and this job says float32"),
        ({}, {"max_shard_size": "100KB"}, "max_shard_size"),
    ],
)
def test_another_version_in_its_place_is_not_done(
    tmp_path: Path, made: dict[str, object], asked: dict[str, object], words: str
) -> None:
    convert(str(RUN), str(tmp_path / "a"), hf_config=str(QWEN3), **made)
    before = (tmp_path / "a/mtx2vllm.json").read_bytes()
    with pytest.raises(InputError, match=words):
        run_batch(job(tmp_path, **asked))
    assert (tmp_path / "a/mtx2vllm.json").read_bytes() == before
    assert run_batch(job(tmp_path, overwrite=True, **asked))[0].result == "converted"
    assert run_batch(job(tmp_path, overwrite=True, **asked))[0].result == "done before"


def test_another_config_is_not_done(tmp_path: Path) -> None:
    convert(str(RUN), str(tmp_path / "a"), hf_config=str(QWEN3))
    own = tmp_path / "config.json"
    own.write_text(json.dumps(json.loads((QWEN3 / "config.json").read_text()) | {"rope_theta": 5.0}))
    with pytest.raises(InputError, match=r"another config\.json"):
        run_batch(job(tmp_path, hf_config=str(own)))


def test_a_damaged_version_is_not_done(tmp_path: Path) -> None:
    convert(str(RUN), str(tmp_path / "a"), hf_config=str(QWEN3))
    shard = tmp_path / "a/canonical/model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match="truncated"):
        run_batch(job(tmp_path))
    assert run_batch(job(tmp_path, overwrite=True))[0].result == "converted"


def test_a_version_of_another_run_is_not_done(tmp_path: Path) -> None:
    convert(str(DATA / "qwen3/scanned"), str(tmp_path / "a"), hf_config=str(QWEN3))
    with pytest.raises(InputError, match="this job"):
        run_batch(job(tmp_path, step=3))


def test_a_version_given_as_a_step_directory_is_the_same(tmp_path: Path) -> None:
    convert(str(RUN / "checkpoints/3"), str(tmp_path / "a"), hf_config=str(QWEN3))
    assert run_batch(job(tmp_path))[0].result == "done before"


def test_all_steps_of_a_run(tmp_path: Path) -> None:
    assert [o.step for o in run_batch(job(tmp_path, steps="all", out="s{step}"))] == [0, 2, 3]
    assert (tmp_path / "s2/mtx2vllm.json").exists()


def test_paths_count_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "release", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(RUN, home / "runs/a")
    shutil.copytree(QWEN3, home / "configs/qwen3")
    write(home, "jobs: [{checkpoint: runs/a, hf_config: configs/qwen3, out: out/a}]")
    monkeypatch.chdir(elsewhere)
    assert run_batch("../release/jobs.yaml")[0].result == "converted"
    monkeypatch.chdir(home)
    assert run_batch("jobs.yaml")[0].result == "done before"
    assert verify_version(str(home / "out/a")).ok


def test_a_disk_that_is_too_small_is_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(batches.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(InputError, match="1,000 are free"):
        run_batch(release(tmp_path))
