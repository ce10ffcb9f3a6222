"""/metrics, /healthz and /readyz of a running agent, and an endpoint that nobody can keep busy."""

import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine, until
from prometheus_client.parser import text_string_to_metric_families
from versions import arrays, write_version

from mtx2vllm.converter.fleet.endpoint import Endpoint, Page
from mtx2vllm.reload.metrics import PHASES

A, B = arrays(1), arrays(2)


def get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def samples(port: int) -> dict[str, float]:
    families = text_string_to_metric_families(get(port, "/metrics")[1].decode())
    return {
        sample.name + "".join(f"|{v}" for k, v in sample.labels.items() if k != "le"): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def served(tmp_path: Path, make_agent):
    engine = FakeEngine(A)
    agent = make_agent(engine, metrics_port=0, hold=True).start()
    until(lambda: agent._endpoint is not None)
    return engine, agent, tmp_path / "root", agent._endpoint.port


def test_metrics_of_a_life(served) -> None:
    _engine, agent, root, port = served
    assert samples(port)["mtx2vllm:loaded_version"] == -1 and samples(port)["mtx2vllm:ready"] == 0
    write_version(root / "1", A)
    until(lambda: agent.status().loaded == 1)
    write_version(root / "2", {**A, "model.norm.weight": B["model.norm.weight"]})
    until(lambda: agent.status().loaded == 2)
    write_version(root / "3", arrays(1, rows=9))
    until(lambda: agent.status().failures == 1)
    found = samples(port)
    for phase in PHASES:
        assert found[f"mtx2vllm:reload_{phase}_seconds_count"] == 2, phase
    assert found["mtx2vllm:reloads_total|double"] == 2
    assert found["mtx2vllm:reload_failures_total|misfit"] == 1
    assert found["mtx2vllm:reload_bytes_total"] == sum(v.nbytes for v in A.values()) + A["model.norm.weight"].nbytes
    assert found["mtx2vllm:reload_tensors_total|changed"] == 7 and found["mtx2vllm:reload_tensors_total|unchanged"] == 5
    assert found["mtx2vllm:loaded_version"] == 2 and found["mtx2vllm:wanted_version"] == 3
    assert found["mtx2vllm:ready"] == 1 and found["mtx2vllm:quarantined_versions"] == 1
    assert found["mtx2vllm:last_look_timestamp_seconds"] > 1e9
    until(lambda: samples(port)["mtx2vllm:lease_writes_total"] >= 1)


def test_ready_does_not_flap_during_a_swap(served) -> None:
    engine, agent, root, port = served
    assert get(port, "/readyz")[0] == 503 and get(port, "/healthz")[0] == 200
    write_version(root / "1", A)
    until(lambda: get(port, "/readyz")[0] == 200)
    seen: list[int] = []
    engine.before_swap = lambda: seen.extend([get(port, "/readyz")[0], get(port, "/healthz")[0]])
    write_version(root / "2", B)
    until(lambda: agent.status().loaded == 2)
    assert seen == [200, 200]
    status, body = get(port, "/healthz")
    assert status == 200 and json.loads(body)["loaded"] == 2


def test_health_of_a_broken_engine(served) -> None:
    engine, agent, root, port = served
    engine.mode, engine.fail_at, engine.fail_undo = "inplace", 0, True
    write_version(root / "1", A)
    until(lambda: agent.status().state == "broken")
    assert get(port, "/healthz")[0] == 503 and get(port, "/readyz")[0] == 503


def test_it_ends_with_the_agent(served) -> None:
    engine, agent, _, port = served
    engine.running = False
    until(lambda: agent.status().state == "stopped")
    with pytest.raises(OSError):
        get(port, "/healthz")


def test_ranks_have_their_own_port(tmp_path: Path, make_agent) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = probe.getsockname()[1] - 2
    agent = make_agent(FakeEngine(A, suffix="-dp2"), metrics_port=base).start()
    until(lambda: agent._endpoint is not None)
    assert agent._endpoint.port == base + 2 and agent._endpoint._socket.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_no_reason_not_to_serve(tmp_path: Path, make_agent, caplog) -> None:
    write_version(tmp_path / "root" / "1", A)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        agent = make_agent(FakeEngine(A), metrics_port=taken.getsockname()[1]).start()
        until(lambda: agent.status().loaded == 1)
    assert "no metrics are served" in caplog.text


def test_nothing_listens_unless_told(tmp_path: Path, make_agent) -> None:
    agent = make_agent(FakeEngine(A)).start()
    until(lambda: agent.status().state == "waiting")
    assert agent._endpoint is None


# --- the endpoint itself ---


def boom() -> Page:
    raise RuntimeError("secret")


@pytest.fixture
def endpoint():
    pages = {"/a": lambda: Page(b"hello"), "/boom": boom}
    with Endpoint("127.0.0.1", 0, pages) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/a", 200, b"hello"), ("GET", "/a?x=1", 200, b"hello"), ("HEAD", "/a", 200, b""),
        ("GET", "/", 404, b"not found\n"), ("GET", "/../a", 404, b"not found\n"), ("GET", "/a/", 404, b"not found\n"),
        ("POST", "/a", 405, b"only GET and HEAD\n"), ("DELETE", "/a", 405, b"only GET and HEAD\n"),
        ("GET", "/boom", 500, b"failed; see the log\n"),
    ],
)  # fmt: skip
def test_answers(endpoint: Endpoint, method: str, path: str, status: int, body: bytes) -> None:
    assert get(endpoint.port, path, method) == (status, body)


def raw(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except OSError:  # cut off while we were still sending
            return b""


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"), (b"GET /a\r\n\r\n", b"HTTP/1.1 400"), (b"\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /a HTTP/2.0\r\n\r\n", b"HTTP/1.1 400"), (b"GET /a HTTP/1.1\r\n", b""), (b"", b""),
        (b"GET /a HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n", b""), (b"\x16\x03\x01" + bytes(200), b""),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
    ],
)  # fmt: skip
def test_requests_that_are_none(endpoint: Endpoint, data: bytes, begins: bytes) -> None:
    answer = raw(endpoint.port, data)
    assert answer.startswith(begins) and (begins or not answer)
    assert get(endpoint.port, "/a")[0] == 200


def test_open_connections_do_not_shut_others_out(endpoint: Endpoint) -> None:
    idle = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(60)]
    try:
        idle[-1].sendall(b"G")
        assert get(endpoint.port, "/a")[0] == 200
        until(lambda: sum(t.name == "mtx2vllm-http" for t in threading.enumerate()) <= 36)
    finally:
        [connection.close() for connection in idle]


def test_a_dripping_client_is_cut_off(endpoint: Endpoint) -> None:
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) as connection:
        try:
            while time.monotonic() - begun < 20:
                connection.sendall(b"x")
                time.sleep(0.1)
        except OSError:
            pass
    assert time.monotonic() - begun < 10
