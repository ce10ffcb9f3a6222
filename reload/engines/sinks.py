"""Attention sinks (gpt-oss) that follow the weights.

The TPU attention keeps a float32 copy of a layer's sinks outside the model's state, so the compiled step holds it as a
constant: new sinks would be ignored, and re-compiling at every swap would cost minutes. Bound here, the attention reads
the module's own parameter, which is an argument of the compiled step.
"""

from typing import Any

from mtx2vllm.reload.engines.layers import Unsupported

_BOUND = "_sinks_follow_weights"


def bind(model: Any) -> int:
    """Bind every attention of `model` that has sinks; the number of those newly bound.

    Raises:
        Unsupported: a layer's sinks are not a parameter of the module that owns the attention.
    """
    problems: list[str] = []
    bound = 0
    for path, module in model.named_modules():
        impl = getattr(module, "impl", None)
        if impl is None or getattr(impl, _BOUND, False) or getattr(impl, "sinks", None) is None:
            continue
        owner = model.get_submodule(path.rpartition(".")[0])
        if "sinks" not in owner._parameters:
            problems.append(f"the attention sinks of {path} are no parameter of the model, so no version can set them")
            continue
        _follow(impl, owner)
        bound += 1
    if problems:
        raise Unsupported(problems)
    return bound


def _follow(impl: Any, owner: Any) -> None:
    import jax.numpy as jnp
    from torchax.interop import jax_view, torch_view

    def sinks(_: Any) -> Any:
        return torch_view(jax_view(owner.sinks).astype(jnp.float32))

    kind = type(impl)
    vars(impl).pop("sinks")
    impl.__class__ = type(kind.__name__, (kind,), {_BOUND: True, "sinks": property(sinks)})
