"""The arrays of a running torchax model: reading them, putting new ones in their place, and putting the old ones back.

`runner.state` is what the compiled step is called with; the modules' parameters hold the same arrays and are moved
along, or the old ones would never be freed. Nothing here may run while a step is in flight.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.version.pieces import bits
from mtx2vllm.reload.engine import Weights
from mtx2vllm.reload.engines.layers import STATE_PREFIX, Unit


class Live:
    """The model's arrays by name. `model` is the vLLM module, `state` the runner's own dictionary."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model = runner.model.model.vllm_model
        self._holders = _holders(self.model)

    def arrays(self) -> dict[str, jax.Array]:
        """Name in the model -> the array it holds now."""
        state = self.runner.state
        return {key.removeprefix(STATE_PREFIX): value for key, value in state.items() if key.startswith(STATE_PREFIX)}

    def install(self, name: str, array: jax.Array | None) -> None:
        """Let the model hold `array` (None: nothing, so that the old one is freed)."""
        import torch
        from torchax.interop import torch_view

        self.runner.state[STATE_PREFIX + name] = array
        viewed = torch.empty(0) if array is None else torch_view(array)
        parameter = torch.nn.Parameter(viewed, requires_grad=False)
        for module, leaf in self._holders.get(name, ()):
            if leaf in module._parameters:
                module._parameters[leaf] = parameter
            else:
                module._buffers[leaf] = viewed

    def digest(self) -> str:
        """SHA-256 over every array of the state: names, types, shapes, shardings and bytes."""
        total = hashlib.sha256()
        for name, array in sorted(self.runner.state.items()):
            total.update(f"{name} {array.dtype} {array.shape} {array.sharding}".encode())
            total.update(np.ascontiguousarray(jax.device_get(array)).view(np.uint8).data if array.size else b"")
        return total.hexdigest()


def _holders(model: Any) -> dict[str, list[tuple[Any, str]]]:
    """Name -> every (module, attribute) that holds that very parameter or buffer; aliases share one object."""
    by_object: dict[int, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    by_object.setdefault(id(tensor), []).append((module, leaf))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: by_object[id(tensor)] for name, tensor in named}


def build(unit: Unit, weights: Weights) -> dict[str, Any]:
    """The unit's arrays, whole, in host memory. Raises whatever reading `weights` raises."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        built = unit.run(weights)
        return {name: jax.block_until_ready(array) for name, array in built.items()}


def put(array: Any, like: Mapping[str, Any]) -> jax.Array:
    """`array` on the devices, sharded and laid out as `like` (of `placement`), once the copy is complete."""
    if isinstance(array, np.ndarray) and any(device.platform == "cpu" for device in like["sharding"].device_set):
        array = owned(array)
    on_device = jax.device_put(array, like["sharding"])
    if like["format"] is not None and on_device.format.layout != like["format"].layout:
        on_device = jax.device_put(on_device, like["format"])
    return jax.block_until_ready(on_device)


def owned(array: NDArray[Any]) -> NDArray[Any]:
    """A copy in memory of its own. A CPU device takes the buffer it is given as an array's storage (`may_alias=False` or
    not, jax 0.11), which a memory map must not become. By its bits: numpy copies bfloat16 an element at a time."""
    return np.array(array.view(bits(array.dtype)), copy=True).view(array.dtype)


def placement(array: jax.Array) -> dict[str, Any]:
    """Where and how `array` lies, without keeping it alive."""
    return {"sharding": array.sharding, "format": getattr(array, "format", None)}


def bytes_of(arrays: Iterable[jax.Array]) -> int:
    """Bytes on the fullest device."""
    used: dict[Any, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            used[shard.device] = used.get(shard.device, 0) + shard.data.nbytes
    return max(used.values(), default=0)
