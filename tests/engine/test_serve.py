"""`MTX2VLLM_WATCH=ROOT vllm serve MODEL`: the whole way, with nothing but environment and HTTP."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_files import DATA
from fleet.live import CONTENTS, content_of

from engine.serving import ServerProcess, Span, bare_model, differences, spans_of
from mtx2vllm.converter.conversion import convert

pytestmark = pytest.mark.engine

# Without a grace period vLLM kills its engine core at once, and a lease has to expire.
DUMMY = ("--load-format", "dummy", "--shutdown-timeout", "20")
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [40, 41, 42, 43]]


class Asking(threading.Thread):
    """A request of its own thread."""

    def __init__(self, server: ServerProcess, prompt: list[int], tokens: int) -> None:
        super().__init__(daemon=True)
        self.server, self.prompt, self.tokens = server, prompt, tokens
        self.choices: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for choice in self.server.stream(self.prompt, self.tokens):
                self.choices.append(choice)
        except Exception as error:
            self.error = error

    def spans(self) -> list[Span]:
        self.join(300)
        assert self.error is None, self.error
        return spans_of(self.prompt, self.choices)

    def count(self) -> int:
        return sum(len(choice["token_ids"] or []) for choice in self.choices)


def publish(home: Path, step: int) -> None:
    """A version that appears at once, moved in from outside."""
    aside = home / f"aside-{step}"
    convert(str(CONTENTS[content_of(step)]), str(aside), hf_config=str(DATA / "qwen3/hf"))
    aside.rename(home / "root" / str(step))


def lease(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "root/.agents/sampler.json").read_text())
    return found


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One server through three versions; the tests look at what it said."""
    home = tmp_path_factory.mktemp("serve")
    (home / "root").mkdir()
    server = ServerProcess(bare_model(home / "model"), home / "root", home / "log", *DUMMY)
    told: dict[str, Any] = {}
    server.start()
    try:
        server.wait_for_server()
        held = Asking(server, PROMPTS[1], 8)
        held.join(2)
        told["before"] = (
            held.count(),
            held.is_alive(),
            server.agent_page("/readyz")[0],
            server.agent_page("/healthz")[0],
        )
        publish(home, 10)
        told["held"] = held.spans()
        told["ready"] = (server.agent_page("/readyz")[0], server.loaded())
        long = Asking(server, PROMPTS[0], 480)
        for step in (20, 30):
            begun = long.count()
            server.wait(lambda: long.count() >= begun + 20, 120, "tokens")  # noqa: B023
            publish(home, step)
            server.wait(lambda: server.loaded() == step, 120, f"version {step}")  # noqa: B023
        told["long"] = long.spans()
        told["after"] = Asking(server, PROMPTS[2], 8).spans()
        told["metrics"], told["lease"] = server.agent_page("/metrics")[1], lease(home)
        told["status"], told["left"] = server.stop(), server.left()
    finally:
        server.kill()
    told["root"], told["log"] = home / "root", (home / "log").read_text()
    yield told


def test_no_request_is_answered_before_the_first_version(story: dict[str, Any]) -> None:
    assert story["before"] == (0, True, 503, 200)
    assert [(s.version, len(s.tokens)) for s in story["held"]] == [("10", 8)]
    assert story["ready"] == (200, 10)


def test_a_request_in_flight_goes_through_three_versions(story: dict[str, Any]) -> None:
    spans = story["long"]
    for s in spans:
        print(f"version {s.version}: {len(s.tokens)} tokens after {len(s.before)}, begins {list(s.tokens[:5])}")
    assert [s.version for s in spans] == ["10", "20", "30"]
    assert sum(len(s.tokens) for s in spans) == 480
    assert [s.version for s in story["after"]] == ["30"]


def test_every_span_is_what_a_cold_engine_of_that_version_says(story: dict[str, Any]) -> None:
    spans = [*story["held"], *story["long"], *story["after"]]
    more = {"version": str(story["root"] / "30"), "root": str(story["root"]), "prompt": PROMPTS[2]}
    imposter = replace(story["held"][0], version="20")  # what 10 said, in the name of 20
    problems, found = differences([*spans, imposter], content_of, more)
    assert [problem.partition(": ")[0] for problem in problems] == ["version 20, 8 tokens after 3"]
    started = found["started_from"]
    assert (started["ready"], started["loaded"], started["reloads"], started["weight_version"]) == (True, 30, 0, "30")
    assert tuple(started["tokens"]) == story["after"][0].tokens
    assert [{int(i): p for i, p in step.items()} for step in started["logprobs"]] == list(story["after"][0].logprobs)


def test_metrics_and_the_lease_say_what_is_served(story: dict[str, Any]) -> None:
    lines = story["metrics"].splitlines()
    assert "mtx2vllm:loaded_version 30.0" in lines
    assert "mtx2vllm:ready 1.0" in lines
    assert "mtx2vllm:reload_pause_seconds_count 3.0" in lines
    assert story["log"].count("loaded version ") == 3  # with each phase's seconds
    assert (story["lease"]["loaded"], story["lease"]["state"], story["lease"]["error"]) == (30, "serving", None)


def test_a_stop_of_the_engine_is_one_of_the_agent(story: dict[str, Any]) -> None:
    assert story["status"] == 0
    assert story["left"] == []
    assert not (story["root"] / ".agents/sampler.json").exists()
    assert "Traceback" not in story["log"]


@pytest.mark.soak
def test_with_unready_fail_requests_fail_until_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    model = bare_model(tmp_path / "model")
    server = ServerProcess(model, tmp_path / "root", tmp_path / "log", *DUMMY, MTX2VLLM_UNREADY="fail")
    server.start()
    try:
        server.wait_for_server()
        server.wait(lambda: server.agent_page("/healthz")[0] == 200, 60, "the agent")
        early = Asking(server, PROMPTS[1], 8)
        early.join(30)
        assert not early.is_alive()
        assert early.error is not None
        assert early.count() == 0
        assert server.page("/health")[0] == 200
        publish(tmp_path, 10)
        server.wait(lambda: server.loaded() == 10, 120, "version 10")
        assert [s.version for s in Asking(server, PROMPTS[1], 8).spans()] == ["10"]
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.mark.soak
def test_a_server_started_from_a_version_has_it_loaded_and_follows(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    publish(tmp_path, 10)
    for file in (DATA / "tokenizer").iterdir():
        shutil.copyfile(file, tmp_path / "root/10" / file.name)
    server = ServerProcess(
        tmp_path / "root/10",
        tmp_path / "root",
        tmp_path / "log",
        "--load-format",
        "mtx2vllm",
        "--shutdown-timeout",
        "20",
    )
    server.start()
    try:
        server.wait_for_server()
        assert server.loaded() == 10
        assert json.loads(server.agent_page("/readyz")[1])["reloads"] == 0
        first = Asking(server, PROMPTS[1], 8).spans()
        publish(tmp_path, 20)
        server.wait(lambda: server.loaded() == 20, 120, "version 20")
        second = Asking(server, PROMPTS[2], 8).spans()
        assert [s.version for s in first + second] == ["10", "20"]
        assert server.stop() == 0
    finally:
        server.kill()
    assert differences(first + second, content_of)[0] == []
