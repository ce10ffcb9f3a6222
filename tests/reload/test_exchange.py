"""Preparing a swap beside a running engine: how much time it leaves it, and what it leaves to the pause."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mtx2vllm.reload.engines import exchange
from mtx2vllm.reload.engines.core import is_busy
from mtx2vllm.reload.engines.live import placement, put


@pytest.mark.parametrize(("busy", "slept"), [(True, [0.25, exchange.REST_S]), (False, [])])
def test_a_busy_engine_gets_the_time_that_each_unit_took(
    monkeypatch: pytest.MonkeyPatch, busy: bool, slept: list[float]
) -> None:
    ticks, naps = iter([10.0, 10.25, 20.0, 27.0] if busy else [10.0, 20.0]), list[float]()
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=naps.append))
    assert list(exchange.shared(["first", "second"], lambda: busy)) == ["first", "second"]  # type: ignore[list-item]
    assert naps == slept


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", "cpu")  # where jax is imported already


def test_what_was_mapped_is_in_memory_before_the_pause(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(64)))
    mapped = np.memmap(file, np.uint8, "r+")
    held = exchange.in_memory(mapped)
    on_device = put(mapped, placement(held))
    mapped[:] = 7
    assert np.asarray(held).tobytes() == np.asarray(on_device).tobytes() == bytes(range(64))
    assert exchange.in_memory(held) is held


def test_a_scheduler_elsewhere_is_not_asked_and_counts_as_busy() -> None:
    def ask() -> int:
        raise AssertionError("its pipe belongs to the engine's thread")

    assert is_busy(SimpleNamespace(scheduler=SimpleNamespace(get_num_unfinished_requests=ask)))
    assert is_busy(SimpleNamespace(scheduler=SimpleNamespace(running=["request"])))
    assert not is_busy(SimpleNamespace(scheduler=SimpleNamespace(running=[])))
