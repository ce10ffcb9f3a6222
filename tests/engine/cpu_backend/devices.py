"""Mesh, memory statistics, compiler options and host-to-device copies without a TPU."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def install(kv_bytes: int) -> None:
    import vllm.platforms  # resolves the TPU platform before its modules are patched

    assert vllm.platforms.current_platform is not None
    _compiler_options()
    _synchronous_copies()
    _mesh_and_memory(kv_bytes)


def _plain_mesh(shape: Sequence[int], names: Sequence[str], *, devices: Sequence[Any] | None = None) -> Any:
    ordered = sorted(devices or jax.devices(), key=lambda device: device.id)
    return jax.sharding.Mesh(np.asarray(ordered).reshape(shape), names)


def _mesh_and_memory(kv_bytes: int) -> None:
    """The real ones look at chip coordinates and at memory_stats(), which a CPU device does not have."""
    import tpu_inference.utils as tpu_utils

    tpu_utils.make_optimized_mesh = _plain_mesh
    tpu_utils.hbm_usage_bytes = lambda devices: [(0, kv_bytes) for _ in devices]
    from tpu_inference.runner import tpu_runner

    tpu_runner.make_optimized_mesh = _plain_mesh


def _compiler_options() -> None:
    """No xla_tpu_* option is known to the CPU compiler. Must precede the first import of the sampler."""
    from tpu_inference.models.common import compiler_options

    compiler_options.get_step_fn_compiler_options = dict
    compiler_options.get_sampling_compiler_options = dict
    from tpu_inference.models.common import model_loader
    from tpu_inference.models.vllm import vllm_model_wrapper

    model_loader.get_step_fn_compiler_options = dict
    vllm_model_wrapper.get_step_fn_compiler_options = dict


def _copied(array: np.ndarray) -> np.ndarray:
    """A copy; of bfloat16 by its bits, which numpy copies several times faster."""
    if array.dtype.name != "bfloat16":
        return array.copy()
    return array.view(np.uint16).copy().view(array.dtype)


def _synchronous_copies() -> None:
    """On a CPU device_put may alias the numpy buffer it is given. The runner reuses its buffers for the next step,
    so with asynchronous dispatch a step would read the next step's input: copy, and dispatch synchronously."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    device_put = jax.device_put

    def copying(x: Any, *args: Any, **kwargs: Any) -> Any:
        return device_put(jax.tree.map(lambda v: _copied(v) if isinstance(v, np.ndarray) else v, x), *args, **kwargs)

    jax.device_put = copying
