"""Whether a TPU can be seen: by device files, without JAX."""

import logging
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtx2vllm.converter.errors import UsageError
from mtx2vllm.reload import ReloadAgent, accelerator, plugin
from mtx2vllm.reload.doctor import examine
from mtx2vllm.reload.engines import loader, trial


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
    for platforms in ("tpu", "tpu,cpu", ""):
        assert accelerator.missing({"JAX_PLATFORMS": platforms}) is not None
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


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """`plugin.register` as in a new process, without vLLM; the log that it writes."""
    monkeypatch.setattr(plugin, "_registered", [])
    monkeypatch.setattr(plugin, "_follow", lambda settings: None)
    monkeypatch.setattr(loader, "register", lambda: None)
    for name in ("JAX_PLATFORMS", "MTX2VLLM_WATCH"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.WARNING, "mtx2vllm")
    return caplog


def test_a_sampler_that_follows_hears_at_once_that_there_is_no_tpu(
    devices: list[str], registering: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    assert not registering.messages  # neither follows nor loads our format: no concern of ours
    monkeypatch.setattr(plugin, "_registered", [])
    monkeypatch.setenv("MTX2VLLM_WATCH", "/versions")
    plugin.register()
    plugin.register()
    [said] = registering.messages
    assert said.startswith(
        "no TPU was found on this machine (neither /dev/accel* nor /dev/vfio/* is there), and without"
    )


def test_a_misspelt_watch_is_said_though_nothing_follows(
    devices: list[str], registering: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTX2VLLM_WACH", "/versions")
    plugin.register()
    [said] = registering.messages
    assert said.startswith(
        "MTX2VLLM_WACH is not a variable of mtx2vllm; did you mean MTX2VLLM_WATCH? (MTX2VLLM_WATCH is not"
    )


@pytest.mark.parametrize("case", ["cpu on purpose", "a device", "a child", "a check that fails"])
def test_nothing_is_said_where_it_would_be_wrong_or_said_twice(
    case: str, devices: list[str], registering: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(environ: Any) -> str:
        raise PermissionError("/dev")

    monkeypatch.setenv("MTX2VLLM_WATCH", "/versions")
    if case == "cpu on purpose":
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    elif case == "a device":
        devices.append("/dev/accel0")
        monkeypatch.setattr(accelerator, "has_libtpu", lambda: True)
    elif case == "a child":
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
    else:
        monkeypatch.setattr(accelerator, "missing", fail)
    plugin.register()
    assert not registering.messages


@pytest.mark.parametrize(("load_format", "lines"), [("mtx2vllm", 1), ("auto", 0)])
def test_our_load_format_hears_it_when_the_arguments_are_read(
    load_format: str,
    lines: int,
    devices: list[str],
    registering: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class EngineArgs:
        def create_load_config(self) -> Any:
            return SimpleNamespace(load_format=load_format)

    monkeypatch.setitem(plugin.sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=EngineArgs))
    plugin.register()
    assert EngineArgs().create_load_config().load_format == load_format
    assert len(registering.messages) == lines


def test_the_engines_own_error_carries_the_cause(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        def load_model(self) -> None: ...

    def init() -> None:
        raise AttributeError("'NoneType' object has no attribute 'coords'")

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    module = SimpleNamespace(TPUModelRunner=Runner)
    monkeypatch.setitem(plugin.sys.modules, "tpu_inference.runner", SimpleNamespace(tpu_runner=module))
    with pytest.raises(AttributeError) as caught:
        plugin._bind_before_compiling(init, None)
    [note] = caught.value.__notes__
    assert note.startswith("mtx2vllm: no TPU was found on this machine")


def test_a_logger_that_vllm_sets_up_later_is_not_taken_for_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logging.getLogger("mtx2vllm"), logging.getLogger("vllm")
    for logger in (ours, theirs):
        monkeypatch.setattr(logger, "level", logging.NOTSET)
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", False)
    plugin._speak()
    assert ours.level == logging.NOTSET
    theirs.handlers = [logging.NullHandler()]
    theirs.level = logging.INFO
    plugin._speak()
    assert ours.level == logging.INFO and ours.handlers == theirs.handlers
    ours.manager._clear_cache()  # type: ignore[attr-defined]
