"""The mathematics of reinforcement learning in one file: every formula with its source.

From rewards to gradients: advantages of a group and of single tokens, weights of tokens, KL
estimates, surrogates, the policy's objective and the critic's.  Nothing here knows a model: a
policy appears as log-probabilities, float32 ``[R, T]`` for R packed rows of T tokens.

Only tokens that the policy wrote (``mask`` 1) are actions.  Text of the environment between two of
them is part of the transition: it has no value, no reward and no advantage, and takes no part in
means.  r is the ratio of the policy that learns to the policy that sampled, A the advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.batch import Batch

Stats = dict[str, jax.Array]
"""Name of a statistic -> its sum over tokens, or its maximum where the name ends in ``max``."""

AGES = 9
"""Ages of tokens, in steps, that statistics tell apart; the last stands for all beyond it too."""

_BOUND = 20.0  # of log-ratios, whose exponentials would overflow beyond it


# --- advantages of a group (paper eq 10) ---------------------------------------------------


def group_advantages(
    rewards: Sequence[float | None], kind: str = "group", eps: float = 1e-6
) -> np.ndarray:
    """Advantages within one group of samples.

    A sample that could not be graded (None) neither counts for the others nor learns.

    - ``group``: ``(R - mean) / (std + eps)`` (GRPO, arXiv 2402.03300 §4.1.2);
    - ``mean``: ``R - mean`` (Dr.GRPO, arXiv 2503.20783 §3.2);
    - ``leave_one_out``: R less the mean of the others, which is ``(R - mean) n / (n - 1)`` (RLOO,
      arXiv 2402.14740 eq 5);
    - ``batch`` and ``gae``: R itself, from which `gae` and `whiten` make advantages of tokens;
    - ``none``: 0, where a teacher alone says what is better, see `distillation`;
    - ``batch_baseline``: ``R - mean``, likewise (REINFORCE++ with baseline, arXiv 2501.03262).

    Args:
        rewards: of the group's samples.
        kind: see above.
        eps: keeps a standard score finite.

    Returns:
        float32, one per reward; all zero where the graded rewards of a group do not differ, except
        for ``batch`` and ``gae``, which give them as they are.
    """
    graded = np.array([reward is not None for reward in rewards], bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float64)
    if kind in ("batch", "gae"):
        return np.where(graded, values, 0.0).astype(np.float32)
    if kind == "none" or not has_signal(rewards):
        return np.zeros(len(rewards), np.float32)
    centred = values - values[graded].mean()
    if kind == "group":
        centred = centred / (values[graded].std() + eps)
    elif kind == "leave_one_out":
        centred = centred * (graded.sum() / (graded.sum() - 1))
    elif kind not in ("mean", "batch_baseline"):
        raise ValueError(f"no advantage {kind!r}")
    return np.where(graded, centred, 0.0).astype(np.float32)


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether a group's graded rewards differ, so that its gradient is not zero."""
    graded = {reward for reward in rewards if reward is not None}
    return len(graded) > 1


# --- advantages of tokens ------------------------------------------------------------------


def gae(
    rewards: jax.Array,
    values: jax.Array | np.ndarray,
    batch: Batch,
    *,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438 eq 16).

    ``A_t = d_t + gamma lam A_t'``, ``d_t = r_t + gamma V_t' - V_t``, where t' is the policy's next
    token in the same sequence, with nothing after its last.  Values of 0 and lam 1 give discounted
    sums of rewards.

    Args:
        rewards, values: float32 ``[R, T]``.
        batch: ``mask`` and ``segment_ids`` are read.
        gamma, lam: discount and trace decay.

    Returns:
        Advantages and returns ``A + V``, float32 ``[R, T]``, 0 where the policy did not write.
    """

    def step(carry: tuple[jax.Array, ...], column: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        next_advantage, next_value, next_segment = carry
        reward, value, on, segment = column
        same = segment == next_segment
        delta = reward + gamma * jnp.where(same, next_value, 0.0) - value
        advantage = delta + gamma * lam * jnp.where(same, next_advantage, 0.0)
        found = (advantage, value, segment)
        carry = tuple(jnp.where(on, new, old) for new, old in zip(found, carry, strict=True))
        return carry, jnp.where(on, advantage, 0.0)

    on = jnp.asarray(batch.mask).T > 0
    segments = jnp.asarray(batch.segment_ids).T
    columns = (jnp.where(on, rewards.T, 0.0), jnp.where(on, values.T, 0.0), on, segments)
    zeros = jnp.zeros(on.shape[1], jnp.float32)
    start = (zeros, zeros, jnp.full_like(segments[0], -1))
    advantages: jax.Array
    _, advantages = jax.lax.scan(step, start, columns, reverse=True)
    return advantages.T, jnp.where(on, advantages + columns[1], 0.0).T


def whiten(batches: Sequence[Batch], eps: float = 1e-8) -> list[Batch]:
    """Advantages less their mean, over their standard deviation, over all tokens of the policy.

    Global normalisation as in REINFORCE++ (arXiv 2501.03262); for PPO see Andrychowicz et al.
    (arXiv 2006.05990 §3.5).  Advantages that do not differ become 0.
    """
    sums = [jax.device_get(_sums(b.advantage, b.mask, jnp.float32(0.0))) for b in batches]
    count = max(sum(float(np.sum(s[0])) for s in sums), 1.0)
    mean = sum(float(s[1]) for s in sums) / count
    around = [jax.device_get(_sums(b.advantage, b.mask, jnp.float32(mean))) for b in batches]
    variance = sum(float(s[2]) for s in around) / count
    # Below that it is the rounding of the mean.
    scale = 1.0 / np.sqrt(variance + eps) if variance > (1e-6 * mean) ** 2 else 0.0
    return [
        b._replace(
            advantage=_standardise(b.advantage, b.mask, jnp.float32(mean), jnp.float32(scale))
        )
        for b in batches
    ]


@jax.jit
def _sums(
    advantage: jax.Array, mask: jax.Array, mean: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    centred = jnp.where(mask > 0, advantage - mean, 0.0)
    return jnp.sum(mask), jnp.sum(centred), jnp.sum(centred * centred)


@jax.jit
def _standardise(
    advantage: jax.Array, mask: jax.Array, mean: jax.Array, scale: jax.Array
) -> jax.Array:
    return jnp.where(mask > 0, (advantage - mean) * scale, 0.0)


def distillation(old: ArrayLike, teacher: ArrayLike) -> jax.Array:
    """Advantages ``log p_teacher - log p_old`` of tokens that the policy sampled.

    Their mean is less the reverse KL divergence from the teacher, one token at a time, without a
    sum over later ones (on-policy distillation: Lu et al. 2025, https://thinkingmachines.ai/blog/
    on-policy-distillation; Agarwal et al., arXiv 2306.13649 §3; Gu et al., arXiv 2306.08543 eq 1).
    """
    return jnp.clip(jnp.asarray(teacher) - old, -_BOUND, _BOUND)


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


# --- surrogates ----------------------------------------------------------------------------


class Surrogate(NamedTuple):
    """A loss for each token and whether its ratio lies beyond the bound that its advantage meets.

    That cuts its gradient off, but not in CISPO, where the bound is one of the weight.

    Attributes:
        loss: float32 ``[R, T]``.
        below: bool ``[R, T]``, the ratio of a token with A < 0 lies under the lower bound.
        above: bool ``[R, T]``, the ratio of a token with A > 0 lies over the upper bound.
    """

    loss: jax.Array
    below: jax.Array
    above: jax.Array


def surrogate(
    algorithm: Algorithm, logp: jax.Array, log_ratio: jax.Array, advantage: jax.Array, batch: Batch
) -> Surrogate:
    """The surrogate that an algorithm names, with bounds 1 - low and 1 + high of r.

    - ``clip``: ``-min(r A, clip(r) A)`` (PPO, arXiv 1707.06347 eq 7), as GRPO (2402.03300) and the
      paper use it, with ``high > low`` as in DAPO (2503.14476 eq 8).  With a dual clip c the loss
      of a token with A < 0 is at most ``-c A`` (1912.09729 eq 4);
    - ``sequence_clip``: the same with ``exp(mean of log r over the sequence's policy tokens)`` in
      the place of r (GSPO, arXiv 2507.18071 eq 5 and 7).  All tokens of a sequence have its loss,
      so that normalisation by sequence gives the mean over sequences;
    - ``cispo``: ``-stop_gradient(clip(r)) A log p`` (MiniMax-M1, arXiv 2506.13585 eq 4): the weight
      is clipped, no gradient is.
    """
    if algorithm.loss == "sequence_clip":
        log_ratio = segment_means(log_ratio, batch)
    ratio = jnp.exp(jnp.clip(log_ratio, -_BOUND, _BOUND))
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    clipped = jnp.clip(ratio, low, high)
    if algorithm.loss == "cispo":
        loss = -jax.lax.stop_gradient(clipped) * advantage * logp
    else:
        loss = jnp.maximum(-advantage * ratio, -advantage * clipped)
    if algorithm.dual_clip:
        bounded = jnp.minimum(loss, -advantage * algorithm.dual_clip)
        loss = jnp.where(advantage < 0, bounded, loss)
    return Surrogate(loss, (advantage < 0) & (ratio < low), (advantage > 0) & (ratio > high))


def segment_sums(x: ArrayLike, segment_ids: ArrayLike) -> jax.Array:
    """For each token the sum of ``x [R, T]`` over its own sequence of a packed row."""
    x, ids = jnp.asarray(x), jnp.asarray(segment_ids)
    rows, length = x.shape
    sums = jnp.zeros((rows, length + 1), x.dtype)
    sums = jax.vmap(lambda row, at, value: row.at[at].add(value))(sums, ids, x)
    return jnp.take_along_axis(sums, ids, axis=1)


def segment_means(x: jax.Array, batch: Batch) -> jax.Array:
    """The same over the policy's tokens of a sequence, divided by their number."""
    count = segment_sums(batch.mask, batch.segment_ids)
    return segment_sums(x, batch.segment_ids) / jnp.maximum(count, 1.0)


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
            log_k = segment_means(gap, batch)
        return jnp.exp(jnp.clip(log_k, -_BOUND, _BOUND))

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
