"""The three compiled programs of decoding.

A row is a sequence that takes part in a call.  Of a sequence with ``length`` tokens, the cache
holds positions ``0 .. length - 2`` at least: the newest token is fed by the step that samples its
successor.  Setting ``length`` back is therefore all it takes to forget tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coa_jax.engine.constraint import ConstraintTables, allowed_tokens
from coa_jax.engine.sampling import sample, sample_keys
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.cache import Cache, Layer, cache_size, page_axis
from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import forward, unembed
from coa_jax.model.weights import Params

Layers = tuple[Layer, ...]


class DecodeState(NamedTuple):
    """The rows of a decoding program; B rows.

    Attributes:
        token: int32 ``[B]``, the newest token of each row.
        length: int32 ``[B]``, tokens of the sequence, the newest included.
        limit: int32 ``[B]``, length at which a row stops.
        active: bool ``[B]``, whether a row decodes.
        key: int32 ``[B, 3]``, the numbers of `sampling.sample_keys`.
        temperature, top_p: float32 ``[B]``; top_k: int32 ``[B]``.
        rule: int32 ``[B]``, state of the constraint; None without one.
    """

    token: jax.Array
    length: jax.Array
    limit: jax.Array
    active: jax.Array
    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    rule: jax.Array | None = None


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


_Carry = tuple[jax.Array, Layers, DecodeState, Chunk]


@functools.partial(
    jax.jit,
    static_argnames=("config", "capacity", "dtype", "attention"),
    donate_argnames=("layers",),
)
def decode_chunk(
    params: Params,
    layers: Layers,
    table: jax.Array,
    state: DecodeState,
    stop: jax.Array,
    steps: jax.Array,
    tables: ConstraintTables | None = None,
    *,
    config: ModelConfig,
    capacity: int,
    dtype: Any = jnp.float32,
    attention: Attention = REFERENCE,
) -> tuple[Layers, DecodeState, Chunk]:
    """Decodes up to ``steps`` (at most ``capacity``) tokens in every active row.

    The number of steps is data: one program serves every chunk size.  It ends early when no row
    is active.  With tables only allowed tokens are sampled, and a row ends where the constraint
    lets nothing follow.

    Args:
        params: decoding layout.
        layers: pages, donated.
        table: int32 ``[B, C]``, see `model.cache.Cache`.
        state: the rows.
        stop: int32 ``[E]``, tokens that end a sequence.
        steps: int32 scalar.
        tables: of the constraint, where the state has a ``rule``.
        config, capacity, dtype: static.
        attention: static, the paged implementation whose layout the pages have.
    """
    rows = state.token.shape[0]
    size = cache_size(attention, Cache(layers, table))
    keys = sample_keys(state.key)
    chunk = Chunk(
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        logps=jnp.zeros((rows, capacity), jnp.float32),
        count=jnp.zeros((rows,), jnp.int32),
        active=state.active,
    )

    def step(carry: _Carry) -> _Carry:
        index, layers, state, chunk = carry
        live = state.active
        # An idle row feeds a token at a position outside the cache, which is not written.
        positions = jnp.where(live, state.length - 1, size)[:, None]
        hidden, cache = forward(
            params,
            config,
            state.token[:, None],
            positions,
            cache=Cache(layers, table),
            dtype=dtype,
            attention=attention,
        )
        assert cache is not None
        logits = unembed(params, config, hidden[:, 0], dtype)
        allowed = None
        if tables is not None and state.rule is not None:
            allowed = allowed_tokens(tables.allowed, state.rule, config.vocab_size)
        token, logp = sample(
            logits, keys, state.length, state.temperature, state.top_p, state.top_k, allowed
        )
        token = jnp.where(live, token, state.token)
        length = state.length + live
        ended = jnp.any(token[:, None] == stop, axis=-1) | (length >= state.limit)
        rule = state.rule
        if tables is not None and rule is not None:
            rule = jnp.where(live, tables.next_state[rule, tables.kind[token]], rule)
            ended |= tables.ends[rule]
        state = state._replace(token=token, length=length, active=live & ~ended, rule=rule)
        chunk = Chunk(
            tokens=chunk.tokens.at[:, index].set(token),
            logps=chunk.logps.at[:, index].set(logp),
            count=chunk.count + live,
            active=state.active,
        )
        return index + 1, cache.layers, state, chunk

    def goes_on(carry: _Carry) -> jax.Array:
        index, _, state, _ = carry
        return (index < jnp.minimum(steps, capacity)) & jnp.any(state.active)

    start = (jnp.int32(0), layers, state, chunk)
    _, layers, state, chunk = jax.lax.while_loop(goes_on, step, start)
    return layers, state, chunk


@functools.partial(
    jax.jit, static_argnames=("config", "dtype", "attention"), donate_argnames=("layers",)
)
def extend(
    params: Params,
    layers: Layers,
    table: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    config: ModelConfig,
    dtype: Any = jnp.float32,
    attention: Attention = REFERENCE,
) -> Layers:
    """Writes the keys and values of given tokens into the cache.

    A row is a block of tokens that follow each other.  Several rows may be blocks of one sequence:
    a layer writes all rows before it attends, so later ones see earlier ones.

    Args:
        params: decoding layout.
        layers: pages, donated.
        table: int32 ``[R, C]``, that of each row's sequence.
        tokens: int32 ``[R, T]``.
        positions: int32 ``[R, T]``; a position outside the cache is padding.
        config, dtype, attention: static, see `decode_chunk`.
    """
    cache = Cache(layers, table)
    _, filled = forward(
        params, config, tokens, positions, cache=cache, dtype=dtype, attention=attention
    )
    assert filled is not None
    return filled.layers


@functools.partial(jax.jit, static_argnames="attention", donate_argnames=("layers",))
def copy_pages(
    layers: Layers, sources: jax.Array, targets: jax.Array, attention: Attention = REFERENCE
) -> Layers:
    """Copies pages ``sources [R]`` to ``targets [R]``; a target beyond the pool is none."""
    before = (slice(None),) * page_axis(attention)

    def copy(buffer: jax.Array) -> jax.Array:
        return buffer.at[(*before, targets)].set(buffer[(*before, sources)], mode="drop")

    return jax.tree.map(copy, layers)
