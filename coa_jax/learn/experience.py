"""What a step's batches need beyond the rollouts: scores under other policies, values, advantages.

All of it is computed once, before the step's first update, and put into the batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from coa_jax.learn.advantages import distillation, gae, whiten
from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.batch import Batch
from coa_jax.learn.logps import token_logps
from coa_jax.learn.objectives import kl_estimate
from coa_jax.learn.teacher import Teacher
from coa_jax.learn.value import token_values
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.export import to_host
from coa_jax.model.params import Params, without_adapters
from coa_jax.parallel.placement import put_batch
from coa_jax.parallel.turns import in_turn


@functools.partial(jax.jit, static_argnames=("model", "compute", "temperature"))
def score(
    params: Params,
    batch: Batch,
    allowed: jax.Array | None = None,
    *,
    model: ModelConfig,
    compute: Compute,
    temperature: float = 1.0,
) -> jax.Array:
    """Log-probabilities of the tokens that are learned, float32 ``[R, T]``; others are 0."""
    logps, _ = token_logps(
        params,
        model,
        batch,
        compute,
        temperature=temperature,
        allowed=allowed,
        mask=batch.mask,
        entropy=False,
    )
    return logps


@functools.partial(jax.jit, static_argnames=("model", "compute"))
def score_values(
    params: Params, batch: Batch, *, model: ModelConfig, compute: Compute
) -> jax.Array:
    """Values of a batch's tokens under a critic, float32 ``[R, T]``."""
    return token_values(params, model, batch, compute)


def scores_old(algorithm: Algorithm, updates: int) -> bool:
    """Whether the policy before a step's updates scores its tokens.

    With one update the parameters are the old policy's, and the loss computes what it needs; but
    rewards and advantages are made before.
    """
    early = (algorithm.needs_reference and algorithm.kl_in == "reward") or algorithm.opd_coef > 0
    return algorithm.old_logp == "trainer" and (updates > 1 or early)


def complete_experience(
    algorithm: Algorithm,
    batches: Sequence[Batch],
    model: ModelConfig,
    policy: Params,
    *,
    critic: Params | None,
    reference: Params | None,
    temperature: float,
    compute: Compute,
    teacher: Teacher | None = None,
    updates: int = 1,
    allowed: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[list[Batch], dict[str, float]]:
    """Fills in what the algorithm reads.

    Args:
        algorithm: resolved.
        batches: micro-batches of the whole step, whose ``advantage`` is that of a sequence's tokens
            or, where the algorithm has advantages of single tokens, the reward of the sequence at
            its last token; with ``teacher_logp`` if a server has scored them.
        model: architecture of policy, critic and reference.
        policy: parameters before the step's updates.
        critic, reference: parameters, where the algorithm needs them.
        temperature: of sampling.
        compute: how to compute the forward passes.
        teacher: a local one, where the algorithm needs it.
        updates: optimiser updates of the step.
        allowed: table of the constraint, if the batches were sampled under one.
        mesh: over which rows are split while they are scored.

    Returns:
        The batches on the host, with ``old_logp``, ``ref_logp``, ``value``, ``returns`` and
        ``advantage`` where they are needed, and figures of them.
    """
    in_reward = algorithm.needs_reference and algorithm.kl_in == "reward"
    settings: dict[str, Any] = {"model": model, "compute": compute, "temperature": temperature}

    def each(batches: Sequence[Batch], name: str, score: Callable[[Batch], Any]) -> list[Batch]:
        def filled(batch: Batch) -> Batch:
            values = in_turn(mesh, score, put_batch(inputs(batch), mesh))
            found: dict[str, Any] = {name: to_host(values)}
            return batch._replace(**found)

        return [filled(batch) for batch in batches]

    filled = list(batches)
    if scores_old(algorithm, updates):
        old = functools.partial(score, policy, allowed=allowed, **settings)
        filled = each(filled, "old_logp", old)
    if reference is not None:
        base = {**settings, "model": without_adapters(model)}
        ref = functools.partial(score, reference, allowed=allowed, **base)
        filled = each(filled, "ref_logp", ref)
    if teacher is not None:
        known = None if allowed is None else teacher.fitted(allowed)
        own = {**settings, "model": teacher.config}
        filled = each(
            filled, "teacher_logp", functools.partial(score, teacher.params, allowed=known, **own)
        )
    if critic is not None:
        value = functools.partial(score_values, critic, model=model, compute=compute)
        filled = each(filled, "value", value)
    stats: dict[str, float] = {}
    if algorithm.whitened:
        estimate = functools.partial(
            _estimate,
            gamma=algorithm.gamma,
            lam=algorithm.lam if critic is not None else 1.0,
            kl=algorithm.kl if in_reward else "",
            kl_coef=algorithm.kl_coef,
        )
        filled = [jax.device_get(estimate(batch)) for batch in filled]
        if critic is not None:
            stats |= _explained_variance(filled)
        filled = jax.device_get(whiten(filled))
    if algorithm.opd_coef:
        filled, divergence = _distilled(filled, algorithm.opd_coef)
        stats |= divergence
    return filled, stats


def inputs(batch: Batch) -> Batch:
    """What a model reads of a batch; with more, each pass would be another program."""
    return batch._replace(
        weight=None, old_logp=None, ref_logp=None, value=None, returns=None,
        teacher_logp=None, age=None,
    )  # fmt: skip


def _distilled(batches: Sequence[Batch], coef: float) -> tuple[list[Batch], dict[str, float]]:
    """Adds the teacher's advantages; and the divergence from it, k1, in nats a token."""
    made, total, count = [], 0.0, 0.0
    for batch in batches:
        assert batch.teacher_logp is not None
        old = batch.logp if batch.old_logp is None else batch.old_logp
        gain = np.where(batch.mask > 0, np.asarray(distillation(old, batch.teacher_logp)), 0.0)
        total, count = total - float(gain.sum(dtype=np.float64)), count + float(batch.mask.sum())
        advantage = batch.advantage + np.float32(coef) * gain
        made.append(batch._replace(advantage=advantage.astype(np.float32), teacher_logp=None))
    return made, {"opd/reverse_kl": total / max(count, 1.0)}


@functools.partial(jax.jit, static_argnames=("gamma", "lam", "kl", "kl_coef"))
def _estimate(batch: Batch, *, gamma: float, lam: float, kl: str, kl_coef: float) -> Batch:
    """Advantages and returns of tokens; ``advantage`` holds rewards until then."""
    rewards = jnp.where(batch.mask > 0, batch.advantage, 0.0)
    if kl:
        assert batch.ref_logp is not None
        old = batch.logp if batch.old_logp is None else batch.old_logp
        rewards = rewards - kl_coef * batch.mask * kl_estimate(kl, old, batch.ref_logp)
    values = jnp.zeros_like(rewards) if batch.value is None else batch.value
    advantages, returns = gae(rewards, values, batch, gamma=gamma, lam=lam)
    return batch._replace(advantage=advantages, returns=returns)  # type: ignore[arg-type]


def _explained_variance(batches: Sequence[Batch]) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one."""

    def means(returned: float, error: float) -> np.ndarray:
        about = [jax.device_get(_moments(b, returned, error)) for b in batches]
        count, *moments = np.sum(np.asarray(about, np.float64), axis=0)
        return np.asarray(moments) / max(count, 1.0)

    # Around the means: of squares in float32 a small variance would not be left.
    returned, error = means(0.0, 0.0)[[0, 2]]
    _, variance, _, unexplained = means(returned, error)
    known = variance > (1e-6 * returned) ** 2  # below that it is the rounding of the mean
    return {"critic/explained_variance": float(1 - unexplained / variance) if known else 0.0}


@jax.jit
def _moments(batch: Batch, returned: ArrayLike, missed: ArrayLike) -> jax.Array:
    assert batch.returns is not None
    assert batch.value is not None
    on = batch.mask > 0
    returns = jnp.where(on, batch.returns - returned, 0.0)
    error = jnp.where(on, batch.returns - batch.value - missed, 0.0)
    return jnp.stack([jnp.sum(x) for x in (batch.mask, returns, returns**2, error, error**2)])
