"""The environment: everything that is wrong in one error, and nothing assumed."""

from pathlib import Path

import pytest

from mtx2vllm.converter.errors import InputError
from mtx2vllm.reload import settings
from mtx2vllm.reload.settings import (
    Policy,
    environment_problems,
    host_name,
    parse_policy,
    read_environment,
    settings_for,
)


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


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("WATCH", "s3://x", "is wrong: only local paths and gs:// are supported."),
        ("POLL_SECONDS", "0", "is too small; it must be more than 0."),
        ("POLL_SECONDS", "86401", "is too large; it may be at most 86400."),
        ("POLL_SECONDS", "soon", "is no number."),
        ("POLL_SECONDS", "nan", "is no number."),
        ("POLL_SECONDS", "inf", "is no number."),
        ("CACHE_SIZE", "lots", "is not a size; write for example 4GiB or 500MB."),
        ("CACHE_SIZE", "0", "is not a size; write for example 4GiB or 500MB."),
        ("METRICS_PORT", "-1", "is too small; it must be at least 0."),
        ("METRICS_PORT", "65536", "is too large; it may be at most 65535."),
        ("METRICS_PORT", "http", "is no whole number."),
        ("METRICS_PORT", "9" * 5000, "is no whole number."),
        ("POLICY", "newest", "is neither `latest` nor `step:N`."),
        ("REPLICA", "a/b", "may hold letters, digits, '.', '_' and '-' only (it becomes a file's name)."),
        ("REQUESTS", "drop", "is not known; it may be preempt, keep or drain."),
        ("UNREADY", "maybe", "is not known; it may be wait or fail."),
        ("SWAP", "fast", "is not known; it may be auto, double or inplace."),
        ("SCREEN", "inf", "is not known; it may be off or nan."),
    ],
)
def test_every_constraint_is_told_in_plain_words(name: str, value: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_environment({"MTX2VLLM_WATCH": "/r"} | {f"MTX2VLLM_{name}": value})
    assert list(caught.value.problems) == [f"MTX2VLLM_{name} = {value!r} {words}"]
    with pytest.raises(InputError, match="cache_dir = 5 is no text"):
        settings_for("/r", cache_dir=5)


def test_the_environment_is_examined_without_a_root_too() -> None:
    assert environment_problems({}) == environment_problems({"MTX2VLLM_POLICY": "latest", "HOME": "/"}) == []
    assert environment_problems({"MTX2VLLM_WACH": "/r"}) == [
        "MTX2VLLM_WACH is not a variable of mtx2vllm; did you mean MTX2VLLM_WATCH?"
    ]
    [problem] = environment_problems({"MTX2VLLM_CACHE_SIZE": "lots"})
    assert problem.startswith("MTX2VLLM_CACHE_SIZE = 'lots' is not a size")


@pytest.mark.parametrize("size", ["32GiB", "1536MiB", "500MB", "7TB", "1KiB", "1000001"])
def test_settings_are_shown_as_one_would_write_them(size: str) -> None:
    given = {"MTX2VLLM_WATCH": "gs://b/r", "MTX2VLLM_CACHE_SIZE": size, "MTX2VLLM_REPLICA": "a"}
    found = read_environment(given)
    assert found is not None
    shown = found.shown()
    assert shown == {
        "WATCH": "gs://b/r", "POLICY": "latest", "POLL_SECONDS": "5", "CACHE_SIZE": size, "REPLICA": "a",
        "METRICS_HOST": "127.0.0.1", "REQUESTS": "preempt", "UNREADY": "wait", "SWAP": "auto", "SCREEN": "off",
    }  # fmt: skip
    again = read_environment({f"MTX2VLLM_{name}": value for name, value in shown.items()})
    assert again is not None and again.shown() == shown


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
