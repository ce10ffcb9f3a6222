"""How canonical tensors become the arrays that a live tpu-inference (torchax) model computes with.

A canonical tensor is what the vLLM model held on one device before any layout processing. After loading the model
holds something else: linears transposed, reordered for their shards and KV heads repeated, experts padded and
de-interleaved, MLA's kv_b_proj split into two. A `Unit` is the smallest set of tensors that must be processed together;
`plan` reads the units off the live modules and proves by shapes and dtypes, before any data, that each builds what the
model now holds.

The processing is the engine's own code, run on the host's CPU, so that a swap only has to copy finished arrays.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtx2vllm.converter.errors import InputError
from mtx2vllm.reload.engine import TensorSpec, Weights

# Layer methods that leave a weight's values as they were loaded (where the linear one applies, it is handled above).
_PLAIN_METHODS = frozenset(
    {
        "VllmUnquantizedLinearMethod",
        "UnquantizedLinearMethod",
        "VllmUnquantizedEmbeddingMethod",
        "UnquantizedEmbeddingMethod",
    }
)

Arrays = Mapping[str, Any]
Build = Callable[[Arrays], dict[str, jax.Array]]

# Persistent buffers that belong to the engine and that no checkpoint fills.
ENGINE_BUFFERS = frozenset({"_k_scale", "_v_scale", "_q_scale", "_prob_scale"})
STATE_PREFIX = "vllm_model."


class Unsupported(InputError):
    """This engine cannot take canonical weights; `problems` has one sentence for each reason."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Canonical tensors processed together. `targets` says of each array in the model (no state prefix) which canonical
    tensor it comes from; `build` makes them all, whole (unsharded), from host arrays of all `specs`."""

    specs: Mapping[str, TensorSpec]
    targets: Mapping[str, str]
    build: Build

    def run(self, weights: Weights) -> dict[str, Any]:
        """The arrays that follow from those tensors of the unit that `weights` holds; the others may be missing."""
        mine = {name: weights[name] for name in self.specs if name in weights}
        # Tensors of a unit do not mix their values, so anything may stand in for one that has not changed.
        rest = {name: np.zeros(spec.shape, spec.dtype) for name, spec in self.specs.items() if name not in mine}
        built = self.build({**mine, **rest})
        return {target: built[target] for target, source in self.targets.items() if source in mine}


def plan(model: Any, live: Arrays, *, tied: bool) -> list[Unit]:
    """The units of `model` (the vLLM module), in its own order.

    Args:
        model: the vLLM module whose parameters were processed.
        live: name in the model -> the array it holds now.
        tied: whether the output head shares the embedding's values.

    Raises:
        Unsupported: quantized or LoRA layers, or a layer whose processing is not understood.
    """
    problems: list[str] = []
    units: list[Unit] = []
    for path, module in model.named_modules():
        try:
            units.extend(_units_of(path, module, model, live))
        except Unsupported as error:
            problems.extend(error.problems)
    taken = {target for unit in units for target in unit.targets}
    units.extend(_plain_units(model, {name: a for name, a in live.items() if name not in taken}, tied=tied))
    for unit in units:
        problems.extend(_misfits(unit, live))
    if problems:
        raise Unsupported(problems)
    position = {name: i for i, name in enumerate(live)}
    return sorted(units, key=lambda unit: position[next(iter(unit.targets))])


def _misfits(unit: Unit, live: Arrays) -> Iterator[str]:
    """What `unit` would build differs from what the model holds: found without any data."""
    shaped = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in unit.specs.items()}
    try:
        built = jax.eval_shape(unit.build, shaped)
    except Exception as error:  # whatever the engine's own processing raises is a reason to refuse
        yield f"the engine cannot process {', '.join(unit.specs)}: {error}"
        return
    for name in unit.targets:
        want, got = live[name], built[name]
        if (want.shape, want.dtype) != (got.shape, got.dtype):
            yield (
                f"{name} is {want.dtype}{list(want.shape)} in the engine, but canonical weights would make it "
                f"{got.dtype}{list(got.shape)}; quantized or unknown layer layouts cannot be reloaded"
            )


def _units_of(path: str, module: Any, model: Any, live: Arrays) -> Iterator[Unit]:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, MLAAttention):
        yield _latent_attention(path, module, model)
        return
    if not isinstance(module, LinearBase | RoutedExperts | VocabParallelEmbedding):
        if type(module).__name__.endswith("WithLoRA"):
            raise Unsupported([f"{path} is a LoRA layer; engines with LoRA enabled cannot be reloaded"])
        return
    method = module.quant_method
    name = type(method).__name__
    # Exact names: VllmQuantizedBf16LinearMethod, which quantizes while loading, is a subclass of the unquantized one.
    if name == "VllmUnquantizedLinearMethod" and _owned(path, live):
        yield _linear(path, module, live)
    elif name == "VllmUnquantizedFusedMoEMethod":
        yield _experts(path, module, live)
    elif name not in _PLAIN_METHODS:
        raise Unsupported(
            [f"{path} uses {name}; hot reload takes unquantized engines only, start it without quantization"]
        )


def _owned(path: str, live: Arrays) -> list[str]:
    """Names of the weight of the linear at `path`: one, or one for each projection where the engine split them."""
    if f"{path}.weight" in live:
        return [f"{path}.weight"]
    return sorted((n for n in live if n.startswith(f"{path}.weight.")), key=lambda n: int(n.rpartition(".")[2]))


# --- linears ---


def _linear(path: str, module: Any, live: Arrays) -> Unit:
    config = module.quant_method.linear_config
    weights = _owned(path, live)
    biases = [name for name in (w.replace(f"{path}.weight", f"{path}.bias") for w in weights) if name in live]
    width = live[weights[0]].shape[0]
    # A bias that the layer hands to its caller is not processed with the weight: it stays a plain tensor.
    processed_bias = bool(biases) and not module.skip_bias_add
    heads = kv_heads(module)
    rows = sum(live[w].shape[-1] for w in weights)
    if heads:
        rows = heads.rows
    specs = {f"{path}.weight": TensorSpec((rows, width), np.dtype(live[weights[0]].dtype))}
    if processed_bias:
        specs[f"{path}.bias"] = TensorSpec((rows,), np.dtype(live[biases[0]].dtype))
    targets = dict.fromkeys(weights, f"{path}.weight")
    if processed_bias:
        targets |= dict.fromkeys(biases, f"{path}.bias")
    process = _linear_process(tuple(config.output_sizes), config.n_shards, bool(config.fuse_matmuls), heads)

    def build(tensors: Arrays) -> dict[str, jax.Array]:
        new_weight, new_bias = process(tensors[f"{path}.weight"], tensors.get(f"{path}.bias"))
        return dict(zip(targets, [*new_weight, *new_bias], strict=True))

    return Unit(specs, targets, build)


@dataclass(frozen=True, slots=True)
class KvHeads:
    """Rows of a fused QKV projection: `q` of them for queries, `kv` heads of `key` and `value` rows, each head repeated
    `replicas` times in the engine, where there are fewer of them than shards."""

    q: int
    kv: int
    key: int
    value: int
    replicas: int

    @property
    def rows(self) -> int:
        """Rows of the canonical tensor."""
        return self.q + self.kv * (self.key + self.value)

    def repeat(self, fused: jax.Array) -> jax.Array:
        """`fused` [rows, ...] with every KV head repeated."""
        if self.replicas == 1:
            return fused
        q, k, v = jnp.split(fused, [self.q, self.q + self.kv * self.key])
        repeated = [
            jnp.repeat(x.reshape(self.kv, size, *x.shape[1:]), self.replicas, axis=0).reshape(-1, *x.shape[1:])
            for x, size in ((k, self.key), (v, self.value))
        ]
        return jnp.concatenate([q, *repeated])


def kv_heads(module: Any) -> KvHeads | None:
    """How a fused QKV projection is made up; None for any other module."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    if not isinstance(module, QKVParallelLinear):
        return None
    kv, replicas = module.total_num_kv_heads, getattr(module, "num_kv_head_replicas", 1)
    q, k, v = module.output_sizes
    return KvHeads(q, kv, k // (kv * replicas), v // (kv * replicas), replicas)


@cache
def _linear_process(sizes: tuple[int, ...], shards: int, fused: bool, heads: KvHeads | None) -> Any:
    """A compiled function of weight [out, in] and bias [out] or None -> lists of the engine's weights and biases."""
    from tpu_inference.layers.common.process_weights.linear_weights import LinearWeights, process_linear_weights

    def listed(x: Any) -> list[jax.Array]:
        return [] if x is None else list(x) if isinstance(x, list | tuple) else [x]

    def process(weight: jax.Array, bias: jax.Array | None) -> tuple[list[jax.Array], list[jax.Array]]:
        if heads:
            weight, bias = heads.repeat(weight), None if bias is None else heads.repeat(bias)
        out = process_linear_weights(
            LinearWeights(weight=jnp.transpose(weight), weight_scale=None, zero_point=None, bias=bias),
            fused=fused,
            output_sizes=list(sizes),
            reorder_size=shards,
        )
        return listed(out.weight), listed(out.bias)

    return jax.jit(process)


# --- experts ---

_EXPERT_NAMES = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")


def _experts(path: str, module: Any, live: Arrays) -> Unit:
    method = module.quant_method
    names = [name for name in _EXPERT_NAMES if f"{path}.{name}" in live]
    count, hidden = module.global_num_experts, module.hidden_size
    ffn = module.intermediate_size_per_partition
    shapes = {
        "w13_weight": (count, 2 * ffn, hidden),
        "w2_weight": (count, hidden, ffn),
        "w13_bias": (count, 2 * ffn),
        "w2_bias": (count, hidden),
    }
    dtype = np.dtype(jnp.dtype(str(module.params_dtype).removeprefix("torch.")))
    specs = {f"{path}.{name}": TensorSpec(shapes[name], dtype) for name in names}
    process = _experts_process(method.mesh, method.moe_backend, module.activation)

    def build(tensors: Arrays) -> dict[str, jax.Array]:
        return {f"{path}.{k}": v for k, v in process({k: tensors[f"{path}.{k}"] for k in names}).items()}

    return Unit(specs, {name: name for name in specs}, build)


@cache
def _experts_process(mesh: Any, backend: Any, activation: Any) -> Any:
    """A compiled function of a layer's canonical expert tensors by short name -> the engine's."""
    from tpu_inference.layers.common.process_weights.moe_weights import process_unquantized_moe_weights

    def process(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        out = process_unquantized_moe_weights(
            mesh=mesh,
            moe_backend=backend,
            activation=activation,
            **{name: tensors.get(name) for name in _EXPERT_NAMES},
        )
        return {name: getattr(out, name) for name in tensors}

    return jax.jit(process)


# --- multi-head latent attention ---


def _latent_attention(path: str, module: Any, model: Any) -> Unit:
    """kv_b_proj.weight [heads (nope + value), latent] lives on as W_UK_T, W_UV and their scales."""
    source = next(name for name, m in model.named_modules() if m is module.kv_b_proj) + ".weight"
    names = ("W_UK_T", "W_UK_T_scale", "W_UV", "W_UV_scale")
    heads, nope, value = module.num_heads, module.qk_nope_head_dim, module.v_head_dim
    dtype = np.dtype(jnp.dtype(str(module.kv_b_proj.params_dtype).removeprefix("torch.")))
    spec = TensorSpec((heads * (nope + value), module.kv_lora_rank), dtype)
    process = _latent_process(heads, nope, value, module.kv_cache_quantized_dtype)

    def build(tensors: Arrays) -> dict[str, jax.Array]:
        return {f"{path}.{k}": v for k, v in zip(names, process(tensors[source]), strict=True)}

    return Unit({source: spec}, {f"{path}.{name}": source for name in names}, build)


@cache
def _latent_process(heads: int, nope: int, value: int, cache_dtype: Any) -> Any:
    from tpu_inference.layers.common.quantization import quantize_tensor

    # Not compiled as one: fused, XLA may round the quotients otherwise than the engine's step-by-step run did.
    def process(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        up = jnp.transpose(jnp.asarray(weight)).reshape(-1, heads, nope + value)  # [latent, heads, nope + value]
        key, value_ = up[..., :nope], up[..., nope:]
        key_t, key_scale = quantize_tensor(cache_dtype, jnp.transpose(key, (1, 2, 0)), axis=1)
        value_t, value_scale = quantize_tensor(cache_dtype, jnp.swapaxes(value_, 0, 1), axis=1)
        return key_t, jnp.expand_dims(key_scale, 1), value_t, jnp.expand_dims(value_scale, 0)

    return process


# --- everything else is held as it comes ---


def _plain_units(model: Any, rest: Arrays, *, tied: bool) -> Iterator[Unit]:
    followers = _followers(model, rest, tied=tied)
    for name, array in rest.items():
        if name in followers or _is_engine_buffer(model, name):
            continue
        targets = dict.fromkeys([name, *(f for f, leader in followers.items() if leader == name)], name)
        spec = TensorSpec(tuple(array.shape), np.dtype(array.dtype))
        yield Unit({name: spec}, targets, partial(_same, name, tuple(targets)))


def _same(name: str, targets: tuple[str, ...], tensors: Arrays) -> dict[str, Any]:
    return dict.fromkeys(targets, tensors[name])


def _followers(model: Any, rest: Arrays, *, tied: bool) -> dict[str, str]:
    """State entries that hold another tensor's values under a second name: follower -> leader."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    found: dict[str, str] = {}
    for name in rest:
        head, _, leaf = name.rpartition(".routed_experts.")
        gate = f"{head.rpartition('.')[0]}.gate.{leaf}"
        if leaf == "e_score_correction_bias" and gate in rest:
            found[name] = gate
    if not tied:
        return found
    tables = {f"{p}.weight": m for p, m in model.named_modules() if isinstance(m, VocabParallelEmbedding)}
    inputs = [name for name, m in tables.items() if not isinstance(m, ParallelLMHead) and name in rest]
    for name, module in tables.items():
        if isinstance(module, ParallelLMHead) and name in rest and inputs:
            found[name] = next((i for i in inputs if rest[i].shape == rest[name].shape), inputs[0])
    return found


def text_prefix(model: Any) -> str:
    """Where the language model lies in a multimodal one, with a dot; empty elsewhere."""
    get = getattr(model, "get_language_model", None)
    inner = get() if get else model
    return next((f"{name}." for name, module in model.named_modules() if module is inner and name), "")


def _is_engine_buffer(model: Any, name: str) -> bool:
    """A buffer that the engine computes or owns, so that no version brings it."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return leaf in module._buffers and (leaf in ENGINE_BUFFERS or leaf in module._non_persistent_buffers_set)
