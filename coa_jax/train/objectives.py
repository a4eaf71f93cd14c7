"""The formulas of reinforcement learning from advantages to losses, each with its source.

These are weights of tokens, estimates of KL divergences, losses, corrections for the sampling
policy, and objectives. No formula depends on the model: a policy appears as log-probabilities,
float32 ``[R, T]`` for R packed rows of T tokens.

Only tokens that the policy wrote (``mask`` 1) are actions. Text of the environment between two
actions is part of the transition: it has no value, reward or advantage, and is excluded from means.
In the formulas, r is the probability ratio of the current policy to the old policy, and A is the
advantage.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from coa_jax.config.extensions import explain_errors_of
from coa_jax.config.fields import format_value
from coa_jax.errors import UserError
from coa_jax.train.algorithms import Algorithm, marked
from coa_jax.train.batch import Batch

Stats = dict[str, jax.Array]
"""Maps a statistic's name to its sum over tokens, or to its maximum if the name ends in ``max``."""

AGES = 9
"""Number of token ages (in steps) with separate statistics; the last age includes older tokens."""

_BOUND = 20.0  # largest absolute log-ratio, so that its exponential does not overflow


# --- weights of tokens ---------------------------------------------------------------------


def weigh(batches: Sequence[Batch], normalise: str, length: int = 1) -> list[Batch]:
    """Computes the weights w_t of the token losses l_t in an update's loss ``sum_t w_t l_t / N``.

    N is the number of policy tokens of the whole update. The weights are computed on the host from
    the whole update, so they depend neither on packing nor on micro-batches. ``normalise`` chooses
    the mean that the loss is:

    - ``token``: w = 1, the mean over all tokens (DAPO, arXiv 2503.14476 eq 8);
    - ``sequence``: w = N / (S n), where S is the number of sequences and n the number of policy
      tokens in the token's sequence: the mean over sequences of the mean in each sequence (GRPO,
      arXiv 2402.03300 eq 3);
    - ``constant``: w = N / (S L): the mean over sequences of the sum in each sequence, divided by a
      constant L. It favours neither short nor long sequences (Dr. GRPO, arXiv 2503.20783 §3.2).

    A sequence that stands for several equal samples (``copies``) counts once for each of them.

    Args:
        batches: all micro-batches of the update, as NumPy arrays.
        normalise: ``token``, ``sequence`` or ``constant``.
        length: the constant L; read only for ``constant``.

    Returns:
        The batches with ``weight``, float32 ``[R, T]``, which includes ``copies``; ``weight`` stays
        None if all weights are 1.
    """
    if normalise == "token":
        return [b if b.copies is None else b._replace(weight=b.counts) for b in batches]
    lengths = [_tokens_of_own_sequence(batch) for batch in batches]
    tokens = sum(float(batch.counts.sum(dtype=np.float64)) for batch in batches)
    # Each of the n policy tokens of a sequence counts as 1 / n of a sequence.
    sequences = sum(float((b.counts / n).sum()) for b, n in zip(batches, lengths, strict=True))
    scale = tokens / max(sequences, 1.0)
    weighed = []
    for batch, n in zip(batches, lengths, strict=True):
        weight = batch.counts * scale / (n if normalise == "sequence" else length)
        weighed.append(batch._replace(weight=weight.astype(np.float32)))
    return weighed


def _tokens_of_own_sequence(batch: Batch) -> np.ndarray:
    """Returns the number (at least 1) of policy tokens of each token's sequence, ``[R, T]``."""
    counts = np.ones(batch.mask.shape)
    for row, (ids, mask) in enumerate(zip(batch.segment_ids, batch.mask, strict=True)):
        counts[row] = np.maximum(np.bincount(ids, weights=mask), 1.0)[ids]
    return counts


# --- divergence of two policies ------------------------------------------------------------


def kl_estimate(kind: str, logp: ArrayLike, other: ArrayLike) -> jax.Array:
    """Estimates KL(p || q) at tokens sampled from p, from d = log p - log q.

    See Schulman 2020 (http://joschu.net/blog/kl-approx.html), and arXiv 2512.21852 for gradients.

    - k1 = d: unbiased, but noisy, and negative for some tokens;
    - k2 = d^2 / 2: biased, but its gradient with respect to the parameters of p is an unbiased
      estimate of the gradient of the divergence;
    - k3 = exp(-d) - 1 + d: unbiased, never negative, with little variance.

    Args:
        kind: ``k1``, ``k2`` or ``k3``.
        logp: log p of the tokens, float32 of any shape.
        other: log q of the tokens, of the same shape.

    Returns:
        One estimate per token, of the same shape.
    """
    d = jnp.asarray(logp) - other
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    d = jnp.maximum(d, -_BOUND)
    return jnp.expm1(-d) + d


# --- losses of tokens ----------------------------------------------------------------------


def loss_arguments(
    algorithm: Algorithm,
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    entropy: jax.Array,
    batch: Batch,
) -> dict[str, Any]:
    """Returns the arguments with which the algorithm's loss function is called on a batch.

    A loss function (see `algorithms.LOSSES`) may have any of these parameters:

    - ``logp`` and ``old_logp``: log-probabilities under the current and the old policy;
    - ``mask``: 1 for tokens that the policy wrote, 0 for all other tokens;
    - ``log_ratio``: ``logp - old_logp``, and 0 for tokens with mask 0;
    - ``ratio``: r, the exponential of ``log_ratio``;
    - ``advantages``: A, which is 0 for tokens with mask 0;
    - ``segment_ids``: index, within the row, of the sequence that contains the token, from 1;
    - ``entropy``: entropy of the current policy at each token;
    - ``clip_low``, ``clip_high`` and ``dual_clip``: settings of the algorithm.

    All arrays have the shape ``[R, T]``, and are float32 except for ``segment_ids``. The loss
    function must return the loss of each token, float32 ``[R, T]``, or a pair of this array and a
    dictionary of metrics, whose means over tokens are reported. The loss of a token must not depend
    on other sequences, because packing decides which sequences share a row.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        logp, old_logp, advantages, entropy: arrays as described above, float32 ``[R, T]``.
        batch: packed rows, of which only ``mask`` and ``segment_ids`` are read.
    """
    log_ratio = (logp - old_logp) * batch.mask
    return algorithm.loss_call.arguments(
        {
            "logp": logp,
            "old_logp": old_logp,
            "log_ratio": log_ratio,
            "ratio": bounded_exp(log_ratio),
            "advantages": advantages,
            "mask": batch.mask,
            "segment_ids": batch.segment_ids,
            "entropy": entropy,
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "dual_clip": algorithm.dual_clip,
        }
    )


def blaming_loss(algorithm: Algorithm) -> contextlib.AbstractContextManager[None]:
    """Turns an exception of the algorithm's loss function into a `UserError`."""
    advice = "a loss is a pure function of arrays: jax.numpy, and no `if` on their values"
    return explain_errors_of(algorithm.loss_call, algorithm.loss, "algorithm.loss", advice)


def checked_loss(algorithm: Algorithm, result: Any, logp: jax.Array) -> tuple[jax.Array, Stats]:
    """Checks what the algorithm's loss function returned.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        result: what the loss function returned.
        logp: log-probabilities of the tokens, float32 ``[R, T]``.

    Returns:
        The loss of each token, float32 ``[R, T]``, and the loss function's metrics by name.

    Raises:
        UserError: the result has other shapes, or a metric has an invalid name.
    """
    name, where = algorithm.loss, "algorithm.loss"
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    shape = jnp.shape(logp)
    if not isinstance(loss, jax.Array) or loss.shape != shape or loss.dtype != logp.dtype:
        kind = f"{loss.dtype}{[*loss.shape]}" if isinstance(loss, jax.Array) else format_value(loss)
        raise UserError(
            f"{where}: {name} returned {kind}; a loss returns an array with one number per token, "
            f"here {logp.dtype}{[*shape]}, or a pair of such an array and a dictionary of metrics"
        )
    wrong = _misfit(metrics, shape)
    if wrong is not None:
        raise UserError(
            f"{where}: {name} returned the metric {format_value(wrong)}; metrics are a dictionary "
            "of numbers, or of arrays with one number per token; names have small letters, digits "
            f"and _, and do not end in max, _square or _share; {', '.join(_OURS)} are reserved"
        )
    return loss, metrics


_OURS = ("entropy", "kl_old", "kl_ref")
_NUMBERS = jax.Array | np.ndarray | float | int


def _misfit(metrics: Any, shape: tuple[int, ...]) -> Any:
    """Returns the name of the first invalid metric of a loss; None if all metrics are valid."""
    if not isinstance(metrics, dict):
        return metrics
    for name, value in metrics.items():
        good = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None
        if not good or name in _OURS or name.endswith(("max", "_square", "_share")):
            return name
        if not isinstance(value, _NUMBERS) or jnp.shape(value) not in ((), shape):
            return name
    return None


def bounded_exp(x: jax.Array) -> jax.Array:
    """Computes the exponential of a log-ratio, after clipping it so that the result is finite."""
    return jnp.exp(jnp.clip(x, -_BOUND, _BOUND))


def clip(
    ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[jax.Array, Stats]:
    """Computes PPO's loss ``-min(r A, clip(r, 1 - low, 1 + high) A)`` (arXiv 1707.06347 eq 7).

    GRPO (arXiv 2402.03300) and Chain-of-Agents use the same loss; DAPO sets ``high > low`` (arXiv
    2503.14476 eq 8). If ``dual_clip`` is c > 0, the loss of a token with A < 0 is at most ``-c A``
    (arXiv 1912.09729 eq 4).

    Args:
        ratio: r, float32 ``[R, T]``.
        advantages: A, float32 ``[R, T]``.
        clip_low: low; r is clipped to at least ``1 - clip_low``.
        clip_high: high; r is clipped to at most ``1 + clip_high``.
        dual_clip: the constant c; 0 for no dual clip.

    Returns:
        The loss of each token, float32 ``[R, T]``, and whether r is beyond each clip bound.
    """
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip:
        bounded = jnp.minimum(loss, -advantages * dual_clip)
        loss = jnp.where(advantages < 0, bounded, loss)
    return loss, _beyond(ratio, advantages, clip_low, clip_high)


@marked(of_sequence=True)
def sequence_clip(
    log_ratio: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[jax.Array, Stats]:
    """Computes the loss of `clip` with one ratio per sequence (GSPO, arXiv 2507.18071 eq 5 and 7).

    The ratio is the exponential of the mean of log r over the policy tokens of the sequence. All
    tokens of a sequence have the same loss, so ``normalise=sequence`` yields the mean over
    sequences. For the parameters see `loss_arguments`; for the results see `clip`.
    """
    ratio = bounded_exp(segment_means(log_ratio, mask, segment_ids))
    return clip(ratio, advantages, clip_low, clip_high, dual_clip)


def cispo(
    logp: jax.Array, ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, Stats]:
    """Computes CISPO's loss ``-stop_gradient(clip(r)) A log p`` (arXiv 2506.13585 eq 4).

    Clipping bounds the factor of a token's gradient, but no token loses its gradient.
    `loss_arguments` explains the parameters, and `clip` the results.
    """
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jax.lax.stop_gradient(clipped) * advantages * logp
    return loss, _beyond(ratio, advantages, clip_low, clip_high)


def _beyond(ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> Stats:
    """Returns whether each token's ratio is beyond the clip bound on the side of its advantage.

    Such a token has no gradient, except in `cispo`.
    """
    return {
        "clip_low": (advantages < 0) & (ratio < 1 - low),
        "clip_high": (advantages > 0) & (ratio > 1 + high),
    }


def segment_sums(x: ArrayLike, segment_ids: ArrayLike) -> jax.Array:
    """Returns, for each token, the sum of ``x [R, T]`` over the token's sequence in its row."""
    x, ids = jnp.asarray(x), jnp.asarray(segment_ids)
    count = x.shape[1] + 1
    sums = jax.vmap(lambda row, of: jax.ops.segment_sum(row, of, count))(x, ids)
    return jnp.take_along_axis(sums, ids, axis=1)


def segment_means(x: ArrayLike, mask: ArrayLike, segment_ids: ArrayLike) -> jax.Array:
    """Returns, for each token, the mean of ``x [R, T]`` over the policy tokens of its sequence."""
    return segment_sums(x, segment_ids) / jnp.maximum(segment_sums(mask, segment_ids), 1.0)


# --- corrections for the policy that sampled -----------------------------------------------


def correction(algorithm: Algorithm, gap: jax.Array, batch: Batch) -> tuple[jax.Array, Stats]:
    """Computes the importance weight rho, which corrects for sampling with another policy.

    ``rho = min(k, C) [low <= k' <= high]`` has no gradient. The bracket is 1 if the condition in it
    holds, else 0. C is ``tis_cap``, low is ``mask_low``, high is ``mask_high``. k is the ratio
    p_trainer / p_sampler at the level ``tis_level``, and k' at the level ``mask_level``:

    - ``token``: the ratio of the token itself;
    - ``sequence``: the product of the ratios of the sequence's policy tokens. The product is
      unbiased, but its variance grows with the length;
    - ``geometric``: the geometric mean of these ratios, which is GSPO's ratio. The geometric mean
      is biased, but has the same scale at any length.

    If ``tis_cap`` is 0, 1 takes the place of ``min(k, C)``; a bound that is 0 does not apply. A
    token whose rho is 0 still counts in the number of tokens by which the loss is divided.
    Special cases:

    - truncated importance sampling: ``min(k, C)`` of tokens, without bounds (Yao et al. 2025,
      https://fengyao.notion.site/off-policy-rl);
    - IcePop: ``k [low <= k <= high]`` of tokens, if C is at least high (arXiv 2510.18855);
    - masked importance sampling: ``k [k <= high]`` of sequences, if C is high and low is 0 (Liu et
      al. 2025, https://richardli.xyz/rl-collapse).

    With ``old_logp=trainer``, the loss is that of decoupled PPO (arXiv 2110.00641 §3, 2505.24298 eq
    5): its ratio compares the current policy with the trainer's policy before the step's updates,
    so clipping limits the change in a step; rho corrects for tokens that another policy sampled.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        gap: log(p_trainer / p_sampler) of the policy's tokens, else 0, float32 ``[R, T]``.
        batch: packed rows; the function reads only ``mask`` and ``segment_ids``.

    Returns:
        rho, float32 ``[R, T]``, and statistics of the correction by name.
    """

    def ratio(level: str) -> jax.Array:
        log_k = gap if level == "token" else segment_sums(gap, batch.segment_ids)
        if level == "geometric":
            log_k = segment_means(gap, batch.mask, batch.segment_ids)
        return bounded_exp(log_k)

    rho, stats = jnp.ones_like(gap), Stats()
    if algorithm.tis_cap:
        k = ratio(algorithm.tis_level)
        rho = jnp.minimum(k, algorithm.tis_cap)
        stats["mismatch/frac_clipped"] = k > algorithm.tis_cap
    if algorithm.masks:
        k = ratio(algorithm.mask_level)
        outside = (k < algorithm.mask_low) | (k > (algorithm.mask_high or jnp.inf))
        rho = jnp.where(outside, 0.0, rho)
        stats["mismatch/frac_masked"] = outside
    if stats:
        stats |= {"mismatch/weight": rho, "mismatch/weight_square": rho * rho}
    return rho, stats


# --- objectives ----------------------------------------------------------------------------


def policy_objective(
    logp: jax.Array, entropy: jax.Array, batch: Batch, algorithm: Algorithm
) -> tuple[jax.Array, Stats]:
    """Computes the loss of an algorithm from log-probabilities and entropies.

    The loss is ``sum_t w_t (rho_t l_t + kl_coef KL_t - entropy_coef H_t)``, where w is
    ``batch.weight``, rho comes from `correction`, l is the result of the loss function
    ``algorithm.loss``, KL estimates the divergence from the reference policy (``batch.ref_logp``),
    and H is the entropy. With ``kl_in=reward`` the rewards contain KL, so it is not added here.

    Args:
        logp, entropy: log-probabilities and entropies of the current policy, float32 ``[R, T]``.
        batch: packed rows. ``weight``, ``old_logp`` and ``ref_logp`` may be None if the algorithm
            does not need them. If ``algorithm.old_logp`` is ``trainer`` and ``batch.old_logp`` is
            None, the current policy is the old policy.
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.

    Returns:
        The loss summed over tokens, float32 ``[]``, and statistics by name, see `Stats`.
    """
    on = batch.mask > 0  # elsewhere the arrays may hold anything
    sampler = jnp.where(on, batch.logp, logp)
    trainer = jax.lax.stop_gradient(logp)
    old = sampler
    if algorithm.old_logp == "trainer":
        if batch.old_logp is not None:
            trainer = jnp.where(on, batch.old_logp, trainer)
        old = trainer
    advantage = jnp.where(on, batch.advantage, 0.0)
    weighted = advantage * jnp.where(advantage < 0, algorithm.negative_weight, 1.0)
    arguments = loss_arguments(algorithm, logp, old, weighted, entropy, batch)
    with blaming_loss(algorithm):
        result = algorithm.loss_call.function(**arguments)
    per_token, metrics = checked_loss(algorithm, result, logp)
    difference = (trainer - sampler) * batch.mask
    gap = jnp.abs(difference)
    stats = {
        "policy/entropy": entropy,
        **{f"policy/{name}": value for name, value in metrics.items()},
        "policy/kl_old": kl_estimate("k3", old, logp),
        "adv/abs_mean": jnp.abs(advantage),
        "mismatch/abs_logp_mean": gap,
        "mismatch/kl": kl_estimate("k3", sampler, trainer),
    }
    rho, of_correction = correction(algorithm, difference, batch)
    per_token = rho * per_token
    stats |= of_correction
    if batch.age is not None:
        for age in range(AGES):
            aged = jnp.minimum(batch.age, AGES - 1) == age
            stats |= {f"mismatch/age_{age}": gap * aged, f"mismatch/age_{age}_share": aged}
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
    sums = {name: jnp.sum(value * batch.counts) for name, value in stats.items()}
    return loss, {"loss": loss, **sums, "mismatch/abs_logp_max": jnp.max(gap)}


def value_objective(values: jax.Array, batch: Batch, bound: float) -> tuple[jax.Array, Stats]:
    """Computes half the squared error of a critic's values, summed over policy tokens.

    With a bound, the loss is the larger of two squared errors: the error of V, and the error of the
    clipped value ``V_old + clip(V - V_old, -bound, bound)``. A value that has moved towards its
    target by more than the bound therefore has no gradient (code of PPO, arXiv 1707.06347; Engstrom
    et al., arXiv 2005.12729 §3).

    Args:
        values: values V of the critic, float32 ``[R, T]``.
        batch: packed rows, with the critic's old values ``value`` and the targets ``returns``.
        bound: the constant in the formula above; 0 for no bound.

    Returns:
        The loss summed over tokens, float32 ``[]``, and statistics by name, see `Stats`.
    """
    assert batch.value is not None
    assert batch.returns is not None
    on = batch.mask > 0  # elsewhere the arrays may hold anything
    returns = jnp.where(on, batch.returns, 0.0)
    error = jnp.square(values - returns)
    clipped = jnp.zeros_like(on)
    if bound:
        old = jnp.where(on, batch.value, 0.0)
        bounded = jnp.square(old + jnp.clip(values - old, -bound, bound) - returns)
        clipped = bounded > error
        error = jnp.maximum(error, bounded)
    loss = 0.5 * jnp.sum(error * batch.counts)
    return loss, {
        "loss": loss,
        "value": jnp.sum(values * batch.counts),
        "frac_clipped": jnp.sum(clipped * batch.counts),
    }
