"""MaxText checkpoints to safetensors.

`convert(checkpoint, out, ...)` converts a checkpoint into a version directory; the keywords are the fields of `Options`,
the result is a `Converted`. `plan(hf_config, ...)` says what a config will become, as a `Plan`; it needs no checkpoint.
Whatever a user can do about a failure is an `Mtx2vllmError`, most often an `InputError`.

Exported lazily: importing this package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtx2vllm.converter.conversion import Converted, convert
    from mtx2vllm.converter.errors import (
        DifferenceError,
        InputError,
        LostRace,
        Mtx2vllmError,
        NotCommitted,
        StorageError,
        StoreUnavailable,
        UsageError,
    )
    from mtx2vllm.converter.job import plan
    from mtx2vllm.converter.options import Options
    from mtx2vllm.converter.plans import Plan

__all__ = [
    "Converted",
    "DifferenceError",
    "InputError",
    "LostRace",
    "Mtx2vllmError",
    "NotCommitted",
    "Options",
    "Plan",
    "StorageError",
    "StoreUnavailable",
    "UsageError",
    "convert",
    "plan",
]
_ELSEWHERE = {"Converted": "conversion", "convert": "conversion", "Options": "options", "plan": "job", "Plan": "plans"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
