"""Grouped matrix multiplication and the gathers around it in jax.numpy."""

from typing import Any

import jax
import jax.numpy as jnp


def install() -> None:
    from tpu_inference.layers.common import fused_moe_gmm

    fused_moe_gmm.gmm_wrapper = _grouped_matmul
    fused_moe_gmm.dense_gather_reduce = _dense_gather_reduce
    fused_moe_gmm.ragged_gather_reduce = _ragged_gather_reduce
    fused_moe_gmm.ragged_gather = _ragged_gather


def _activate(x: jax.Array, name: str | None) -> jax.Array:
    """`x` is [rows, gate | up]."""
    if not name:
        return x
    gate, up = jnp.split(x, 2, axis=-1)
    if name == "silu":
        return jax.nn.silu(gate) * up
    if name in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(gate, approximate=True) * up
    if name == "swigluoai":  # gpt-oss: clipped, and the gate's sigmoid is 1.702 times as steep
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    raise NotImplementedError(f"the CPU backend has no activation {name!r}")


def _grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, rhs_scale: Any, rhs_bias: jax.Array | None, group_sizes: jax.Array,
    group_offset: jax.Array, fuse_act: str | None = None, preferred_element_type: Any = None,
) -> jax.Array:  # fmt: skip
    """lhs [M, K] has its rows sorted by expert, `group_sizes` of them each; rhs [E, K, N] holds the experts from
    `group_offset` on. Rows of other experts give zeros."""
    if rhs_scale is not None:
        raise NotImplementedError("the CPU backend has no quantized experts")
    experts, inner, _ = rhs.shape
    lhs = jnp.pad(lhs, ((0, 0), (0, inner - lhs.shape[1])))
    expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right") - group_offset[0]

    def add(e: int, out: jax.Array) -> jax.Array:
        product = jnp.dot(lhs, rhs[e], preferred_element_type=jnp.float32)
        if rhs_bias is not None:
            product += rhs_bias[e].reshape(1, -1).astype(jnp.float32)
        return jnp.where((expert == e)[:, None], product, out)

    out = jax.lax.fori_loop(0, experts, add, jnp.zeros((lhs.shape[0], rhs.shape[2]), jnp.float32))
    mine = (expert >= 0) & (expert < experts)
    out = jnp.where(mine[:, None], _activate(out, fuse_act), 0)
    return out.astype(preferred_element_type or lhs.dtype)


def _dense_gather_reduce(x: jax.Array, indices: jax.Array, topk_weights: jax.Array, group: int, *_: Any) -> jax.Array:
    """Weighted sum of each token's `group` expert rows, [tokens, D] in float32."""
    picked = x[indices].astype(jnp.float32).reshape(-1, group, x.shape[-1])
    return (picked * topk_weights.reshape(-1, group, 1).astype(jnp.float32)).sum(axis=1)


def _ragged_gather_reduce(
    x: jax.Array, indices: jax.Array, topk_weights: jax.Array, mask: jax.Array, group: int, *_: Any
) -> jax.Array:
    """As above, over the rows that this shard has."""
    weighted = x[indices].astype(jnp.float32) * topk_weights.reshape(-1, 1)
    return jnp.where(mask.reshape(-1, 1), weighted, 0).reshape(-1, group, x.shape[-1]).sum(axis=1)


def _ragged_gather(x: jax.Array, indices: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return x[indices]
