"""Make real tiny MaxText checkpoints, and MaxText's own logits for them. Run inside an environment with MaxText 0.2.5:

    export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 DECOUPLE_GCLOUD=TRUE
    python make/checkpoints.py NAME OUT     (NAME from models.py; writes OUT/NAME/{hf,scanned,unscanned} and logits*.npz)

hf/ is a random transformers model in bf16; MaxText's own importer turns it into Orbax (bf16, four devices); the logits are
MaxText's, computed in fp32 from the Orbax checkpoint as read back from disk: arrays `tokens` (2, 16) int32, `logits` (2, 16, vocab) f32.
"""

import functools
import gc
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEVICES = 4


def write_hf(config: Any, out: Path, seed: int) -> None:
    """A random model, every leaf away from its initial zeros and ones: a lost norm or a swapped projection must show."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)


def arguments(model: Any, layout: str, **more: Any) -> list[str]:
    """MaxText's command line for the model's sizes, in fp32 and without any approximation."""
    import maxtext

    options = {
        "model_name": model.maxtext,
        "override_model_config": True,
        "run_name": "fixture",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "scan_layers": layout == "scanned",
        "attention": "dot_product",
        "sparse_matmul": False,
        "megablox": False,
        "dtype": "float32",
        "weight_dtype": "float32",
        "matmul_precision": "highest",
        "max_target_length": 16,
        "per_device_batch_size": 2,
        "log_config": False,
        **model.overrides,
        **more,
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    return ["checkpoints.py", str(base), *(f"{key}={value}" for key, value in options.items())]


def import_checkpoint(model: Any, hf: Path, out: Path, layout: str) -> None:
    """MaxText's own importer: hf/ -> an Orbax run directory with step 0."""
    if model.importer == "init":
        initialize(model, out, layout)
    elif model.importer == "llama":
        import_llama(model, hf, out, layout)
    else:
        import_to_maxtext(model, hf, out, layout)


def import_llama(model: Any, hf: Path, out: Path, layout: str) -> None:
    """By MaxText's scripts for llama and mistral, whose table of sizes is filled with ours."""
    from maxtext.checkpoint_conversion.standalone_scripts import llama4_ckpt_unscanned, llama_or_mistral_ckpt

    names = {
        "num_layers": "base_num_decoder_layers",
        "num_heads": "base_num_query_heads",
        "num_kv_heads": "base_num_kv_heads",
        "dims_per_head": "head_dim",
        "vocab": "vocab_size",
    }
    if "num_experts" in model.overrides:
        same = ("base_emb_dim", "num_experts", "interleave_moe_layer_step", "inhomogeneous_layer_cycle_interval")
        names |= {name: name for name in same}
    sizes = {name: model.overrides[option] for name, option in names.items()}
    if hasattr(model.hf, "vision_config"):
        vision = model.hf.vision_config
        sizes |= {
            "num_layers_vit": vision.num_hidden_layers,
            "num_att_head_vit": vision.num_attention_heads,
            "hidden_size_vit": vision.hidden_size,
        }
    llama_or_mistral_ckpt.MODEL_PARAMS_DICT[model.maxtext].update(sizes)
    script = llama_or_mistral_ckpt if layout == "scanned" else llama4_ckpt_unscanned
    weights = script.convert_to_jax_weights(str(importable(model, hf)), model.maxtext, True)
    script.save_weights_to_checkpoint(str(out), weights, DEVICES, True, True)


def importable(model: Any, hf: Path) -> Path:
    """hf, or a copy under the names that MaxText's importers know, where transformers writes others.

    A text-only llama4: the multimodal names. qwen3.5-moe: all experts of a layer in one tensor.
    """
    import torch
    from safetensors.torch import load_file, save_file

    if model.hf.model_type not in ("llama4_text", "qwen3_5_moe"):
        return hf
    renamed: dict[str, Any] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(load_file(hf / "model.safetensors").items()):
        if model.hf.model_type == "llama4_text":
            renamed[f"language_model.{name}"] = tensor
        elif match := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(tensor)
        else:
            renamed[name] = tensor
    for name in [name for name in experts if name.endswith("gate_proj")]:
        gate, up, down = (
            torch.stack(experts[name.replace("gate_proj", f"{part}_proj")]) for part in ("gate", "up", "down")
        )
        renamed[name.replace("gate_proj", "gate_up_proj")] = torch.cat([gate, up], dim=1)
        renamed[name.replace("gate_proj", "down_proj")] = down
    (hf.parent / "renamed").mkdir(exist_ok=True)
    save_file(renamed, hf.parent / "renamed" / "model.safetensors")
    return hf.parent / "renamed"


def import_to_maxtext(model: Any, hf: Path, out: Path, layout: str) -> None:
    """By to_maxtext, whose table of Hugging Face configs is filled with ours."""
    from maxtext.checkpoint_conversion import to_maxtext

    to_maxtext.HF_MODEL_CONFIGS[model.maxtext] = model.hf
    to_maxtext.main(
        arguments(model, layout, base_output_directory=out),
        lazy_load_tensors=False,
        eager_load_method="safetensors",
        hf_model_path=str(importable(model, hf)),
        save_dtype="bfloat16",
        simulated_cpu_devices_count=DEVICES,
    )


def read_params(items: Path) -> dict[tuple[str, ...], Any]:
    """The parameters of a checkpoint as numpy arrays, by path below `params`."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    tree = checkpointer.metadata(items).item_metadata.tree
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    restored = checkpointer.restore(items, args=ocp.args.PyTreeRestore(restore_args=wanted))
    leaves = jax.tree_util.tree_leaves_with_path(restored["params"])
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def build(model: Any, layout: str, more: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """(config, mesh, transformer, call): MaxText's model on one device, and tokens and positions to call it with."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    config = pyconfig.initialize(arguments(model, layout, enable_checkpointing=False, **more))
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    transformer = models.transformer_as_linen(config, mesh, quant=None, model_mode=MODEL_MODE_TRAIN)
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (2, 16), dtype=np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
    return config, mesh, transformer, (jnp.asarray(tokens), jnp.asarray(positions))


def initialize(model: Any, out: Path, layout: str) -> None:
    """Random weights in MaxText's own tree, saved through MaxText: where it has no importer."""
    import flax.linen as nn
    import jax
    import numpy as np
    from maxtext.checkpoint_conversion.utils.utils import save_weights_to_checkpoint

    _, mesh, transformer, call = build(model, layout, {})
    with jax.set_mesh(mesh):
        params = nn.meta.unbox(jax.jit(transformer.init)({"params": jax.random.key(0)}, *call))
    generator = np.random.default_rng(0)

    def disturb(leaf: Any) -> Any:
        leaf = np.asarray(leaf, np.float32)
        return (leaf + 0.2 * (leaf.std() or 1) * generator.standard_normal(leaf.shape)).astype(jax.numpy.bfloat16)

    save_weights_to_checkpoint(str(out), jax.tree.map(disturb, dict(params)), 1, True, True)


def forward(model: Any, layout: str, items: Path, more: Mapping[str, Any]) -> tuple[Any, Any]:
    """(tokens, logits) of MaxText's own forward pass over the checkpoint."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from maxtext.checkpoint_conversion.utils.utils import param_key_parts_from_path
    from maxtext.utils import maxtext_utils

    config, mesh, transformer, call = build(model, layout, more)
    abstract, treedef = jax.tree_util.tree_flatten_with_path(maxtext_utils.get_abstract_param(transformer, config))
    # "params-params-x" on disk is "params-x" to MaxText's mapping; other collections keep their name.
    stored = {
        "-".join(path[1:] if path[0] == path[1] == "params" else path): leaf
        for path, leaf in read_params(items).items()
    }
    stored = {key: leaf for key, leaf in stored.items() if not key.startswith("params-vision_encoder")}
    leaves = []
    for path, leaf in abstract:
        key = "-".join(param_key_parts_from_path(path))
        array = stored.pop(key)
        if array.shape != leaf.shape:
            raise ValueError(f"{key}: {array.shape} on disk, {leaf.shape} in the model")
        leaves.append(jnp.asarray(array, jnp.float32))
    if stored:
        raise ValueError(f"leaves the model does not have: {sorted(stored)}")
    params = jax.tree_util.tree_unflatten(treedef, leaves)
    apply = functools.partial(transformer.apply, enable_dropout=False, rngs={"params": jax.random.key(0)})
    with jax.set_mesh(mesh):
        logits = jax.jit(apply)(params, *call, decoder_segment_ids=jnp.ones_like(call[0]))
    return np.asarray(call[0]), np.asarray(logits, np.float32)


def main(name: str, out: Path, stage: str | None = None) -> None:
    from models import MODELS

    model = MODELS[name]
    here = out / name
    if stage is None:
        # The importer wants four devices, the logits one, and XLA fixes the number when a process starts.
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
        if model.importer == "init":
            model.hf.save_pretrained(here / "hf")
        else:
            write_hf(model.hf, here / "hf", zlib.crc32(name.encode()))
        for folder, config in model.more_configs.items():
            config.save_pretrained(here / folder)
        for devices, step in ((DEVICES if model.importer != "init" else 1, "import"), (1, "logits")):
            environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
            subprocess.run([sys.executable, __file__, name, str(out), step], check=True, env=environment)
    elif stage == "import":
        from maxtext.checkpoint_conversion import to_maxtext  # noqa: F401

        gc.freeze()  # the importers collect garbage after every array, which takes a second with MaxText in the heap
        for layout in model.layouts:
            import_checkpoint(model, here / "hf", here / layout, layout)
        shutil.rmtree(here / "renamed", ignore_errors=True)
        for marker in here.rglob("commit_success.txt"):
            # Orbax writes the absolute path of the saving machine, which means nothing elsewhere.
            marker.write_text(marker.read_text().replace(f"{out}/", "ckpts/"))
    else:
        import numpy as np

        for file, more in model.logits.items():
            runs = [forward(model, layout, here / layout / "0" / "items", more) for layout in model.layouts]
            for _, logits in runs[1:]:
                np.testing.assert_allclose(logits, runs[0][1], rtol=1e-4, atol=1e-4)
            np.savez_compressed(here / f"{file}.npz", tokens=runs[0][0], logits=runs[0][1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute(), sys.argv[3] if len(sys.argv) > 3 else None)
