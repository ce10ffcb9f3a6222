"""Whether a TPU can be seen: by device files, without JAX."""

from pathlib import Path

import pytest

from mtx2vllm.converter.errors import UsageError
from mtx2vllm.reload import ReloadAgent, accelerator
from mtx2vllm.reload.doctor import examine
from mtx2vllm.reload.engines import trial


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device files that seem to be there; a test may add some."""
    found: list[str] = []
    monkeypatch.setattr(accelerator, "devices", lambda: found)
    return found


def test_without_a_device_it_is_a_note_that_says_where_was_looked(devices: list[str]) -> None:
    [found] = [f for f in examine(None, {}).findings if f.topic == "accelerator"]
    assert found.level == "note" and not devices
    assert found.text == "no TPU device is visible here: neither /dev/accel* nor /dev/vfio/* is there"
    [found] = [f for f in examine(None, {"TPU_NAME": "mine"}).findings if f.topic == "accelerator"]
    assert "though TPU_NAME is set" in found.text


def test_a_device_or_another_platform_is_no_reason_to_complain(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accelerator.missing({"JAX_PLATFORMS": "cpu"}) is None
    assert accelerator.missing({"JAX_PLATFORMS": "tpu"}) is not None
    devices.append("/dev/accel0")
    monkeypatch.setattr(accelerator, "has_libtpu", lambda: True)
    assert accelerator.missing({}) is None
    [found] = [f for f in examine(None, {}).findings if f.topic == "accelerator"]
    assert (found.level, found.text) == ("ok", "/dev/accel0")
    monkeypatch.setattr(accelerator, "has_libtpu", lambda: False)
    assert accelerator.missing({}) == "libtpu is not installed"


def test_an_engine_that_does_not_start_says_why(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    try:
        Path(__file__).read_text(encoding="no such encoding")
    except LookupError as error:
        said = trial._not_started("DIR", error)
    assert said.startswith("no TPU was found on this machine (neither ")
    assert "the engine does not start on DIR: LookupError: unknown encoding" in said
    devices.append("/dev/accel0")
    monkeypatch.setattr(accelerator, "has_libtpu", lambda: True)
    try:
        raise AssertionError
    except AssertionError as error:
        said = trial._not_started("DIR", error)
    assert said.startswith(f"the engine does not start on DIR: AssertionError in {__name__} (")


def test_an_agent_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"object is neither a vllm\.LLM .* nor an engine"):
        ReloadAgent(object(), str(tmp_path))
