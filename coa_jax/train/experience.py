"""Adds scores under other policies, values and advantages to the batches of a step.

All of these arrays are computed once per step, before the step's first update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf_weights import to_host
from coa_jax.model.params import Adapted, Params, without_adapters
from coa_jax.parallel.launch_order import launch_alone
from coa_jax.parallel.placement import put_batch
from coa_jax.train.advantages import distillation, gae, whiten
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import Batch
from coa_jax.train.critic import token_values
from coa_jax.train.logps import token_logps
from coa_jax.train.objectives import kl_estimate
from coa_jax.train.teacher import Teacher


@functools.partial(jax.jit, static_argnames=("model_config", "compute", "temperature"))
def score(
    params: Params | Adapted,
    batch: Batch,
    allowed: jax.Array | None = None,
    *,
    model_config: ModelConfig,
    compute: Compute,
    temperature: float = 1.0,
) -> jax.Array:
    """Computes the log-probabilities of the tokens that have a loss.

    Args:
        params: parameters of the policy.
        batch: packed rows: R rows of T tokens.
        allowed: tokens that the run's constraint allows, the table `ConstraintTables.allowed`; None
            without constrained decoding.
        model_config: architecture of the policy.
        compute: dtype, operations and sharding of the computation.
        temperature: sampling temperature, which divides the logits.

    Returns:
        Log-probabilities, float32 ``[R, T]``; 0 for tokens without a loss.
    """
    logps, _ = token_logps(
        params,
        model_config,
        batch,
        compute,
        temperature=temperature,
        allowed=allowed,
        mask=batch.mask,
        entropy=False,
    )
    return logps


score_values = jax.jit(token_values, static_argnames=("model_config", "compute"))
"""The compiled program of `critic.token_values`."""


def scores_old(algorithm: Algorithm, updates: int) -> bool:
    """Returns whether a separate forward pass must compute the old log-probabilities.

    The old log-probabilities are those of the policy before the step's first update. In a step with
    a single update, the loss itself computes them, because the parameters are still those of the
    old policy. Two settings need the log-probabilities before the loss: a KL penalty in the
    rewards, and advantages that are computed from the log-probabilities of a teacher.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        updates: number of updates of the step.
    """
    early = (algorithm.needs_reference and algorithm.kl_in == "reward") or algorithm.opd_coef > 0
    return algorithm.old_logp == "trainer" and (updates > 1 or early)


def complete_experience(
    algorithm: Algorithm,
    batches: Sequence[Batch],
    model_config: ModelConfig,
    policy: Params | Adapted,
    *,
    critic: Params | None,
    reference: Params | Adapted | None,
    temperature: float,
    compute: Compute,
    teacher: Teacher | None = None,
    updates: int = 1,
    allowed: jax.Array | None = None,
) -> tuple[list[Batch], dict[str, float]]:
    """Adds to the batches of a step those arrays that the algorithm needs for its loss.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        batches: micro-batches of the whole step. If `Algorithm.whitened` is true, ``advantage``
            holds the reward of each sequence, at the sequence's last token; otherwise ``advantage``
            holds the advantage of each token. ``teacher_logp`` is present if a server has already
            scored the tokens under the teacher.
        model_config: architecture of policy, critic and reference.
        policy: parameters before the step's updates.
        critic: parameters of the critic; None without a critic.
        reference: parameters of the reference policy; None without a KL penalty.
        temperature: sampling temperature.
        compute: dtype, operations and sharding of the forward passes; rows are split over the mesh
            of ``compute``.
        teacher: teacher model on the devices of this run; None without such a teacher.
        updates: number of optimiser updates of the step.
        allowed: tokens that the run's constraint allows, the table `ConstraintTables.allowed`; None
            without constrained decoding.

    Returns:
        The batches, as arrays on the host, and a dictionary of metrics that summarise the new
        fields. The function sets ``old_logp``, ``ref_logp``, ``value``, ``returns`` and
        ``advantage`` if the algorithm needs them.
    """
    in_reward = algorithm.needs_reference and algorithm.kl_in == "reward"
    filled = list(batches)

    def each(name: str, program: Callable[[Batch], Any]) -> list[Batch]:
        placed = (put_batch(inputs(batch), compute.mesh) for batch in filled)
        columns: Iterator[Any] = (to_host(launch_alone(compute.mesh, program, b)) for b in placed)
        return [b._replace(**{name: values}) for b, values in zip(filled, columns, strict=True)]

    def scored(
        name: str, params: Params | Adapted, shape: ModelConfig, allowed: Any
    ) -> list[Batch]:
        static = {"model_config": shape, "compute": compute, "temperature": temperature}
        return each(name, functools.partial(score, params, allowed=allowed, **static))

    if scores_old(algorithm, updates):
        filled = scored("old_logp", policy, model_config, allowed)
    if reference is not None:
        filled = scored("ref_logp", reference, without_adapters(model_config), allowed)
    if teacher is not None:
        known = None if allowed is None else teacher.fitted(allowed)
        filled = scored("teacher_logp", teacher.params, teacher.config, known)
    if critic is not None:
        value = functools.partial(score_values, critic, model_config=model_config, compute=compute)
        filled = each("value", value)
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
    """Removes from a batch the arrays that a forward pass does not read.

    A jitted function is compiled again for every combination of arrays that are present, so unused
    arrays would cause needless compilations.
    """
    return batch._replace(
        weight=None, old_logp=None, ref_logp=None, value=None, returns=None,
        teacher_logp=None, age=None, copies=None,
    )  # fmt: skip


def _distilled(batches: Sequence[Batch], coef: float) -> tuple[list[Batch], dict[str, float]]:
    """Adds the teacher's advantages; also returns the KL estimate k1 in nats per token."""
    made, total, count = [], 0.0, 0.0
    for batch in batches:
        assert batch.teacher_logp is not None
        old = batch.logp if batch.old_logp is None else batch.old_logp
        gain = np.where(batch.mask > 0, np.asarray(distillation(old, batch.teacher_logp)), 0.0)
        total -= float((gain * batch.counts).sum(dtype=np.float64))
        count += float(batch.counts.sum())
        advantage = batch.advantage + np.float32(coef) * gain
        made.append(batch._replace(advantage=advantage.astype(np.float32), teacher_logp=None))
    return made, {"opd/reverse_kl": total / max(count, 1.0)}


@functools.partial(jax.jit, static_argnames=("gamma", "lam", "kl", "kl_coef"))
def _estimate(batch: Batch, *, gamma: float, lam: float, kl: str, kl_coef: float) -> Batch:
    """Replaces the rewards in ``advantage`` by the advantages of tokens, and adds returns."""
    rewards = jnp.where(batch.mask > 0, batch.advantage, 0.0)
    if kl:
        assert batch.ref_logp is not None
        old = batch.logp if batch.old_logp is None else batch.old_logp
        rewards = rewards - kl_coef * batch.mask * kl_estimate(kl, old, batch.ref_logp)
    values = jnp.zeros_like(rewards) if batch.value is None else batch.value
    advantages, returns = gae(rewards, values, batch, gamma=gamma, lam=lam)
    return batch._replace(advantage=advantages, returns=returns)  # type: ignore[arg-type]


def _explained_variance(batches: Sequence[Batch]) -> dict[str, float]:
    """Computes 1 - Var(returns - values) / Var(returns).

    The metric is 1 for a perfect critic, and 0 for a critic that gives the same value to every
    state.
    """
    returns, values = (
        np.concatenate(
            [np.repeat(getattr(b, name), b.counts.astype(int).ravel()) for b in batches]
        ).astype(np.float64)
        for name in ("returns", "value")
    )
    variance = returns.var()
    known = variance > (1e-6 * returns.mean()) ** 2  # else rounding error of the mean
    unexplained = (returns - values).var()
    return {"critic/explained_variance": float(1 - unexplained / variance) if known else 0.0}
