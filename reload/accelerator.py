"""Whether a TPU can be seen from here, without starting JAX, which would take the device for this process."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_DEVICES = ("accel[0-9]*", "vfio/[0-9]*")  # below /dev; how TPU VMs show their chips, by generation
_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "CLOUD_TPU_TASK_ID")  # set where chips are given out


def devices() -> list[str]:
    """Device files of TPU chips, sorted."""
    return sorted(str(path) for pattern in _DEVICES for path in Path("/dev").glob(pattern))


def has_libtpu() -> bool:
    """Whether the library is installed that JAX drives a TPU with."""
    return find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ


def missing(environ: Mapping[str, str]) -> str | None:
    """Why an engine would find no TPU here, None where nothing speaks against it. A platform that is chosen by
    JAX_PLATFORMS needs no device of this machine."""
    if "tpu" not in (environ.get("JAX_PLATFORMS") or "tpu").split(","):
        return None
    if not devices():
        named = next((name for name in _VARIABLES if environ.get(name)), None)
        seen = f", though {named} is set (does the container get the device?)" if named else ""
        return f"neither /dev/accel* nor /dev/vfio/* is there{seen}"
    if not has_libtpu():
        return "libtpu is not installed"
    return None
