"""Losses as (sum, count) pairs: how sequences are split over programs cannot change a gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learn.batch import Batch
from coa_jax.learn.logps import token_logps, weighted_logp_sum
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.config import ModelConfig
from coa_jax.model.remat import Remat
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


def sft_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    *,
    dtype: Any,
    remat: Remat,
    attention: Attention = REFERENCE,
) -> tuple[jax.Array, Stats]:
    """Negative log-likelihood of the policy's tokens (paper eq 7), summed.

    Observations and prompts have mask 0: what the policy did not write it does not learn to write.
    """
    loss = -weighted_logp_sum(
        params, config, batch, batch.mask, dtype=dtype, remat=remat, attention=attention
    )
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
    remat: Remat,
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
        mask=batch.mask,
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
