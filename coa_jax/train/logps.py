"""Computes log-probabilities of given tokens without storing the logits of a whole batch.

The logits of a batch would be the largest array of a training step, so they exist for one chunk of
positions at a time, in the forward and the backward pass. Positions without a loss are sorted
behind the others, and a chunk that consists of such positions alone is skipped. On several devices
each row is sorted separately. On one device the rows of a batch are joined into a single row before
sorting, for two reasons: the chunks are then full, even if the rows have different numbers of
positions with a loss; and XLA computes the matmuls without copies on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coa_jax.model.compute import Compute, local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Adapted, Params, bind, param_dtype
from coa_jax.model.policy import Model
from coa_jax.train.batch import Batch
from coa_jax.train.output_head import Head, score_chunks, weighted_sum

CHUNK, SHARED_CHUNK = 512, 2048
"""Number of positions per device for which logits are in memory at once.

The first number is for one device, the second for several devices. Several devices sum the
gradient of the head once per chunk, so their chunks are larger.
"""


def log_probs(policy: Any, batch: Batch, temperature: float = 1.0) -> jax.Array:
    """Computes the log-probability of every token given its predecessors.

    ``jax.jit``, ``jax.grad`` and the transformations of Flax NNX may trace the call.

    Args:
        policy: a `Model`, or any other module or function that maps (tokens, positions,
            segment_ids), each int32 ``[rows, tokens]``, to logits ``[rows, tokens, vocabulary]``. A
            token must attend only to tokens of its own sequence, which have the same segment id.
        batch: packed rows.
        temperature: number by which the logits are divided.

    Returns:
        Log-probabilities, float32 ``[rows, tokens]``; 0 for the first token of a row, because no
        token precedes it.
    """
    if isinstance(policy, Model):
        params = policy.params
        compute = local_compute(str(param_dtype(params)))
        return _log_probs(params, policy.config, batch, compute, temperature)
    logits = policy(batch.tokens, batch.positions, batch.segment_ids) / temperature
    logps = jax.nn.log_softmax(logits.astype(jnp.float32))[:, :-1]
    chosen = jnp.take_along_axis(logps, jnp.asarray(batch.tokens)[:, 1:, None], axis=-1)
    return jnp.pad(chosen[:, :, 0], ((0, 0), (1, 0)))


@functools.partial(jax.jit, static_argnames=("config", "compute", "temperature"))
def _log_probs(
    params: Params, config: ModelConfig, batch: Batch, compute: Compute, temperature: float
) -> jax.Array:
    return token_logps(params, config, batch, compute, temperature=temperature, entropy=False)[0]


def token_logps(
    params: Params | Adapted,
    config: ModelConfig,
    batch: Batch,
    compute: Compute,
    *,
    temperature: float = 1.0,
    allowed: jax.Array | None = None,
    mask: Any = None,
    entropy: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Computes the log-probability of every token given its predecessors, and the entropies.

    The entropy at a token is the entropy of the policy's distribution over the token. If the batch
    was sampled under a constraint, log-probabilities and entropies are those of the constrained
    distribution.

    Args:
        params: parameters of the policy.
        config: architecture of the policy.
        batch: packed rows to score.
        compute: dtype, operations and sharding of the computation.
        temperature: number by which the logits are divided.
        allowed: tokens that the run's constraint allows
            (`engine.constraint.ConstraintTables.allowed`), if the batch was sampled under a
            constraint; otherwise None.
        mask: ``[rows, tokens]``, nonzero for tokens that are scored. The results of all other
            tokens are 0; chunks without a token to score are skipped. None scores all tokens.
        entropy: whether entropies are computed; if not, 0 is returned in their place.

    Returns:
        Log-probabilities and entropies, each float32 ``[rows, tokens]``; 0 for the first token of a
        row, because no token precedes it.

    Raises:
        ValueError: only one of ``allowed`` and ``batch.rule`` is given.
    """
    if (allowed is None) != (batch.rule is None):
        raise ValueError("give `allowed` if, and only if, the batch has constraint states (`rule`)")
    hidden, weight, order = _hidden(params, config, batch, compute, mask)
    rules = None if batch.rule is None else _arrange(order, jnp.asarray(batch.rule)[:, 1:])
    targets = _arrange(order, jnp.asarray(batch.tokens)[:, 1:])
    allowed = None if allowed is None else jnp.asarray(allowed)
    head = Head(compute, config.tie_embeddings, temperature, entropy)
    logps, entropies = score_chunks(head, hidden, weight, targets, rules, allowed, order.live)
    return _restore(order, logps, batch), _restore(order, entropies, batch)


def logp_sum(
    params: Params | Adapted, config: ModelConfig, batch: Batch, compute: Compute
) -> jax.Array:
    """Computes the sum of the log-probabilities of all tokens that have a loss.

    The result equals a sum over the result of `token_logps`, but takes less time: the forward pass
    computes the gradients too, so the backward pass need not compute the logits again.

    Args:
        params: parameters of the policy.
        config: architecture of the policy.
        batch: packed rows; log-probabilities of tokens with mask 0 are not computed.
        compute: dtype, operations and sharding of the computation.

    Returns:
        The sum, float32 ``[]``.
    """
    hidden, weight, order = _hidden(params, config, batch, compute, batch.mask)
    head = Head(compute, config.tie_embeddings)
    targets, factors = (_arrange(order, jnp.asarray(x)[:, 1:]) for x in (batch.tokens, batch.mask))
    factors = jnp.where(_counted(order), factors, 0.0)
    return weighted_sum(head, hidden, weight, targets, factors, order.live)


# --- positions in chunks -------------------------------------------------------------------


class _Order(NamedTuple):
    """A permutation of the P positions of each of R rows into K chunks of C positions.

    Attributes:
        places: int32 ``[R, K, C]``, index of the position that each place holds; the last position
            is repeated to fill its chunk.
        back: int32 ``[R, P]``, place that holds each position: the inverse permutation.
        scored: bool ``[R, P]``, whether a position is scored.
        live: int32 ``[]``, number of chunks that contain a position to score; these chunks come
            first.
    """

    places: jax.Array
    back: jax.Array
    scored: jax.Array
    live: jax.Array


def chunked(rows: int, length: int, compute: Compute) -> tuple[int, int, int]:
    """Computes how the positions of a batch are arranged in rows and chunks at the output head.

    Args:
        rows: number of rows of the batch.
        length: number of tokens of a row.
        compute: settings of the computation; the function reads only the mesh.

    Returns:
        Three numbers: rows R, positions P per row, and positions C per chunk; there are ceil(P / C)
        chunks. On several devices, over which the rows are sharded, R is ``rows`` and P is
        ``length - 1``, because the last token of a row predicts nothing. On one device, all rows
        are joined into one: R is 1 and P is ``rows * (length - 1)``.
    """
    if compute.one_device:
        return 1, rows * (length - 1), min(CHUNK, rows * (length - 1))
    # Rows are sharded over devices, so a chunk contains positions of every row of a device.
    assert compute.mesh is not None
    each = -(-rows // (compute.mesh.size // compute.mesh.shape["tensor"]))
    return rows, length - 1, min(max(SHARED_CHUNK // each, 1), length - 1)


def _hidden(
    params: Params | Adapted, config: ModelConfig, batch: Batch, compute: Compute, mask: Any
) -> tuple[jax.Array, jax.Array, _Order]:
    """Computes final hidden states ``[K, R, C, D]``, the head's weight, and the permutation."""
    layers = None
    if isinstance(params, Adapted):
        decoder, layers = params.bind(config)
    else:
        decoder = bind(config, params)
    hidden, _ = decoder(
        batch.tokens,
        batch.positions,
        compute,
        segment_ids=batch.segment_ids,
        unfolded=batch.unfolded,
        layers=layers,
    )
    weight = decoder.embed.embedding if decoder.head is None else decoder.head.kernel
    scored = jnp.ones(batch.tokens.shape, bool) if mask is None else jnp.asarray(mask) != 0
    rows, length = batch.tokens.shape
    rows, positions, chunk = chunked(rows, length, compute)
    order = _sort(scored[:, 1:].reshape(rows, positions), chunk)
    chunks = _arrange(order, compute.constrain(hidden, "batch", None, None)[:, :-1])
    return compute.constrain(chunks, None, "batch", None, None), weight[...], order


def _sort(scored: jax.Array, chunk: int) -> _Order:
    """Returns a stable permutation that puts scored positions first."""
    places = jnp.argsort(~scored, axis=1, stable=True)
    back = jnp.argsort(places, axis=1)
    places = jnp.pad(places, ((0, 0), (0, -places.shape[1] % chunk)), mode="edge")
    live = -(-jnp.max(jnp.sum(scored, axis=1)) // chunk)
    return _Order(places.reshape(len(places), -1, chunk), back, scored, live)


def _arrange(order: _Order, x: jax.Array) -> jax.Array:
    """Permutes ``[R, P, ...]``, or an array of the batch's own rows, into ``[K, R, C, ...]``."""
    rows, chunks, chunk = order.places.shape
    x = x.reshape(*order.back.shape, *x.shape[2:])
    places = order.places.reshape(rows, -1, *(1,) * (x.ndim - 2))
    x = jnp.take_along_axis(x, places, axis=1)
    return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)


def _counted(order: _Order) -> jax.Array:
    """Returns bool ``[K, 1, C]``: False at repetitions of the last position that fill a chunk."""
    _, chunks, chunk = order.places.shape
    return (jnp.arange(chunks * chunk) < order.back.shape[1]).reshape(chunks, 1, chunk)


def _restore(order: _Order, x: jax.Array, batch: Batch) -> jax.Array:
    """Inverts `_arrange`; the result is 0 at index 0 and at positions that are not scored."""
    x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)
    x = jnp.where(order.scored, jnp.take_along_axis(x, order.back, axis=1), 0.0)
    return jnp.pad(x.reshape(len(batch.tokens), -1), ((0, 0), (1, 0)))
