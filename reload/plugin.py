"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes.

It makes the load format `mtx2vllm` known everywhere. With `MTX2VLLM_WATCH` set, every engine core gets an agent: one that
runs in a process of its own when its loop begins, one in the caller's process when it is made.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from mtx2vllm.reload import accelerator
from mtx2vllm.reload.engines import loader
from mtx2vllm.reload.settings import Settings, environment_problems, read_environment

log = logging.getLogger(__name__)

_once = threading.Lock()
_registered: list[bool] = []


def register() -> None:
    """Hook into this process; a second call does nothing.

    Raises:
        InputError: the environment's settings are wrong. A sampler that should follow and cannot must not start.
    """
    with _once:
        if _registered:
            return
        loader.register()
        settings = read_environment()
        if settings is not None:
            _follow(settings)
            _say_without_tpu()
        else:
            _say_unread()
            _say_without_tpu_for_our_format()
        _registered.append(True)


def _follow(settings: Settings) -> None:
    _speak()
    from vllm.v1.engine import core, core_client
    from vllm.v1.executor import uniproc_executor

    for kind in (core.EngineCoreProc, core.DPEngineCoreProc):
        _wrap(kind, "run_busy_loop", functools.partial(_loop_with_agent, settings=settings))
    _wrap(core_client.InprocClient, "__init__", functools.partial(_client_with_agent, settings=settings))
    _wrap(uniproc_executor.UniProcExecutor, "_init_executor", _bind_before_compiling)


def _say_unread() -> None:
    """Nothing follows, and nothing is stopped; but who set or misspelt a variable of ours meant something by it."""
    for problem in environment_problems(os.environ) if multiprocessing.parent_process() is None else ():
        log.warning("%s (MTX2VLLM_WATCH is not set, so that this engine follows nothing)", problem.rstrip("."))


def _without_tpu() -> str | None:
    """A sentence where no TPU is to be seen. Without it the engine works for minutes and ends in an error of its own that
    names no cause; it may be wrong, so nothing is stopped."""
    with contextlib.suppress(Exception):
        why = accelerator.missing(os.environ)
        if why is not None:
            return (
                f"no TPU was found on this machine ({why}), and without one the engine does not start, whatever it is to "
                "load: start it where a TPU is, in a container with the device files passed in"
            )
    return None


def _say_without_tpu() -> None:
    """Once, in the process that starts the engine; its children would say it again."""
    said = _without_tpu() if multiprocessing.parent_process() is None else None
    if said is not None:
        _speak()
        log.warning("%s", said)


def _say_without_tpu_for_our_format() -> None:
    """The same for `--load-format mtx2vllm`, as soon as vLLM has read its arguments: here they are not known yet."""

    def create(original: Callable[[], Any], _arguments: Any) -> Any:
        config = original()
        if getattr(config, "load_format", None) == loader.LOAD_FORMAT:
            _say_without_tpu()
        return config

    arguments = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if "create_load_config" in getattr(arguments, "__dict__", {}):
        _wrap(arguments, "create_load_config", create)  # type: ignore[arg-type]


def _speak() -> None:
    """vLLM sets up its own logger and no other: without this, what the agent says of each reload would be lost. It does
    so in some processes after the plugins are registered; until then there is nothing to go by."""
    ours, theirs = logging.getLogger("mtx2vllm"), logging.getLogger("vllm")
    if not theirs.handlers:
        return
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)


def _wrap(kind: type, name: str, around: Callable[..., Any]) -> None:
    """Replace `kind.name` by a call of `around(original, self, ...)`."""
    original = vars(kind)[name]

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), self, *args, **kwargs)

    setattr(kind, name, wrapped)


def _loop_with_agent(loop: Callable[[], Any], core: Any, *, settings: Settings) -> Any:
    agent = _start_agent(core, settings)
    try:
        return loop()
    finally:
        agent.stop(timeout=1.0)


def _client_with_agent(init: Callable[..., Any], client: Any, *args: Any, settings: Settings, **kwargs: Any) -> None:
    init(*args, **kwargs)
    client.mtx2vllm_agent = _start_agent(client.engine_core, settings)


def _start_agent(core: Any, settings: Settings) -> Any:
    """Attach an agent to a core. What stands in its way stops the engine's start: it would serve, and not follow."""
    from mtx2vllm.reload.agent import ReloadAgent
    from mtx2vllm.reload.engines.tpu_inference import TpuInference

    _speak()
    config = core.vllm_config
    parallel = config.parallel_config
    ranks = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    suffix = f"-dp{parallel.data_parallel_index}" if ranks > 1 else ""
    engine = TpuInference(core, replica_suffix=suffix)
    started_from = config.model_config.model if config.load_config.load_format == loader.LOAD_FORMAT else None
    agent = ReloadAgent(engine, settings.watch, settings, loaded=started_from).start()
    loaded = agent.status().loaded
    if loaded is not None:
        core.set_weight_version(str(loaded))
    log.info("following %s", settings.watch)
    return agent


def _bind_before_compiling(init: Callable[[], Any], _executor: Any) -> Any:
    """gpt-oss's sinks must be arguments of the first step that is compiled, or all would be compiled twice."""
    from tpu_inference.runner import tpu_runner

    from mtx2vllm.reload.engines import sinks

    def load_then_bind(load: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        model = getattr(getattr(runner.model, "model", None), "vllm_model", None)
        if model is not None:
            sinks.bind(model)
        return result

    if not hasattr(tpu_runner.TPUModelRunner.load_model, "__wrapped__"):
        _wrap(tpu_runner.TPUModelRunner, "load_model", load_then_bind)
    try:
        return init()
    except Exception as error:
        if said := _without_tpu():  # this file is in the traceback, and is not to blame
            error.add_note(f"mtx2vllm: {said}")
        raise
