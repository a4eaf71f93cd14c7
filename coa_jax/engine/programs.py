"""The three compiled programs of decoding.

A row is a sequence that takes part in a call of a program. For a sequence with ``length`` tokens,
the cache holds at least the positions ``0 .. length - 2``, because the step that samples the next
token first writes the newest token. Lowering ``length`` therefore suffices to discard tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from coa_jax.engine.constraint import ConstraintTables, allowed_tokens
from coa_jax.engine.sampling import sample, sample_keys
from coa_jax.model.cache import Cache, LayerPages, cache_size, page_axis
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import DecodeParams

Pages = tuple[LayerPages, ...]
"""The keys and values of all layers."""


class DecodeState(NamedTuple):
    """The state of the rows of a decoding program; a row is a sequence that is decoded.

    Attributes:
        token: int32 ``[rows]``, the newest token of each row.
        length: int32 ``[rows]``, number of tokens of the sequence, including the newest token.
        limit: int32 ``[rows]``, length, including the prompt, at which decoding stops.
        active: bool ``[rows]``, whether a row is decoding.
        key: int32 ``[rows, 3]``, the numbers from which `sampling.sample_keys` derives random keys.
        temperature, top_p: float32 ``[rows]``, sampling settings of each row.
        top_k: int32 ``[rows]``, sampling setting of each row.
        rule: int32 ``[rows]``, state of the constraint; None without a constraint.
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
    """The new tokens that one call of a decoding program gives to each of its rows (sequences).

    Attributes:
        tokens: int32 ``[rows, capacity]``; the first ``count[row]`` tokens of a row are new, and
            the others have no meaning. ``capacity`` is an argument of `decode_chunk`.
        logps: float32 ``[rows, capacity]``, log-probabilities of the tokens.
        count: int32 ``[rows]``, number of new tokens of each row.
        active: bool ``[rows]``, whether decoding of a row can continue in the next chunk.
    """

    tokens: jax.Array
    logps: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which is not used
    active: jax.Array


_Carry = tuple[jax.Array, Pages, DecodeState, Chunk]


@functools.partial(
    jax.jit, static_argnames=("config", "capacity", "compute"), donate_argnames=("pages",)
)
def decode_chunk(
    params: DecodeParams,
    pages: Pages,
    table: jax.Array,
    state: DecodeState,
    stop: jax.Array,
    steps: jax.Array,
    tables: ConstraintTables | None = None,
    *,
    config: ModelConfig,
    capacity: int,
    compute: Compute,
) -> tuple[Pages, DecodeState, Chunk]:
    """Decodes up to ``steps`` (at most ``capacity``) tokens in every active row.

    The number of steps is an argument rather than a constant, so one compiled program serves every
    number. The program ends early when no row is active. If ``tables`` is given, only tokens that
    the constraint allows are sampled, and a row becomes inactive when the policy must not write
    another token (`ConstraintTables.ends`), for example after the closing tag of a tool call.

    Args:
        params: parameters in the layout for decoding.
        pages: keys and values of earlier tokens; donated.
        table: int32 ``[rows, pages]``, numbers of the cache pages of each row's sequence, see
            `model.cache.Cache`.
        state: state of the rows before the chunk.
        stop: int32 vector, ids of the tokens that end a sequence.
        steps: number of decoding steps, an int32 scalar.
        tables: tables of the constraint; None if the state has no ``rule``.
        config: the architecture, with the adapters of ``params``.
        capacity: maximum number of tokens per row in the result.
        compute: dtype, operations and sharding. The implementation of attention determines the
            layout of the pages.

    Returns:
        The pages and the state of the rows after the chunk, and the chunk.
    """
    decoder, layers = params.bind(config)
    rows = state.token.shape[0]
    size = cache_size(compute, Cache(pages, table))
    keys = sample_keys(state.key)
    chunk = Chunk(
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        logps=jnp.zeros((rows, capacity), jnp.float32),
        count=jnp.zeros((rows,), jnp.int32),
        active=state.active,
    )

    def step(carry: _Carry) -> _Carry:
        index, pages, state, chunk = carry
        live = state.active
        # The token of an idle row gets a position outside the cache, where nothing is written.
        positions = jnp.where(live, state.length - 1, size)[:, None]
        hidden, cache = decoder(
            state.token[:, None], positions, compute, layers=layers, cache=Cache(pages, table)
        )
        assert cache is not None
        logits = decoder.logits(hidden[:, 0], compute)
        allowed = None
        if tables is not None and tables.allowed is not None and state.rule is not None:
            allowed = allowed_tokens(tables.allowed, state.rule, config.vocab_size)
        token, logp = sample(
            logits,
            keys,
            state.length,
            state.temperature,
            state.top_p,
            state.top_k,
            allowed,
            compute=compute,
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

    start = (jnp.int32(0), pages, state, chunk)
    _, pages, state, chunk = jax.lax.while_loop(goes_on, step, start)
    return pages, state, chunk


@functools.partial(jax.jit, static_argnames=("config", "compute"), donate_argnames=("pages",))
def extend(
    params: DecodeParams,
    pages: Pages,
    table: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    config: ModelConfig,
    compute: Compute,
) -> Pages:
    """Writes the keys and values of given tokens into the cache.

    Each row holds a block of consecutive tokens of a sequence. Several rows may hold blocks of the
    same sequence, because every layer writes the keys and values of all rows before it computes
    attention, so later blocks see earlier blocks.

    Args:
        params, pages, config, compute: arguments of `decode_chunk`.
        table: int32 ``[rows, pages]``, numbers of the cache pages of each row's sequence.
        tokens: int32 ``[rows, block]``, token ids of each row's block.
        positions: int32 ``[rows, block]``; a token at a position outside the cache is padding.

    Returns:
        The pages with the new keys and values.
    """
    decoder, layers = params.bind(config)
    _, cache = decoder(tokens, positions, compute, layers=layers, cache=Cache(pages, table))
    assert cache is not None
    return cache.layers


@functools.partial(jax.jit, static_argnames="compute", donate_argnames=("pages",))
def copy_pages(pages: Pages, sources: jax.Array, targets: jax.Array, compute: Compute) -> Pages:
    """Copies pages of the KV cache.

    Args:
        pages: pages of all layers; donated.
        sources: int32 ``[copies]``, numbers of the pages to read.
        targets: int32 ``[copies]``, numbers of the pages to write. A page whose target is outside
            the pool is not copied.
        compute: settings of the computation; its attention determines the layout of the pages.

    Returns:
        The pages after the copy.
    """
    before = (slice(None),) * page_axis(compute)

    def copy(buffer: jax.Array) -> jax.Array:
        return buffer.at[(*before, targets)].set(buffer[(*before, sources)], mode="drop")

    return jax.tree.map(copy, pages)
