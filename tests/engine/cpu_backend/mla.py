"""Multi-head latent attention over a paged cache in jax.numpy, in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from . import attention, ragged


def install() -> None:
    from tpu_inference.layers.common import attention_interface

    attention_interface.mla_ragged_paged_attention = _attend


def _attend(
    q_latent: jax.Array, q_rope: jax.Array, latent: jax.Array, rope: jax.Array, cache: jax.Array, kv_lens: jax.Array,
    page_indices: jax.Array, cu_q_lens: jax.Array, distribution: jax.Array, *, sm_scale: float = 1.0,
    sliding_window: int | None = None, soft_cap: float | None = None, **_: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel's contract: q_latent [N, T, A], q_rope [T, N, R], latent [T, A], rope [T, R],
    cache [pages, page_size / packing, packing, width] -> [N, T, A] and the cache. A row of the cache is
    [latent padded to a multiple of 128 | rope padded likewise]."""
    size, width = latent.shape[1], cache.shape[-1]
    tail = -(-size // 128) * 128
    new = jnp.zeros((latent.shape[0], width), cache.dtype)
    new = new.at[:, :size].set(latent.astype(cache.dtype))
    new = new.at[:, tail : tail + rope.shape[1]].set(rope.astype(cache.dtype))

    at = ragged.rows(latent.shape[0], kv_lens, cu_q_lens, distribution)
    pages = page_indices.reshape(kv_lens.shape[0], -1)
    flat = ragged.write(cache.reshape(cache.shape[0], -1, width), new, at, pages)
    entries = ragged.gather(flat, pages, kv_lens).astype(jnp.float32)[at.sequence]
    values, keys = entries[..., :size], entries[..., tail : tail + rope.shape[1]]
    scores = jnp.einsum("ntd,tld->tnl", q_latent.astype(jnp.float32), values)
    scores = (scores + jnp.einsum("tnd,tld->tnl", q_rope.astype(jnp.float32), keys)) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = attention.visible(at, values.shape[1], sliding_window, causal=True, kv_lens=kv_lens)
    out = jnp.einsum("tnl,tld->ntd", attention.weights(scores, mask, None), values)
    return jnp.where(at.live[None, :, None], out, 0).astype(q_latent.dtype), flat.reshape(cache.shape)
