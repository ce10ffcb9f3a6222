"""What vLLM's own models hold, read off the models: `python -m engine.parameters OUT.json FAMILY...`

Builds each family's model as the engine does, on one device, and loads nothing: `named_parameters()` then stands for
the canonical layout, live, where `../data/*/vllm_names.json` are dumps. All families in one process, those with experts
first (vLLM makes its group of expert ranks for the first model only) and deepseek3 last (it needs a switch for the whole process).
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import cpu_backend
from .canonical import DATA
from .start import FAMILY_ARGUMENTS

Facts = dict[str, list[Any]]  # name -> [shape, dtype]


def main(out: Path, families: list[str]) -> None:
    cpu_backend.set_environment(1)
    cpu_backend.install()
    import torch
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
    torch.set_grad_enabled(False)
    out.write_text(json.dumps({family: parameters(family) for family in families}))


def parameters(family: str) -> Facts:
    """Every parameter of the text model, once, and the buffers that a checkpoint fills."""
    model, text = build(family)
    found: Facts = {}
    for name, tensor in [*model.named_parameters(), *_loaded_buffers(model)]:
        if name.startswith(text):
            found[name] = [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
    return found


def build(family: str) -> tuple[Any, str]:
    """vLLM's model of a fixture, and where the text model lies in it."""
    import jax
    import numpy as np
    import torch
    from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES
    from tpu_inference.layers.vllm.quantization import get_tpu_quantization_config
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    if family == "deepseek3":
        os.environ["NEW_MODEL_DESIGN"] = "1"
    arguments = {"max_model_len": 128, "skip_tokenizer_init": True} | FAMILY_ARGUMENTS.get(family, {})
    config = EngineArgs(model=str(DATA / family / "hf"), dtype="bfloat16", **arguments).create_engine_config()
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(MESH_AXIS_NAMES))
    config.quant_config = get_tpu_quantization_config(config, jax.sharding.Mesh(devices, MESH_AXIS_NAMES))
    config.device_config.device = "cpu"
    # tpu-inference sets an attribute that vLLM's own copying of a config does not take.
    plain = copy.copy(config)
    vars(plain).pop("sharding_config", None)
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            model = initialize_model(vllm_config=plain)
    get = getattr(model, "get_language_model", None)
    inner = get() if get else model
    return model, next((f"{name}." for name, module in model.named_modules() if module is inner and name), "")


def _loaded_buffers(model: Any) -> list[tuple[str, Any]]:
    """Persistent buffers that are weights; the others are the engine's own scales."""
    modules = dict(model.named_modules())
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if not name.endswith("_scale")
        and name.rpartition(".")[2] not in modules[name.rpartition(".")[0]]._non_persistent_buffers_set
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
