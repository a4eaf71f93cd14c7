"""The mathematics of reinforcement learning, from advantages to gradients, each with its source.

Weights of tokens, KL estimates, losses, corrections, the policy's objective and the critic's;
`learn.advantages` has what comes before.  Nothing here knows a model: a policy appears as
log-probabilities, float32 ``[R, T]`` for R packed rows of T tokens.

Only tokens that the policy wrote (``mask`` 1) are actions.  Text of the environment between two of
them is part of the transition: it has no value, no reward and no advantage, and takes no part in
means.  r is the ratio of the policy that learns to the policy that sampled, A the advantage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from coa_jax.bounds import shown
from coa_jax.errors import UserError
from coa_jax.extensions import tried
from coa_jax.learn.algorithms import Algorithm, marked
from coa_jax.learn.batch import Batch

Stats = dict[str, jax.Array]
"""Name of a statistic -> its sum over tokens, or its maximum where the name ends in ``max``."""

AGES = 9
"""Ages of tokens, in steps, that statistics tell apart; the last stands for all beyond it too."""

_BOUND = 20.0  # of log-ratios, whose exponentials would overflow beyond it


# --- weights of tokens ---------------------------------------------------------------------


def weigh(batches: Sequence[Batch], normalise: str, length: int = 1) -> list[Batch]:
    """Weights ``w_t`` of the losses ``l_t`` of tokens in an update's loss ``sum_t w_t l_t / N``.

    N is the number of the policy's tokens in the whole update.  The weights are made on the host
    from the whole update, so neither packing nor micro-batches can change them:

    - ``token``: w = 1, the mean over all tokens (DAPO, arXiv 2503.14476 eq 8);
    - ``sequence``: w = N / (S n), with S sequences and n policy tokens in the token's own: the mean
      over sequences of their means (GRPO, arXiv 2402.03300 eq 3);
    - ``constant``: w = N / (S L), the mean over sequences of their sums over a constant length L
      (Dr.GRPO, arXiv 2503.20783 §3.2), which favours neither short nor long sequences.

    Args:
        batches: all micro-batches of the update, as NumPy arrays.
        normalise: one of the three names.
        length: L of ``constant``.

    Returns:
        The batches; ``weight`` stays None where all weights are 1.
    """
    if normalise == "token":
        return list(batches)
    counts = [_tokens_of_own_sequence(batch) for batch in batches]
    tokens = sum(float(batch.mask.sum(dtype=np.float64)) for batch in batches)
    # Each token of a sequence with n of them counts for 1 / n of a sequence.
    sequences = sum(float((batch.mask / n).sum()) for batch, n in zip(batches, counts, strict=True))
    scale = tokens / max(sequences, 1.0)
    weighed = []
    for batch, n in zip(batches, counts, strict=True):
        if normalise == "sequence":
            weight = batch.mask * scale / n
        elif normalise == "constant":
            weight = batch.mask * scale / length
        else:
            raise ValueError(f"no normalisation {normalise!r}")
        weighed.append(batch._replace(weight=weight.astype(np.float32)))
    return weighed


def _tokens_of_own_sequence(batch: Batch) -> np.ndarray:
    """float64 ``[R, T]``, at least 1."""
    counts = np.ones(batch.mask.shape)
    for row, (ids, mask) in enumerate(zip(batch.segment_ids, batch.mask, strict=True)):
        counts[row] = np.maximum(np.bincount(ids, weights=mask), 1.0)[ids]
    return counts


# --- divergence of two policies ------------------------------------------------------------


def kl_estimate(kind: str, logp: ArrayLike, other: ArrayLike) -> jax.Array:
    """KL(p || q) at tokens that were sampled from p, with d = log p - log q.

    See Schulman 2020 (http://joschu.net/blog/kl-approx.html), and arXiv 2512.21852 for gradients.
    k1 = d, unbiased, noisy and of either sign; k2 = d^2 / 2, biased, but its gradient by the
    parameters of p is an unbiased one of the divergence; k3 = exp(-d) - 1 + d, unbiased, never
    negative, with little variance.

    Args:
        kind: ``k1``, ``k2`` or ``k3``.
        logp: log p of the tokens.
        other: log q of the tokens.

    Returns:
        One estimate a token.
    """
    d = jnp.asarray(logp) - other
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        d = jnp.maximum(d, -_BOUND)
        return jnp.expm1(-d) + d
    raise ValueError(f"no estimator {kind!r}")


# --- losses of tokens ----------------------------------------------------------------------


def surrogate(
    algorithm: Algorithm,
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    entropy: jax.Array,
    batch: Batch,
) -> tuple[jax.Array, Stats]:
    """The loss of each token, and metrics of it, as the algorithm's `LOSSES` function gives them.

    The function may ask for

    - ``logp`` and ``old_logp``, float32 ``[R, T]``, of the policy that learns and of the old one;
    - ``log_ratio``, their difference, and ``ratio`` r, its exponential; 0 and 1 where the policy
      did not write;
    - ``advantages`` A, 0 there; ``mask``, 1 where the policy wrote; ``segment_ids``, which tell the
      sequences of a row apart; ``entropy``;
    - the knobs ``clip_low``, ``clip_high`` and ``dual_clip``.

    Args:
        algorithm: resolved.
        logp, old_logp, advantages, entropy: see above.
        batch: ``mask`` and ``segment_ids`` are read.

    Returns:
        Loss ``[R, T]``, and by name what `policy_objective` takes the mean of over the tokens.

    Raises:
        UserError: the function fails, cannot be traced by JAX, or gives something else.
    """
    name, where = algorithm.loss, "algorithm.loss"
    log_ratio = (logp - old_logp) * batch.mask
    found = tried(
        algorithm.loss_call,
        name,
        where,
        "a loss is a pure function of arrays: jax.numpy, and no `if` on their values",
        logp=logp,
        old_logp=old_logp,
        log_ratio=log_ratio,
        ratio=bounded_exp(log_ratio),
        advantages=advantages,
        mask=batch.mask,
        segment_ids=batch.segment_ids,
        entropy=entropy,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    shape = jnp.shape(logp)
    if not isinstance(loss, jax.Array) or loss.shape != shape or loss.dtype != logp.dtype:
        given = f"{loss.dtype}{[*loss.shape]}" if isinstance(loss, jax.Array) else shown(loss)
        raise UserError(
            f"{where}: {name} gave {given}; a loss gives an array of a number a token, here "
            f"{logp.dtype}{[*shape]}, or a pair of such an array and a dictionary of metrics"
        )
    wrong = _misfit(metrics, shape)
    if wrong is not None:
        raise UserError(
            f"{where}: {name} gave the metric {shown(wrong)}; metrics are a dictionary of numbers, "
            "or arrays of one a token, by names of small letters, digits and _ that do not end in "
            f"max, _square or _share; {', '.join(_OURS)} are there"
        )
    return loss, metrics


_OURS = ("entropy", "kl_old", "kl_ref")
_NUMBERS = jax.Array | np.ndarray | float | int


def _misfit(metrics: Any, shape: tuple[int, ...]) -> Any:
    """The first metric of a loss that cannot be one; None if all can."""
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
    """The exponential of a log-ratio, which cannot overflow."""
    return jnp.exp(jnp.clip(x, -_BOUND, _BOUND))


def clip(
    ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[jax.Array, Stats]:
    """``-min(r A, clip(r) A)`` with bounds 1 - low and 1 + high of r (PPO, arXiv 1707.06347 eq 7).

    So do GRPO (2402.03300) and the paper; DAPO has ``high > low`` (2503.14476 eq 8).  With a dual
    clip c the loss of a token with A < 0 is at most ``-c A`` (1912.09729 eq 4).
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
    """`clip` with ``exp(mean of log r over the sequence's policy tokens)`` in the place of r.

    GSPO, arXiv 2507.18071 eq 5 and 7.  All tokens of a sequence have its loss, so that
    normalisation by sequence gives the mean over sequences.
    """
    ratio = bounded_exp(segment_means(log_ratio, mask, segment_ids))
    return clip(ratio, advantages, clip_low, clip_high, dual_clip)


def cispo(
    logp: jax.Array, ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, Stats]:
    """``-stop_gradient(clip(r)) A log p`` (MiniMax-M1, arXiv 2506.13585 eq 4).

    The weight is clipped, no gradient is.
    """
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jax.lax.stop_gradient(clipped) * advantages * logp
    return loss, _beyond(ratio, advantages, clip_low, clip_high)


def _beyond(ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> Stats:
    """Whether a token's ratio lies beyond the bound that its advantage meets.

    That cuts its gradient off, but not in `cispo`.
    """
    return {
        "clip_low": (advantages < 0) & (ratio < 1 - low),
        "clip_high": (advantages > 0) & (ratio > 1 + high),
    }


def segment_sums(x: ArrayLike, segment_ids: ArrayLike) -> jax.Array:
    """For each token the sum of ``x [R, T]`` over its own sequence of a packed row."""
    x, ids = jnp.asarray(x), jnp.asarray(segment_ids)
    rows, length = x.shape
    sums = jnp.zeros((rows, length + 1), x.dtype)
    sums = jax.vmap(lambda row, at, value: row.at[at].add(value))(sums, ids, x)
    return jnp.take_along_axis(sums, ids, axis=1)


def segment_means(x: ArrayLike, mask: ArrayLike, segment_ids: ArrayLike) -> jax.Array:
    """The same over the policy's tokens of a sequence, divided by their number."""
    return segment_sums(x, segment_ids) / jnp.maximum(segment_sums(mask, segment_ids), 1.0)


# --- corrections for the policy that sampled -----------------------------------------------


def correction(algorithm: Algorithm, gap: jax.Array, batch: Batch) -> tuple[jax.Array, Stats]:
    """The factor rho of a token's surrogate that corrects for the policy that sampled it.

    ``rho = min(k, tis_cap) [mask_low <= k' <= mask_high]``, a constant, where k, by ``tis_level``,
    and k', by ``mask_level``, are p_trainer / p_sampler

    - ``token``: of the token.  ``min(k, C)`` is truncated importance sampling (Yao et al. 2025,
      https://fengyao.notion.site/off-policy-rl), ``k [low <= k <= high]`` IcePop (Ring-1T, arXiv
      2510.18855);
    - ``sequence``: the product over its sequence's policy tokens, which leaves no bias, and whose
      spread grows with length.  ``k [k <= C]`` is masked importance sampling (MIS, Liu et al. 2025,
      https://richardli.xyz/rl-collapse);
    - ``geometric``: their geometric mean, biased, but of one scale at any length; GSPO's ratio.

    A masked token still counts in means.  With ``old_logp=trainer`` the loss is that of decoupled
    PPO: r bounds the step from the proximal policy, rho leads there from the policy that sampled
    (Hilton et al., arXiv 2110.00641 §3; AReaL, arXiv 2505.24298 eq 5).

    Args:
        algorithm: resolved.
        gap: log k of tokens ``[R, T]``, 0 where the policy did not write.
        batch: ``mask`` and ``segment_ids`` are read.
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
    """The loss of an algorithm as a function of log-probabilities and entropies.

    ``sum_t w_t (rho_t surrogate_t + kl_coef KL_t - entropy_coef H_t)``, with rho of `correction`.

    Args:
        logp, entropy: float32 ``[R, T]``, of the policy that learns.
        batch: with ``weight``, ``old_logp`` and ``ref_logp`` as the algorithm needs them.  With
            ``old_logp=trainer`` and no such array the policy is the old one.
        algorithm: resolved.
    """
    on = batch.mask > 0  # where there is no loss, arrays may hold anything
    sampler = jnp.where(on, batch.logp, logp)
    trainer = jax.lax.stop_gradient(logp)
    old = sampler
    if algorithm.old_logp == "trainer":
        if batch.old_logp is not None:
            trainer = jnp.where(on, batch.old_logp, trainer)
        old = trainer
    advantage = jnp.where(on, batch.advantage, 0.0)
    weighted = advantage * jnp.where(advantage < 0, algorithm.negative_weight, 1.0)
    per_token, metrics = surrogate(algorithm, logp, old, weighted, entropy, batch)
    gap = jnp.abs((trainer - sampler) * batch.mask)
    stats = {
        "policy/entropy": entropy,
        **{f"policy/{name}": value for name, value in metrics.items()},
        "policy/kl_old": kl_estimate("k3", old, logp),
        "adv/abs_mean": jnp.abs(advantage),
        "mismatch/abs_logp_mean": gap,
        "mismatch/kl": kl_estimate("k3", sampler, trainer),
    }
    rho, of_correction = correction(algorithm, (trainer - sampler) * batch.mask, batch)
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
    sums = {name: jnp.sum(value * batch.mask) for name, value in stats.items()}
    return loss, {"loss": loss, **sums, "mismatch/abs_logp_max": jnp.max(gap)}


def value_objective(values: jax.Array, batch: Batch, bound: float) -> tuple[jax.Array, Stats]:
    """Half the squared error of values ``[R, T]``, summed over the policy's tokens.

    With a bound the larger of the errors of V and of ``V_old + clip(V - V_old, -bound, bound)``
    counts, so that a value stops moving once it is that far from the old one (PPO as in arXiv
    1707.06347's code; Engstrom et al., arXiv 2005.12729 §3).  Observation tokens have no value.
    ``batch`` has ``value`` and ``returns``.
    """
    assert batch.value is not None
    assert batch.returns is not None
    on = batch.mask > 0  # where there is no loss, arrays may hold anything
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
