"""Which sequence and position each row of a ragged batch belongs to, and its paged keys.

Layout of a batch, shared by the TPU kernels: T rows, S slots for sequences, of which the first `distribution[-1]` are
in use; sequence s owns rows cu_q_lens[s]:cu_q_lens[s + 1], the last ones of its kv_lens[s] tokens; its pages are
page_indices.reshape(S, -1)[s]. Everything past the used slots may be garbage.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Per row of the batch: `sequence` [T], `position` in it [T], `live` [T] (not padding)."""

    sequence: jax.Array
    position: jax.Array
    live: jax.Array


def rows(count: int, kv_lens: jax.Array, cu_q_lens: jax.Array, distribution: jax.Array) -> Rows:
    """The owner of each of `count` rows; padding rows are given to sequence 0 with `live` False."""
    slots = kv_lens.shape[0]
    row = jnp.arange(count)
    live = row < cu_q_lens[distribution[-1]]
    owner = jnp.searchsorted(cu_q_lens[1 : slots + 1], row, side="right")
    owner = jnp.where(live, jnp.minimum(owner, slots - 1), 0)
    start, end = cu_q_lens[owner], cu_q_lens[owner + 1]
    return Rows(owner, kv_lens[owner] - (end - start) + row - start, live)


def write(cache: jax.Array, new: jax.Array, at: Rows, pages: jax.Array) -> jax.Array:
    """Put row t's entry new[t] [...] at its position into `cache` [pages, page_size, ...]; padding is dropped."""
    page_size = cache.shape[1]
    page = pages[at.sequence, jnp.clip(at.position // page_size, 0, pages.shape[1] - 1)]
    page = jnp.where(at.live, page, cache.shape[0])
    return cache.at[page, at.position % page_size].set(new.astype(cache.dtype), mode="drop")


def gather(cache: jax.Array, pages: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Each sequence's entries [S, L, ...], zero past its length: a page not yet written may hold NaN bits, and
    0 x NaN would come through the softmax."""
    entries = cache[pages]
    entries = entries.reshape(pages.shape[0], -1, *cache.shape[2:])
    seen = jnp.arange(entries.shape[1])[None, :] < kv_lens[:, None]
    return jnp.where(seen.reshape(*seen.shape, *(1,) * (entries.ndim - 2)), entries, 0)
