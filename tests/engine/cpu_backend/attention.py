"""Ragged paged attention (version 3, and its head_dim 64 variant) in jax.numpy, in float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import ragged

Split = Callable[[jax.Array, int, int], tuple[jax.Array, jax.Array]]


def install() -> None:
    import tpu_inference.kernels.ragged_paged_attention.v3.kernel as standard
    import tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64 as narrow
    from tpu_inference.layers.common import attention_interface

    attention_interface.ragged_paged_attention = partial(_attend, merge=standard.merge_kv, split=_split_pairs)
    attention_interface.ragged_paged_attention_hd64 = partial(_attend, merge=narrow.merge_kv, split=_split_halves)


def _split_pairs(entries: jax.Array, heads: int, size: int) -> tuple[jax.Array, jax.Array]:
    """[S, L, heads * 2 (+ padding), D]: key and value of a head follow each other."""
    pairs = entries[:, :, : 2 * heads].reshape(*entries.shape[:2], heads, 2, -1)
    return pairs[..., 0, :size], pairs[..., 1, :size]


def _split_halves(entries: jax.Array, heads: int, size: int) -> tuple[jax.Array, jax.Array]:
    """[S, L, heads (+ padding), 2D]: the key is the first half of a head's row, the value the second."""
    entries = entries[:, :, :heads]
    return entries[..., :size], entries[..., size : 2 * size]


def visible(at: ragged.Rows, length: int, window: int | None, causal: bool, kv_lens: jax.Array) -> jax.Array:
    """[T, L]: whether row t may look at position l of its sequence."""
    key = jnp.arange(length)[None, :]
    mask = key <= at.position[:, None] if causal else key < kv_lens[at.sequence][:, None]
    return mask if window is None else mask & (at.position[:, None] - key < window)


def weights(scores: jax.Array, mask: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Softmax over the last axis of `scores` [T, N, L]; a sink [N] takes its share of the mass and gives nothing."""
    scores = jnp.where(mask[:, None, :], scores, -1e30)
    if sink is None:
        return jax.nn.softmax(scores, axis=-1)
    column = jnp.broadcast_to(sink.astype(jnp.float32)[None, :, None], (*scores.shape[:2], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, kv_cache: jax.Array, kv_lens: jax.Array, page_indices: jax.Array,
    cu_q_lens: jax.Array, distribution: jax.Array, sink: jax.Array | None = None, *,
    merge: Callable[[jax.Array, jax.Array], jax.Array], split: Split, sm_scale: float = 1.0,
    sliding_window: int | None = None, soft_cap: float | None = None, update_kv_cache: bool = True,
    use_causal_mask: bool = True, **_: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel's contract: q [T, N, D], k and v [T, K, D], cache [pages, page_size, rows, packing, width] -> [T, N, D]
    and the cache with the new keys and values in it."""
    heads, size, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    at = ragged.rows(q.shape[0], kv_lens, cu_q_lens, distribution)
    pages = page_indices.reshape(kv_lens.shape[0], -1)
    if update_kv_cache:
        kv_cache = ragged.write(kv_cache, merge(k, v), at, pages)
    entries = ragged.gather(kv_cache, pages, kv_lens)
    entries = entries.reshape(*entries.shape[:2], -1, entries.shape[-1])
    keys, values = (
        jnp.repeat(x, heads // kv_heads, axis=2).astype(jnp.float32) for x in split(entries, kv_heads, size)
    )
    scores = jnp.einsum("tnd,tlnd->tnl", q.astype(jnp.float32), keys[at.sequence]) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = visible(at, keys.shape[1], sliding_window, use_causal_mask, kv_lens)
    out = jnp.einsum("tnl,tlnd->tnd", weights(scores, mask, sink), values[at.sequence])
    return jnp.where(at.live[:, None, None], out, 0).astype(q.dtype), kv_cache
