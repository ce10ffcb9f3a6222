"""Write what vLLM itself holds of a Hugging Face directory: the canonical layout. Run where vLLM 0.32.0 is installed:

    JAX_PLATFORMS=cpu MODEL_IMPL_TYPE=vllm python make/canonical.py HF_DIR OUT_DIR

One device, TP=1, after `load_weights` and before `process_weights_after_loading`, which is never called. OUT_DIR gets
canonical_digests.json (of `named_parameters()`) and vllm_names.json. The text model of a multimodal config only.
"""

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def load(hf: Path) -> Any:
    """vLLM's model of the directory, with its weights as its own loader leaves them."""
    import jax
    import numpy as np
    import torch
    from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES
    from tpu_inference.layers.vllm.quantization import get_tpu_quantization_config
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(model=str(hf), skip_tokenizer_init=True, language_model_only=True, max_model_len=256)
    config = arguments.create_engine_config()
    # tpu-inference's layers ask the quantization config for the mesh, even where nothing is quantized.
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(MESH_AXIS_NAMES))
    config.quant_config = get_tpu_quantization_config(config, jax.sharding.Mesh(devices, MESH_AXIS_NAMES))
    config.device_config.device = "cpu"
    # tpu-inference hangs an attribute on the config that vLLM's own replace(), used by multimodal models, stumbles over.
    plain = copy.copy(config)
    vars(plain).pop("sharding_config", None)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            model = initialize_model(vllm_config=plain)
        loader = DefaultModelLoader(config.load_config)
        model.load_weights(loader.get_all_weights(config.model_config, model))
    return model


def entry(tensor: Any) -> dict[str, Any]:
    """The digest line of a tensor, as digests.py writes it."""
    import torch

    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def main(hf: Path, out: Path) -> None:
    from digests import dump

    model = load(hf)
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    tensors = {name: entry(parameter) for name, parameter in model.named_parameters()}
    (out / "canonical_digests.json").write_text(dump(tensors))
    kind = type(model)
    names = {"vllm_class": f"{kind.__module__}.{kind.__qualname__}", "tensors": list(tensors), "aliases": aliases}
    (out / "vllm_names.json").write_text(json.dumps(names, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
