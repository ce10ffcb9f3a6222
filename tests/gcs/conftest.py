"""An emulator for the session, a bucket for each test, a proxy where a test wants faults."""

from collections.abc import Iterator

import pytest

from gcs import emulator, proxy
from mtx2vllm.converter.storage.gs import GsStore
from mtx2vllm.converter.storage.gs_http import EMULATOR, TENSORSTORE
from mtx2vllm.converter.storage.retry import Policy

QUICK = Policy(first=0.001, longest=0.01, deadline=20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/gcs/" in item.path.as_posix():
            item.add_marker(pytest.mark.gcs)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How often each fault met each verb."""
    if proxy.TOTALS:
        verbs = sorted({verb for _, verb in proxy.TOTALS})
        terminalreporter.section("faults injected before the emulator")
        terminalreporter.write_line("".join(f"{title:>10}" for title in ("", *verbs)))
        for fault in sorted({fault for fault, _ in proxy.TOTALS}):
            counts = [proxy.TOTALS[fault, verb] for verb in verbs]
            terminalreporter.write_line(f"{fault:>10}" + "".join(f"{count:>10}" for count in counts))


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with emulator.emulator() as url:
        yield url


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """gs://NAME of a new bucket, in an environment as users of the emulator set it."""
    monkeypatch.setenv(EMULATOR, server)
    monkeypatch.delenv(TENSORSTORE, raising=False)
    return emulator.make_bucket(server)


@pytest.fixture
def broken(server: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[proxy.Proxy]:
    """A proxy through which everything goes from now on."""
    with proxy.proxy(server) as running:
        monkeypatch.setenv(EMULATOR, running.url)
        yield running


@pytest.fixture
def store(bucket: str, server: str) -> GsStore:
    return GsStore(server, QUICK)


@pytest.fixture
def faulty(broken: proxy.Proxy) -> GsStore:
    """A store behind the proxy, in a hurry."""
    return GsStore(broken.url, QUICK)
