"""Agents that are stopped whatever happens, and one staging process for the tests that need no agent."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtx2vllm.reload import ReloadAgent, replica
from mtx2vllm.reload.stage import Options, Stager

_idle: list[tuple[Any, Any]] = []


class PooledStager(Stager):
    """Starts with the process of an agent that has ended: starting Python takes longer than most tests."""

    def start(self) -> None:
        if self._process is None and _idle:
            self._process, self._jobs = _idle.pop()
        super().start()

    def give_back(self) -> None:
        """Keep the process for the next test; it must be idle."""
        if self._process is not None and self._process.poll() is None:
            _idle.append((self._process, self._jobs))
            self._process = self._jobs = None


@pytest.fixture(autouse=True)
def pooled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests marked `own_process` get the real thing."""
    if request.node.get_closest_marker("own_process") is None:
        monkeypatch.setattr(replica, "Stager", PooledStager)


@pytest.fixture(scope="session", autouse=True)
def no_process_remains() -> Iterator[None]:
    yield
    for process, jobs in _idle:
        jobs.close()
        process.kill()
        process.wait()


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., ReloadAgent]]:
    """An agent on tmp_path/root (or `root=`), polling fast."""
    made: list[ReloadAgent] = []

    def make(engine: Any, root: Path | str | None = None, **options: Any) -> ReloadAgent:
        options = {"poll_seconds": 0.1, "replica": "r0", **options}
        made.append(ReloadAgent(engine, str(root or tmp_path / "root"), **options))
        return made[-1]

    yield make
    for agent in made:
        stager = agent._replica.stager
        if isinstance(stager, PooledStager) and agent.status().state != "loading":
            with agent._replica.work:
                stager.give_back()
        agent.stop()


@pytest.fixture(scope="session")
def stager() -> Iterator[Stager]:
    found = Stager(Options())
    yield found
    found.close()
