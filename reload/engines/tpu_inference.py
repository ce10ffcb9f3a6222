"""vLLM with tpu-inference (torchax models) as an `Engine` of the agent.

Written against vllm-tpu and tpu-inference 0.32.0. Where the runner's model has `load_canonical_weights` and
`canonical_weight_specs` of its own, they are used; else the same work is done here with the layers' own processing.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from mtx2vllm.reload.engine import Change, SwapFailed, SwapTimings, TensorSpec
from mtx2vllm.reload.engines import core as cores
from mtx2vllm.reload.engines import exchange, sinks
from mtx2vllm.reload.engines.layers import Unit, Unsupported, plan, text_prefix
from mtx2vllm.reload.engines.live import Live, bytes_of, placement, put

ROOM = 1.15  # a doubled swap wants this many times the change free on the device


class TpuInference:
    """One engine core with a torchax model. See `engine.Engine` for the methods."""

    def __init__(self, core: Any, *, replica_suffix: str = "") -> None:
        """Attach to a vLLM `EngineCore`, which must not be stepping yet or be in this process.

        Raises:
            Unsupported: its workers, model implementation or layers cannot take canonical weights.
        """
        self.replica_suffix = replica_suffix
        _refuse_ranks(core)
        self._live = Live(_runner(core))
        self._native = hasattr(self._live.runner.model, "load_canonical_weights")
        text = text_prefix(self._live.model)
        self._units: list[Unit] = []
        self._others: list[Unit] = []
        for unit in self._plan():
            mine = all(name.startswith(text) for name in unit.specs)
            (self._units if mine else self._others).append(unit)
        if sinks.bind(self._live.model):
            jax.clear_caches()  # steps compiled before hold the old sinks as constants
        self._steps = cores.attach(core)

    def _plan(self) -> list[Unit]:
        try:
            return plan(self._live.model, self._live.arrays(), tied=_is_tied(self._live.runner))
        except Unsupported:
            if not self._native:
                raise
            return []  # the engine's own loader may know layers that we do not

    def specs(self) -> Mapping[str, TensorSpec]:
        if self._native:
            model, state = self._live.runner.model, self._live.runner.state
            found = model.canonical_weight_specs(state)
            return {name: TensorSpec(tuple(s.shape), np.dtype(s.dtype)) for name, s in found.items()}
        return _specs(self._units)

    def untouched(self) -> Mapping[str, TensorSpec]:
        return _specs(self._others)

    def mode_for(self, nbytes: int) -> Literal["double", "inplace"]:
        arrays = self._live.arrays().values()
        whole = sum(array.nbytes for array in arrays) or 1
        need = bytes_of(arrays) * min(1.0, nbytes / whole) * ROOM
        return "double" if need < _free_bytes() else "inplace"

    def swap(self, change: Change) -> SwapTimings:
        self._check(change)
        start = time.monotonic()
        try:
            pause = self._prepare(change)
        except Exception as error:
            raise SwapFailed(f"version {change.version} could not be prepared: {error}") from error
        prepared = time.monotonic() - start
        details = self._steps.run(lambda: self._between(change, pause))
        return SwapTimings(prepared, details.pop("pause"), change.mode, details)

    def set_ready(self, ready: bool) -> None:
        self._steps.run(lambda: cores.hold(self._steps.core, not ready))

    @property
    def dummy(self) -> bool:
        """Whether the engine was started with random weights."""
        return bool(self._live.runner.vllm_config.load_config.load_format == "dummy")

    def refuse(self, why: str | None) -> None:
        """Fail new requests with this sentence; None: take them again."""
        self._steps.run(lambda: cores.refuse(self._steps.core, why))

    def alive(self) -> bool:
        return self._steps.alive()

    def digest(self) -> str:
        """SHA-256 of the whole device state, taken between two steps."""
        return self._steps.run(self._live.digest)

    # --- a swap ---

    def _check(self, change: Change) -> None:
        specs = self.specs()
        problems = [f"{name} is no tensor of this engine" for name in change.weights if name not in specs]
        for name in change.weights.keys() & specs.keys():
            got, want = change.weights[name], specs[name]
            if (tuple(got.shape), got.dtype) != (want.shape, want.dtype):
                problems.append(
                    f"{name} is {got.dtype}{list(got.shape)}, the engine takes {want.dtype}{list(want.shape)}"
                )
        if problems:
            raise SwapFailed("\n".join(problems))

    def _prepare(self, change: Change) -> Any:
        """Everything that can be done while the engine serves; what is left to do between two steps."""
        if self._native and set(change.weights) == set(self.specs()):
            return self._native_write(change)
        if not self._units:
            raise SwapFailed("the engine's own loader takes whole versions only")
        busy = partial(cores.is_busy, self._steps.core)
        if change.mode == "double":
            new = exchange.build_on_device(self._live, self._units, change.weights, busy)
            return lambda: exchange.exchange(self._live, new)
        ready = exchange.build_on_host(self._live, self._units, change.weights, change.undo, busy)
        return lambda: exchange.write(self._live, ready)

    def _native_write(self, change: Change) -> Any:
        """The runner's own loader, with the old arrays (or, in place, host copies of them) as undo."""
        live = self._live
        old: dict[str, Any] = live.arrays()
        places = {name: placement(array) for name, array in old.items()}
        if change.mode == "inplace":
            old = {name: exchange.host_copy(array) for name, array in old.items()}

        def restore(arrays: dict[str, Any]) -> None:
            for name, array in arrays.items():
                live.install(name, array if isinstance(array, jax.Array) else put(array, places[name]))

        def write() -> None:
            runner = live.runner
            try:
                runner.model.load_canonical_weights(iter(change.weights.items()), runner.state)
            except Exception as error:
                exchange.put_back(lambda: restore(old), error)
                raise SwapFailed(f"the engine's own loader failed: {error}; the old weights are back") from error

        return write

    def _between(self, change: Change, write: Any) -> dict[str, float]:
        """On the engine's thread, between two steps. Seconds of each part."""
        start = time.monotonic()
        core = self._steps.core
        try:
            if change.requests == "drain":
                cores.finish_running(self._steps)
            cores.drain(self._steps)
            _settle(self._live.runner)
            drained = time.monotonic()
            cores.forget(core, change.requests)
        except SwapFailed:
            raise
        except Exception as error:
            raise SwapFailed(f"the engine could not be brought to rest: {error}") from error
        forgot = time.monotonic()
        try:
            write()
        finally:
            self._live.runner.refresh_state_leaves()
        core.set_weight_version(str(change.version))
        end = time.monotonic()
        return {
            "drain": drained - start,
            "caches": forgot - drained,
            "write": end - forgot,
            # What requests=drain waits for is served, not paused.
            "pause": end - (drained if change.requests == "drain" else start),
        }


def of_llm_engine(llm_engine: Any) -> TpuInference:
    """The engine of a `vllm.LLM` (its `llm_engine`) in this process.

    Raises:
        Unsupported: its engine runs in another process, or cannot be reloaded.
    """
    core = getattr(llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise Unsupported(
            "this LLM runs its engine in another process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before creating it, or "
            "let the plugin follow a root (MTX2VLLM_WATCH)"
        )
    engine: TpuInference | None = vars(core).get("_mtx2vllm_engine")
    if engine is None:
        engine = core._mtx2vllm_engine = TpuInference(core)
    return engine


def _refuse_ranks(core: Any) -> None:
    """Ranks in processes of their own would each swap when they come to it. With TPU_MULTIPROCESS_DP=0 tpu-inference keeps
    all ranks in one core, where a swap is one for all."""
    parallel = core.vllm_config.parallel_config
    if parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0:
        raise Unsupported(
            "data-parallel ranks in processes of their own cannot be reloaded together: set TPU_MULTIPROCESS_DP=0, which "
            "keeps all ranks in one engine core, or run one server for each rank behind a router"
        )


def _runner(core: Any) -> Any:
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    if worker is None:
        raise Unsupported(
            f"{type(core.model_executor).__name__} keeps its workers in other processes, which hot reload does not "
            "reach; use the single-process executor"
        )
    runner = worker.model_runner
    if not hasattr(getattr(getattr(runner.model, "model", None), "vllm_model", None), "named_parameters"):
        raise Unsupported("the engine runs a model that is not torchax; start it with MODEL_IMPL_TYPE=vllm")
    if runner.vllm_config.speculative_config is not None:
        raise Unsupported("engines with speculative decoding cannot be reloaded: no version brings the draft model")
    if runner.vllm_config.lora_config is not None:
        raise Unsupported("engines with LoRA enabled cannot be reloaded; start it without --enable-lora")
    return runner


def _settle(runner: Any) -> None:
    """Write the last step's sampled tokens where the runner keeps requests.

    With asynchronous scheduling the runner notes a zero for each token and fills it in after the next step's forward
    pass. A request that is preempted in between would be recomputed with that zero as its last token.
    """
    if getattr(runner, "_pre_async_results", None) is not None:
        runner._modify_prev_results()
        runner._pre_async_results = None


def _is_tied(runner: Any) -> bool:
    return bool(getattr(runner.model_config.hf_text_config, "tie_word_embeddings", False))


def _specs(units: list[Unit]) -> dict[str, TensorSpec]:
    return {name: spec for unit in units for name, spec in unit.specs.items()}


def _free_bytes() -> float:
    """Free memory of the fullest device; where devices do not say, it is the host's."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(s and "bytes_limit" in s for s in stats):
        return float(min(s["bytes_limit"] - s["bytes_in_use"] for s in stats))
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
        available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024 / len(stats)
