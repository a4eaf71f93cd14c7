"""Log-probabilities of given tokens, without the logits of a whole batch.

The output head is a large part of a small model, and its logits would be the largest array of all.
They exist for a chunk of positions at a time, forward and backward.  Positions without a loss are
moved behind the others, and chunks that have none left are not computed.  On several devices that
happens row by row; on one, all rows of a batch are one: its chunks are full whatever lies in which
row, and XLA multiplies matrices on CPUs without copying them first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coa_jax.learn.batch import Batch
from coa_jax.learn.head import Head, score, weighted_sum
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params, bind

CHUNK, SHARED_CHUNK = 512, 2048
"""Defaults of ``vocab_chunk``: positions on one device whose logits exist at a time.  Of several
devices, which add up the gradient of the head once a chunk, they are more."""


def token_logps(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    compute: Compute,
    *,
    temperature: float = 1.0,
    vocab_chunk: int = 0,
    allowed: jax.Array | None = None,
    mask: Any = None,
    entropy: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of every token given those before it.

    Of a batch that was sampled under a constraint they are those of the constrained distribution,
    for which ``allowed`` has to be given, see `engine.constraint.ConstraintTables`.

    Args:
        params, config: the policy.
        batch: rows to score.
        compute: how to compute.
        temperature: divides the logits.
        vocab_chunk: positions on one device whose logits exist at a time; 0 for the default.
        allowed: see above.
        mask: ``[R, T]``, not 0 where a token is wanted; the others cost nothing and come out
            as 0.  None for all.
        entropy: whether it is wanted; else it comes out as 0.

    Returns:
        float32 ``[R, T]`` each; index 0 of a row is 0.
    """
    if (allowed is None) != (batch.rule is None):
        raise ValueError("a constrained batch needs the table of its constraint, and no other one")
    hidden, weight, order = _hidden(params, config, batch, compute, mask, vocab_chunk)
    rules = None if batch.rule is None else _arrange(order, jnp.asarray(batch.rule)[:, 1:])
    targets = _arrange(order, jnp.asarray(batch.tokens)[:, 1:])
    allowed = None if allowed is None else jnp.asarray(allowed)
    head = Head(compute, config.tie_embeddings, temperature, entropy)
    logps, entropies = score(head, hidden, weight, targets, rules, allowed, order.live)
    return _restore(order, logps, batch), _restore(order, entropies, batch)


def weighted_logp_sum(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    weights: Any,
    compute: Compute,
    *,
    vocab_chunk: int = 0,
) -> jax.Array:
    """Sum of ``weights [R, T]``, which are constants, times the tokens' log-probabilities.

    The same as with `token_logps`, but the weights are known when the logits are there: gradients
    are made of them at once, and the logits need not be computed again in the backward pass.
    """
    hidden, weight, order = _hidden(params, config, batch, compute, weights, vocab_chunk)
    head = Head(compute, config.tie_embeddings)
    targets, factors = (_arrange(order, jnp.asarray(x)[:, 1:]) for x in (batch.tokens, weights))
    factors = jnp.where(_counted(order), factors, 0.0)
    return weighted_sum(head, hidden, weight, targets, factors, order.live)


# --- positions in chunks -------------------------------------------------------------------


class _Order(NamedTuple):
    """The P positions of R rows in K chunks of C of each row.

    Attributes:
        places: int32 ``[R, K, C]``, which position comes where; the last one may repeat.
        back: int32 ``[R, P]``, where each position is found.
        wanted: bool ``[R, P]``.
        live: int32, chunks with something to compute; they come first.
    """

    places: jax.Array
    back: jax.Array
    wanted: jax.Array
    live: jax.Array


def chunked(rows: int, length: int, compute: Compute, vocab_chunk: int = 0) -> tuple[int, int, int]:
    """The form of a batch of ``rows`` of ``length`` tokens in front of the head.

    Returns:
        Rows R, positions P of each, and positions C of a chunk; there are ceil(P / C) chunks.
    """
    if compute.one_device:
        rows, positions, each = 1, rows * (length - 1), 1
        vocab_chunk = vocab_chunk or CHUNK
    else:
        # Rows lie on different devices: each device has a chunk's share of all of its own.
        assert compute.mesh is not None
        positions = length - 1
        each = -(-rows // (compute.mesh.size // compute.mesh.shape["tensor"]))
        vocab_chunk = vocab_chunk or SHARED_CHUNK
    return rows, positions, min(max(vocab_chunk // each, 1), positions)


def _hidden(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    compute: Compute,
    mask: Any,
    vocab_chunk: int,
) -> tuple[jax.Array, jax.Array, _Order]:
    """Final hidden states in chunks ``[K, R, C, D]``, the weight of the head, and the order."""
    decoder = bind(config, params)
    hidden, _ = decoder(
        batch.tokens,
        batch.positions,
        compute,
        segment_ids=batch.segment_ids,
        unfolded=batch.unfolded,
    )
    weight = decoder.embed.embedding if decoder.head is None else decoder.head.kernel
    wanted = jnp.ones(batch.tokens.shape, bool) if mask is None else jnp.asarray(mask) != 0
    rows, length = batch.tokens.shape
    rows, positions, chunk = chunked(rows, length, compute, vocab_chunk)
    order = _sort(wanted[:, 1:].reshape(rows, positions), chunk)
    chunks = _arrange(order, compute.constrain(hidden, "batch", None, None)[:, :-1])
    return compute.constrain(chunks, None, "batch", None, None), weight[...], order


def _sort(wanted: jax.Array, chunk: int) -> _Order:
    """Wanted positions first, else as they were."""
    places = jnp.argsort(~wanted, axis=1, stable=True)
    back = jnp.argsort(places, axis=1)
    places = jnp.pad(places, ((0, 0), (0, -places.shape[1] % chunk)), mode="edge")
    live = -(-jnp.max(jnp.sum(wanted, axis=1)) // chunk)
    return _Order(places.reshape(len(places), -1, chunk), back, wanted, live)


def _arrange(order: _Order, x: jax.Array) -> jax.Array:
    """``[R, P, ...]``, or the same of the batch's rows, as ``[K, R, C, ...]``."""
    rows, chunks, chunk = order.places.shape
    x = x.reshape(*order.back.shape, *x.shape[2:])
    places = order.places.reshape(rows, -1, *(1,) * (x.ndim - 2))
    x = jnp.take_along_axis(x, places, axis=1)
    return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)


def _counted(order: _Order) -> jax.Array:
    """bool ``[K, 1, C]``: not the repetitions of the last place, which fill its chunk."""
    _, chunks, chunk = order.places.shape
    return (jnp.arange(chunks * chunk) < order.back.shape[1]).reshape(chunks, 1, chunk)


def _restore(order: _Order, x: jax.Array, batch: Batch) -> jax.Array:
    """``[K, R, C]`` as the batch's rows, 0 at index 0 of each and where nothing is wanted."""
    x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)
    x = jnp.where(order.wanted, jnp.take_along_axis(x, order.back, axis=1), 0.0)
    return jnp.pad(x.reshape(len(batch.tokens), -1), ((0, 0), (1, 0)))
