"""vLLM with tpu-inference on the JAX CPU backend: the real engine, its TPU-only parts replaced by plain jax.numpy.

`install()` must run before anything imports `vllm.LLM`. Only what cannot exist without a TPU is replaced: the
attention, grouped-matmul, gather and delta-net kernels, the device mesh, memory statistics and XLA's TPU options.
Weight loading, layout processing, sharding, scheduling and sampling are the engine's own, which is what tests rely on.
"""

import os
from functools import cache

# Virtual devices and the like must be set before jax starts; a caller's own setting wins.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MODEL_IMPL_TYPE": "vllm",  # the torchax path
    "SKIP_JAX_PRECOMPILE": "1",
    "SC_ALLREDUCE_ALLGATHER_OFFLOAD_MIN_BYTES": "0",  # "auto" asks a TPU for its VMEM size
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def set_environment(devices: int) -> None:
    """Environment of this process and its children for an engine over `devices` virtual CPU devices."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    flag = f"--xla_force_host_platform_device_count={devices}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


@cache  # once a process, however many ask
def install(kv_bytes: int = 64 << 20) -> None:
    """Replace the TPU-only parts in this process. `kv_bytes`: memory to pretend free on each device."""
    from . import attention, delta_net, devices, experts, mla

    devices.install(kv_bytes)
    attention.install()
    mla.install()
    experts.install()
    delta_net.install()
