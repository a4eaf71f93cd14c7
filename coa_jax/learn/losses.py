"""Losses as (sum, count) pairs: how sequences are split over programs cannot change a gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.engine.constraint import FREE, allowed_tokens
from coa_jax.learn.batch import Batch
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import forward, unembed
from coa_jax.model.weights import Params

Stats = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """Clipped policy gradient (paper eq 9, with the clip bounds of DAPO).

    Attributes:
        clip_low: ratios below ``1 - clip_low`` stop pushing a token further down.
        clip_high: ratios above ``1 + clip_high`` stop pushing it further up.
        dual_clip: for negative advantages the loss is at most this multiple of it; 0 for none.
        negative_weight: factor on negative advantages.  Below 1 what worked counts for more: pass@1
            rises faster, at the price of variety and so of pass@k (Xiong et al. 2025, arXiv
            2504.11343; Zhu et al. 2025, arXiv 2506.01347).
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    negative_weight: float = 1.0


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
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    targets = jnp.asarray(batch.tokens[:, 1:].reshape(-1))
    padding = -flat.shape[0] % min(vocab_chunk, flat.shape[0])
    chunk = min(vocab_chunk, flat.shape[0])
    flat = jnp.pad(flat, ((0, padding), (0, 0))).reshape(-1, chunk, flat.shape[-1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)
    rules = None
    if batch.rule is not None:
        rules = jnp.pad(batch.rule[:, 1:].reshape(-1), (0, padding), constant_values=FREE)
        rules = rules.reshape(-1, chunk)

    @jax.checkpoint
    def score(item: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        h, target, rule = item
        logits = unembed(params, config, h, dtype) / temperature
        if allowed is None or rule is None:
            logps = jax.nn.log_softmax(logits, axis=-1)
            entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
        else:
            may = allowed_tokens(allowed, rule, logits.shape[-1])
            logps = jax.nn.log_softmax(logits, axis=-1, where=may)
            entropy = -jnp.sum(jnp.exp(logps) * jnp.where(may, logps, 0.0), axis=-1)
        return jnp.take_along_axis(logps, target[:, None], axis=-1)[:, 0], entropy

    def shaped(x: jax.Array) -> jax.Array:
        return jnp.pad(x.reshape(-1)[: rows * (length - 1)].reshape(rows, -1), ((0, 0), (1, 0)))

    logps, entropies = jax.lax.map(score, (flat, targets, rules))
    return shaped(logps), shaped(entropies)


def sft_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    *,
    dtype: Any,
    remat: bool,
    attention: Attention = REFERENCE,
) -> tuple[jax.Array, Stats]:
    """Negative log-likelihood of the policy's tokens (paper eq 7), summed.

    Observations and prompts have mask 0: what the policy did not write it does not learn to write.
    """
    logp, _ = token_logps(params, config, batch, dtype=dtype, remat=remat, attention=attention)
    loss = -jnp.sum(logp * batch.mask)
    return loss, {"loss": loss}


def policy_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    allowed: jax.Array | None = None,
    *,
    clip: PolicyLossConfig,
    temperature: float,
    dtype: Any,
    remat: bool,
    attention: Attention = REFERENCE,
) -> tuple[jax.Array, Stats]:
    """Clipped policy-gradient loss, summed over the policy's tokens.

    The log-probabilities of the sampler stand for the old policy.  ``allowed`` is the table of the
    constraint under which the batch was sampled, if it was.
    """
    logp, entropy = token_logps(
        params,
        config,
        batch,
        dtype=dtype,
        remat=remat,
        attention=attention,
        temperature=temperature,
        allowed=allowed,
    )
    difference = (logp - batch.logp) * batch.mask
    ratio = jnp.exp(jnp.clip(difference, -20.0, 20.0))
    clipped = jnp.clip(ratio, 1 - clip.clip_low, 1 + clip.clip_high)
    weight = jnp.where(batch.advantage < 0, clip.negative_weight, 1.0)
    advantage = batch.advantage * weight
    per_token = jnp.maximum(-advantage * ratio, -advantage * clipped)
    if clip.dual_clip:
        bounded = jnp.minimum(per_token, -advantage * clip.dual_clip)
        per_token = jnp.where(advantage < 0, bounded, per_token)
    loss = jnp.sum(per_token * batch.mask)
    below = (advantage < 0) & (ratio < 1 - clip.clip_low)
    above = (advantage > 0) & (ratio > 1 + clip.clip_high)
    gap = jax.lax.stop_gradient(jnp.abs(difference))
    return loss, {
        "loss": loss,
        "policy/entropy": jnp.sum(entropy * batch.mask),
        "policy/clip_low": jnp.sum(below * batch.mask),
        "policy/clip_high": jnp.sum(above * batch.mask),
        "mismatch/abs_logp_mean": jnp.sum(gap),
        "mismatch/abs_logp_max": jnp.max(gap),
    }


@functools.lru_cache
def bind(function: Any, **options: Any) -> Any:
    """A loss with its options fixed; equal options give the same object, so one compilation."""
    return functools.partial(function, **options)
