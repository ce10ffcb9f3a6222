"""MaxText checkpoints to safetensors: `convert` a checkpoint, or `plan` what a config will become.

Exported lazily: importing this package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtx2vllm.converter.conversion import Converted, convert
    from mtx2vllm.converter.job import Options, plan

__all__ = ["Converted", "Options", "convert", "plan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mtx2vllm.converter import conversion

    return getattr(conversion, name)
