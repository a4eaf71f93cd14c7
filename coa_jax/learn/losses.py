"""Losses as sums: how sequences are split over programs cannot change a gradient.

Each is ``(params, model config, batch, ...) -> (sum, statistics)``; the training step adds the sums
of all micro-batches of an update and divides by the number of the policy's tokens in it.  Other
means are weights of tokens, see `learn.normalise`.  A statistic is a sum over tokens as well, or a
maximum where its name ends in ``max``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.batch import Batch
from coa_jax.learn.kl import kl_estimate
from coa_jax.learn.logps import token_logps, weighted_logp_sum
from coa_jax.learn.surrogates import surrogate
from coa_jax.learn.value import token_values
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.config import ModelConfig
from coa_jax.model.remat import Remat
from coa_jax.model.weights import Params

Stats = dict[str, jax.Array]


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
    algorithm: Algorithm,
    temperature: float,
    dtype: Any,
    remat: Remat,
    attention: Attention = REFERENCE,
) -> tuple[jax.Array, Stats]:
    """Policy-gradient loss, summed over the policy's tokens; see `policy_objective`.

    Args:
        params: of the policy.
        config: its architecture.
        batch: of one update.
        allowed: the table of the constraint under which the batch was sampled, if it was.
        algorithm: resolved.
        temperature: of sampling.
        dtype, remat, attention: as in `token_logps`.
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
    return policy_objective(logp, entropy, batch, algorithm)


def policy_objective(
    logp: jax.Array, entropy: jax.Array, batch: Batch, algorithm: Algorithm
) -> tuple[jax.Array, Stats]:
    """The loss of an algorithm as a function of log-probabilities and entropies.

    ``sum_t w_t (rho_t surrogate_t + kl_coef KL_t - entropy_coef H_t)``, where rho is the truncated
    importance weight ``min(p_trainer / p_sampler, tis_cap)`` of Yao et al. 2025
    (https://fengyao.notion.site/off-policy-rl).

    Args:
        logp, entropy: float32 ``[R, T]``, of the policy that learns.
        batch: with ``weight``, ``old_logp`` and ``ref_logp`` as the algorithm needs them.  With
            ``old_logp=trainer`` and no such array the policy is the old one.
        algorithm: resolved.
    """
    on = batch.mask > 0
    # Where there is no loss an array may hold anything.
    sampler = jnp.where(on, batch.logp, logp)
    trainer = jax.lax.stop_gradient(logp)
    old = sampler
    if algorithm.old_logp == "trainer":
        if batch.old_logp is not None:
            trainer = jnp.where(on, batch.old_logp, trainer)
        old = trainer
    log_ratio = (logp - old) * batch.mask
    advantage = jnp.where(on, batch.advantage, 0.0)
    weighted = advantage * jnp.where(advantage < 0, algorithm.negative_weight, 1.0)
    per_token, below, above = surrogate(algorithm, logp, log_ratio, weighted, batch)
    gap = jnp.abs((trainer - sampler) * batch.mask)
    stats = {
        "policy/entropy": entropy,
        "policy/clip_low": below,
        "policy/clip_high": above,
        "policy/kl_old": kl_estimate("k3", old, logp),
        "adv/abs_mean": jnp.abs(advantage),
        "mismatch/abs_logp_mean": gap,
        "mismatch/kl": kl_estimate("k3", sampler, trainer),
    }
    if algorithm.tis_cap:
        rho = jnp.exp(jnp.clip(trainer - sampler, -20.0, 20.0))
        per_token = jnp.minimum(rho, algorithm.tis_cap) * per_token
        stats["mismatch/frac_clipped"] = rho > algorithm.tis_cap
    if batch.ref_logp is not None:
        reference = jnp.where(on, batch.ref_logp, trainer)
        stats["policy/kl_ref"] = kl_estimate("k3", logp, reference)
        if algorithm.kl_in == "loss":
            penalty = kl_estimate(algorithm.kl, logp, reference)
            per_token = per_token + algorithm.kl_coef * penalty
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * entropy
    weight = batch.mask if batch.weight is None else batch.mask * batch.weight
    loss = jnp.sum(per_token * weight)
    sums = {name: jnp.sum(value * batch.mask) for name, value in stats.items()}
    return loss, {"loss": loss, **sums, "mismatch/abs_logp_max": jnp.max(gap)}


def value_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    *,
    bound: float,
    dtype: Any,
    remat: bool,
    attention: Attention = REFERENCE,
) -> tuple[jax.Array, Stats]:
    """Half the squared error of the critic's values, summed; see `value_objective`.

    Args:
        params: of the critic, see `learn.value.init_critic`.
        config: architecture of its body.
        batch: of one update.
        bound: on the movement of a value; 0 for none.
        dtype, remat, attention: as in `token_values`.
    """
    values = token_values(params, config, batch, dtype=dtype, remat=remat, attention=attention)
    return value_objective(values, batch, bound)


def value_objective(values: jax.Array, batch: Batch, bound: float) -> tuple[jax.Array, Stats]:
    """Half the squared error of values ``[R, T]``, summed over the policy's tokens.

    With a bound the larger of the errors of V and of ``V_old + clip(V - V_old, -bound, bound)``
    counts, so that a value stops moving once it is that far from the old one (PPO as in arXiv
    1707.06347's code; Engstrom et al., arXiv 2005.12729 §3).  Observation tokens have no value.
    ``batch`` has ``value`` and ``returns``.
    """
    assert batch.value is not None
    assert batch.returns is not None
    on = batch.mask > 0
    # Where there is no loss an array may hold anything.
    returns = jnp.where(on, batch.returns, 0.0)
    error = jnp.square(values - returns)
    clipped = jnp.zeros_like(on)
    if bound:
        old = jnp.where(on, batch.value, 0.0)
        bounded = jnp.square(old + jnp.clip(values - old, -bound, bound) - returns)
        clipped = bounded > error
        error = jnp.maximum(error, bounded)
    loss = 0.5 * jnp.sum(error * batch.mask)
    return loss, {
        "loss": loss,
        "value": jnp.sum(values * batch.mask),
        "frac_clipped": jnp.sum(clipped * batch.mask),
    }


@functools.lru_cache
def bind(function: Any, **options: Any) -> Any:
    """A loss with its options fixed; equal options give the same object, so one compilation."""
    return functools.partial(function, **options)
