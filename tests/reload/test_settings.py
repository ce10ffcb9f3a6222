"""The environment: everything that is wrong in one error, and nothing assumed."""

from pathlib import Path

import pytest

from mtx2vllm.converter.errors import InputError
from mtx2vllm.reload import settings
from mtx2vllm.reload.settings import Policy, host_name, parse_policy, read_environment, settings_for


def test_unset_means_off() -> None:
    assert read_environment({}) is None
    assert read_environment({"MTX2VLLM_WATCH": "", "MTX2VLLM_POLICY": "nonsense"}) is None


def test_defaults() -> None:
    found = read_environment({"MTX2VLLM_WATCH": "/r/", "MTX2VLLM_POLICY": "", "HOME": "/"})
    assert found is not None
    assert (found.watch, found.policy, found.poll, found.requests) == ("/r", Policy(None), 1.0, "preempt")
    assert (found.unready, found.swap, found.metrics_port, found.metrics_host) == ("wait", "auto", None, "127.0.0.1")
    assert found.replica == host_name() and found.cache_dir is None
    assert settings_for("gs://b/r").poll == 5.0 and settings_for("gs://b/r", poll_seconds=2).poll == 2.0


def test_everything_set() -> None:
    found = read_environment({
        "MTX2VLLM_WATCH": "gs://bucket/versions/", "MTX2VLLM_POLICY": "step:120", "MTX2VLLM_POLL_SECONDS": "0.5",
        "MTX2VLLM_CACHE_DIR": "/cache", "MTX2VLLM_CACHE_SIZE": "1.5GiB", "MTX2VLLM_REPLICA": "pod-7.a_b",
        "MTX2VLLM_METRICS_PORT": "9400", "MTX2VLLM_METRICS_HOST": "0.0.0.0", "MTX2VLLM_REQUESTS": "drain",
        "MTX2VLLM_UNREADY": "fail", "MTX2VLLM_SWAP": "inplace", "MTX2VLLM_SCREEN": "nan", "MTX2VLLM_TRACEBACK": "1",
    })  # fmt: skip
    assert found is not None and found.watch == "gs://bucket/versions" and found.policy == Policy(120)
    assert (found.poll, found.cache_size, found.metrics_port) == (0.5, 3 << 29, 9400)


def test_every_problem_at_once_with_its_name() -> None:
    with pytest.raises(InputError) as caught:
        read_environment({
            "MTX2VLLM_WATCH": "s3://x", "MTX2VLLM_POLICY": "newest", "MTX2VLLM_POLL_SECONDS": "0",
            "MTX2VLLM_CACHE_SIZE": "much", "MTX2VLLM_REPLICA": "../../etc", "MTX2VLLM_METRICS_PORT": "http",
            "MTX2VLLM_REQUESTS": "drop", "MTX2VLLM_UNREADY": "maybe", "MTX2VLLM_SWAP": "fast", "MTX2VLLM_POLCY": "x",
        })  # fmt: skip
    problems = list(caught.value.problems)
    assert len(problems) == 10 and all(problem.startswith("MTX2VLLM_") for problem in problems)
    assert any("did you mean MTX2VLLM_POLICY?" in problem for problem in problems)
    assert any("only local paths and gs:// are supported" in problem for problem in problems)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e9", "soon"])
def test_poll_seconds(value: str) -> None:
    with pytest.raises(InputError, match="MTX2VLLM_POLL_SECONDS"):
        read_environment({"MTX2VLLM_WATCH": "/r", "MTX2VLLM_POLL_SECONDS": value})


@pytest.mark.parametrize(("text", "step"), [("latest", None), ("step:0", 0), ("step:120", 120), (" latest ", None)])
def test_policy(text: str, step: int | None) -> None:
    assert parse_policy(text) == Policy(step) and str(Policy(step)) == text.strip()


@pytest.mark.parametrize("text", ["", "step:", "step:01", "step:-1", "step:1.5", "Latest", "step:1 2", "120"])
def test_policies_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        parse_policy(text)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "-x", "x" * 201, "a\0", "..", "naïve"])
def test_replica_names_are_file_names(name: str) -> None:
    with pytest.raises(InputError, match="replica"):
        settings_for("/r", replica=name)


def test_a_relative_root_stays_when_the_process_moves(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings_for("root").watch == str(tmp_path / "root")


def test_a_host_name_that_is_no_file_name(monkeypatch) -> None:
    monkeypatch.setattr(settings.socket, "gethostname", lambda: ".we ird/näme")
    assert settings_for("/r", replica=host_name()).replica == "we-ird-n-me"


def test_an_option_that_is_none_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(InputError, match=r"^replicas is not a setting of the agent; did you mean replica\?$"):
        settings_for("/versions", replicas="a")
    with pytest.raises(InputError, match=r"^name is not a setting of the agent; known are cache_dir, cache_size, "):
        settings_for("/versions", name="a")
