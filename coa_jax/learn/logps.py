"""Log-probabilities of given tokens, without the logits of a whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.engine.constraint import FREE, allowed_tokens
from coa_jax.learn.batch import Batch
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import forward, unembed
from coa_jax.model.weights import Params
from coa_jax.parallel.mesh import constrain


def token_logps(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    *,
    dtype: Any,
    remat: bool,
    attention: Attention = REFERENCE,
    temperature: float = 1.0,
    vocab_chunk: int = 2048,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of every token given those before it.

    Logits exist for ``vocab_chunk`` tokens at a time only, in both passes.  Of a batch that was
    sampled under a constraint they are those of the constrained distribution, for which
    ``allowed`` has to be given, see `engine.constraint.ConstraintTables`.

    Returns:
        float32 ``[R, T]`` each; index 0 of a row is 0.
    """
    if (allowed is None) != (batch.rule is None):
        raise ValueError("a constrained batch needs the table of its constraint, and no other one")
    hidden, _ = forward(
        params,
        config,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        dtype=dtype,
        remat=remat,
        attention=attention,
    )
    rows, length = batch.tokens.shape
    # Token t predicts token t + 1.  A chunk is a piece of every row: rows stay where they are.
    mesh = attention.mesh
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    width = min(max(vocab_chunk * shards // rows, 1), length - 1)
    padding = -(length - 1) % width

    def chunks(x: jax.Array, fill: int = 0) -> jax.Array:
        widths = ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill).reshape(rows, -1, width, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    hidden = constrain(hidden, mesh, "batch", None, None)
    flat, targets = chunks(hidden[:, :-1]), chunks(jnp.asarray(batch.tokens)[:, 1:])
    rules = None if batch.rule is None else chunks(jnp.asarray(batch.rule)[:, 1:], FREE)

    @jax.checkpoint
    def score(item: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        h, target, rule = item
        logits = unembed(params, config, h, dtype) / temperature
        logits = constrain(logits, mesh, "batch", None, "vocab")
        if allowed is None or rule is None:
            logps = jax.nn.log_softmax(logits, axis=-1)
            entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
        else:
            may = allowed_tokens(allowed, rule, logits.shape[-1])
            logps = jax.nn.log_softmax(logits, axis=-1, where=may)
            entropy = -jnp.sum(jnp.exp(logps) * jnp.where(may, logps, 0.0), axis=-1)
        return jnp.take_along_axis(logps, target[..., None], axis=-1)[..., 0], entropy

    def shaped(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, : length - 1]
        return jnp.pad(x, ((0, 0), (1, 0)))

    logps, entropies = jax.lax.map(score, (flat, targets, rules))
    return shaped(logps), shaped(entropies)
