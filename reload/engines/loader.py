"""`--load-format mtx2vllm`: start vLLM cold from a version, in either layout.

The same checks and the same staging as for a reload: a version that does not fit the model, or whose bytes are not what
its manifest says, stops the start with everything that is wrong with it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.errors import InputError
from mtx2vllm.reload.aspire import open_version
from mtx2vllm.reload.engine import TensorSpec
from mtx2vllm.reload.engines.layers import ENGINE_BUFFERS, kv_heads, text_prefix
from mtx2vllm.reload.match import fit
from mtx2vllm.reload.stage import Options, Stager

LOAD_FORMAT = "mtx2vllm"
_SHOWN = 3  # names in a sentence


def register() -> None:
    """Make the load format known to vLLM in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class VersionLoader(BaseModelLoader):  # type: ignore[misc]
        """Loads the version that the model path names."""

        def download_model(self, model_config: Any) -> None:
            open_version(model_config.model, 0)

        def load_weights(self, model: Any, model_config: Any) -> None:
            load(model, model_config.model)

    register_model_loader(LOAD_FORMAT)(VersionLoader)


def load(model: Any, location: str) -> None:
    """Fill `model` (a vLLM module on the CPU, its weights not yet processed) from a version.

    Raises:
        InputError, StageFailed: the version does not fit, is damaged, or leaves tensors without values; nothing was
        written.
    """
    holders = {name: (tensor, heads) for name, tensor, heads in _loadable(model)}
    text = text_prefix(model)
    specs = {name: _spec(*holder) for name, holder in holders.items()}
    outside = [name for name in specs if not name.startswith(text)]
    version = open_version(location, 0)
    fits = fit(version.manifest, {name: spec for name, spec in specs.items() if name.startswith(text)}, outside)
    if outside:
        raise InputError(
            f"{location} holds the text model only, and {len(outside)} tensors of the engine would have no values: "
            f"{', '.join(outside[:_SHOWN])}{', ...' if len(outside) > _SHOWN else ''}. Start it with --language-model-only, or "
            "from the full model's Hugging Face directory"
        )
    stager = Stager(Options())
    try:
        staged = stager.stage(version, fits.targets)
        staged.check()
        for name, array in staged.weights.items():
            tensor, heads = holders[name]
            tensor.data.copy_(_torch(array if heads is None else np.asarray(heads.repeat(array))))
    finally:
        stager.close()


def _loadable(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, tensor, KV heads to repeat or None) of every parameter, once, and of buffers that checkpoints fill."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        yield name, parameter, kv_heads(modules[name.rpartition(".")[0]])
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in ENGINE_BUFFERS and leaf not in modules[owner]._non_persistent_buffers_set:
            yield name, buffer, None


def _spec(tensor: Any, heads: Any) -> TensorSpec:
    import jax.numpy as jnp

    shape = tuple(tensor.shape)
    if heads is not None:
        shape = (heads.rows, *shape[1:])
    return TensorSpec(shape, np.dtype(jnp.dtype(str(tensor.dtype).removeprefix("torch."))))


def _torch(array: NDArray[Any]) -> Any:
    """A tensor with the array's bits; numpy's bfloat16 is not one that torch knows."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array.view(np.uint16), order="C")).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))
