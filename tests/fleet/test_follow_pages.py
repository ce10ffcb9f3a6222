"""What a follower tells over HTTP and in its log."""

import io
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.fleet import follow_log
from mtx2vllm.converter.fleet.endpoint import Endpoint
from mtx2vllm.converter.fleet.follow import Follower, Following, Stop
from mtx2vllm.converter.fleet.follow_lease import RootLease
from mtx2vllm.converter.fleet.follow_run import pages


@pytest.fixture
def quiet_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("mtx2vllm").setLevel(logging.NOTSET)


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_and_health(tmp_path: Path) -> None:
    now = [1000.0]
    chosen = Following(str(tmp_path / "run"), str(tmp_path / "root"))
    follower = Follower(chosen, RootLease(chosen.root), Stop(), lambda: now[0])
    follower.status.counts["published"] = 7
    follower.status.published = 70
    with Endpoint("127.0.0.1", 0, pages(follower)) as endpoint:
        status, text = get(endpoint.port, "/metrics")
        assert status == 200
        assert 'mtx2vllm_follower_steps_total{outcome="published"} 7.0' in text
        assert "mtx2vllm_follower_published_step 70.0" in text
        assert get(endpoint.port, "/healthz")[0] == 200
        now[0] += 301
        status, text = get(endpoint.port, "/healthz")
        assert (status, json.loads(text)["ok"]) == (503, False)
        follower.turn()
        assert get(endpoint.port, "/healthz")[0] == 200
        assert get(endpoint.port, "/")[0] == 404


def test_a_port_in_use_is_a_sentence() -> None:
    with Endpoint("127.0.0.1", 0, {}) as first, pytest.raises(InputError, match="--port"):
        Endpoint("127.0.0.1", first.port, {})


@pytest.mark.usefixtures("quiet_root")
def test_log_lines_as_json() -> None:
    stream = io.StringIO()
    follow_log.configure("json", stream)
    logging.getLogger("mtx2vllm.converter.fleet.follow").info(
        "published %d", 3, extra={"event": "published", "step": 3}
    )
    logging.getLogger("somebody.else").info("chatter")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 1
    assert {k: lines[0][k] for k in ("level", "message", "event", "step")} == {
        "level": "info", "message": "published 3", "event": "published", "step": 3,
    }  # fmt: skip
    assert lines[0]["time"].endswith("Z")


@pytest.mark.usefixtures("quiet_root")
def test_log_lines_as_text() -> None:
    stream = io.StringIO()
    follow_log.configure("text", stream)
    logging.getLogger("mtx2vllm.converter.fleet.follow").warning("dropped %d", 3)
    assert stream.getvalue().endswith("warning dropped 3\n")
