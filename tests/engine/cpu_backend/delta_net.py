"""The gated delta net (causal convolution, then the recurrence) token by token, in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from . import ragged


def install() -> None:
    from tpu_inference.kernels.gdn.v3 import wrapper

    wrapper.fused_conv1d_gdn = _conv_and_recur


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _conv_and_recur(
    qkv: jax.Array, b: jax.Array, a: jax.Array, conv_state: jax.Array, recurrent_state: jax.Array,
    conv_weight: jax.Array, conv_bias: jax.Array | None, a_log: jax.Array, dt_bias: jax.Array,
    query_start_loc: jax.Array, state_indices: jax.Array, distribution: jax.Array, seq_lens: jax.Array,
    read_state_indices: jax.Array, read_offsets: jax.Array | None = None, *,
    n_kq: int, n_v: int, d_k: int, d_v: int, kernel_size: int, **_: Any,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:  # fmt: skip
    """The kernel's contract without speculative decoding: qkv [T, n_kq d_k | n_kq d_k | n_v d_v], a and b [T, n_v],
    states by slot (slot 0 is nobody's) -> the states and [T, n_v d_v]."""
    f32, count = jnp.float32, qkv.shape[0]
    at = ragged.rows(count, seq_lens, query_start_loc, distribution)
    first = jnp.arange(count) == query_start_loc[at.sequence]
    slot = jnp.where(at.live, state_indices[at.sequence], 0)
    source = jnp.where(first, read_state_indices[at.sequence], slot)
    # A sequence's very first token starts from zeros: its slot may hold what another sequence left there.
    fresh = first & (at.position == 0)
    taps = conv_weight.reshape(-1, kernel_size).astype(f32).T
    decay_rate, keys = -jnp.exp(a_log.astype(f32)), n_kq * d_k

    def step(states: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        conv, recurrent = states
        past = jnp.where(fresh[t], 0, conv[source[t]].astype(f32))
        memory = jnp.where(fresh[t], 0, recurrent[source[t]].astype(f32))
        window = jnp.concatenate([past, qkv[t].astype(f32)[None]])
        mixed = jnp.sum(window * taps, axis=0)
        mixed = jax.nn.silu(mixed if conv_bias is None else mixed + conv_bias.astype(f32))
        q, k = (_unit(x.reshape(n_kq, d_k)) for x in (mixed[:keys], mixed[keys : 2 * keys]))
        q, k = (jnp.repeat(x, n_v // n_kq, axis=0) for x in (q * d_k**-0.5, k))
        value = mixed[2 * keys :].reshape(n_v, d_v)
        decay = jnp.exp(decay_rate * jax.nn.softplus(a[t].astype(f32) + dt_bias.astype(f32)))
        memory = memory * decay[:, None, None]
        error = (value - jnp.einsum("hk,hkv->hv", k, memory)) * jax.nn.sigmoid(b[t].astype(f32))[:, None]
        memory = memory + k[:, :, None] * error[:, None, :]
        out = jnp.einsum("hk,hkv->hv", q, memory).reshape(-1)
        conv = conv.at[slot[t]].set(jnp.where(at.live[t], window[1:].astype(conv.dtype), conv[slot[t]]))
        recurrent = recurrent.at[slot[t]].set(jnp.where(at.live[t], memory.astype(recurrent.dtype), recurrent[slot[t]]))
        return (conv, recurrent), jnp.where(at.live[t], out, 0).astype(qkv.dtype)

    return jax.lax.scan(step, (conv_state, recurrent_state), jnp.arange(count))
