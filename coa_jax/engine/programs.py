"""The three compiled programs of decoding, and the state that they hand on.

A slot is a row of the cache.  Of a sequence with ``length`` tokens, the cache holds positions
``0 .. length - 2`` at least: the newest token is fed by the step that samples its successor.
Setting ``length`` back is therefore all it takes to forget tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coa_jax.engine.sampling import sample
from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import Cache, cache_size, forward, unembed
from coa_jax.model.weights import Params


class DecodeState(NamedTuple):
    """All that decoding carries, donated from program to program; B slots.

    Attributes:
        cache: keys and values, see `model.forward.Cache`.
        token: int32 ``[B]``, the newest token of each slot.
        length: int32 ``[B]``, tokens of the sequence, the newest included.
        limit: int32 ``[B]``, length at which a slot stops.
        active: bool ``[B]``, whether a slot decodes.
        key: uint32 ``[B, 2]``, see `sampling.sample_key`.
        temperature, top_p: float32 ``[B]``; top_k: int32 ``[B]``.
        stop: int32 ``[B, E]``, tokens that end a sequence, padded with -1.
    """

    cache: Cache
    token: jax.Array
    length: jax.Array
    limit: jax.Array
    active: jax.Array
    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    stop: jax.Array


class Chunk(NamedTuple):
    """What a chunk of decoding produced.

    Attributes:
        tokens: int32 ``[B, C]``; of row b the first ``count[b]`` are new.
        logps: float32 ``[B, C]``, their log-probabilities.
        count: int32 ``[B]``.
        active: bool ``[B]``, whether the slot would go on.
    """

    tokens: jax.Array
    logps: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    active: jax.Array


@functools.partial(
    jax.jit, static_argnames=("config", "capacity", "dtype"), donate_argnames=("state",)
)
def decode_chunk(
    params: Params,
    state: DecodeState,
    steps: jax.Array,
    *,
    config: ModelConfig,
    capacity: int,
    dtype: Any = jnp.float32,
) -> tuple[DecodeState, Chunk]:
    """Decodes up to ``steps`` (at most ``capacity``) tokens in every active slot.

    The number of steps is data: one program serves every chunk size.  It ends early when no
    slot is active.
    """
    slots = state.token.shape[0]
    size = cache_size(state.cache)
    chunk = Chunk(
        tokens=jnp.zeros((slots, capacity), jnp.int32),
        logps=jnp.zeros((slots, capacity), jnp.float32),
        count=jnp.zeros((slots,), jnp.int32),
        active=state.active,
    )

    def step(
        carry: tuple[jax.Array, DecodeState, Chunk],
    ) -> tuple[jax.Array, DecodeState, Chunk]:
        index, state, chunk = carry
        live = state.active
        # An idle slot feeds a token at a position outside the cache, which is not written.
        positions = jnp.where(live, state.length - 1, size)[:, None]
        hidden, cache = forward(
            params, config, state.token[:, None], positions, cache=state.cache, dtype=dtype
        )
        assert cache is not None
        logits = unembed(params, config, hidden[:, 0], dtype)
        token, logp = sample(
            logits, state.key, state.length, state.temperature, state.top_p, state.top_k
        )
        token = jnp.where(live, token, state.token)
        length = state.length + live
        ended = jnp.any(token[:, None] == state.stop, axis=-1) | (length >= state.limit)
        state = state._replace(cache=cache, token=token, length=length, active=live & ~ended)
        chunk = Chunk(
            tokens=chunk.tokens.at[:, index].set(token),
            logps=chunk.logps.at[:, index].set(logp),
            count=chunk.count + live,
            active=state.active,
        )
        return index + 1, state, chunk

    def goes_on(carry: tuple[jax.Array, DecodeState, Chunk]) -> jax.Array:
        index, state, _ = carry
        return (index < jnp.minimum(steps, capacity)) & jnp.any(state.active)

    _, state, chunk = jax.lax.while_loop(goes_on, step, (jnp.int32(0), state, chunk))
    return state, chunk


@functools.partial(jax.jit, static_argnames=("config", "dtype"), donate_argnames=("state",))
def extend(
    params: Params,
    state: DecodeState,
    slots: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    config: ModelConfig,
    dtype: Any = jnp.float32,
) -> DecodeState:
    """Writes the keys and values of given tokens into some slots.

    Args:
        params: decoding layout.
        state: donated.
        slots: int32 ``[R]``; a slot out of range is a padding row and changes nothing.
        tokens: int32 ``[R, T]``.
        positions: int32 ``[R, T]``; a position outside the cache is padding.
        config, dtype: static.
    """
    rows = tuple((k[slots], v[slots]) for k, v in state.cache)
    _, filled = forward(params, config, tokens, positions, cache=rows, dtype=dtype)
    assert filled is not None
    cache = tuple(
        (k.at[slots].set(new_k, mode="drop"), v.at[slots].set(new_v, mode="drop"))
        for (k, v), (new_k, new_v) in zip(state.cache, filled, strict=True)
    )
    return state._replace(cache=cache)


@functools.partial(jax.jit, donate_argnames=("state",))
def fork(state: DecodeState, source: jax.Array, targets: jax.Array) -> DecodeState:
    """Copies the cache of slot ``source`` into the slots ``targets [R]`` (out of range: none)."""

    def copy(buffer: jax.Array) -> jax.Array:
        row = jnp.broadcast_to(buffer[source], (targets.shape[0], *buffer.shape[1:]))
        return buffer.at[targets].set(row, mode="drop")

    return state._replace(cache=tuple((copy(k), copy(v)) for k, v in state.cache))
