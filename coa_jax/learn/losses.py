"""Losses of a batch under a model, as values that a training step is compiled with.

A loss is a frozen dataclass, called as ``loss(params, model, batch, compute, allowed)``.  The
result is ``(sum, statistics)``: the training step adds up the sums of all micro-batches of an
update and divides by the number of the policy's tokens, so how sequences are split over programs
cannot change a gradient.  A statistic is a sum over tokens too, or a maximum where its name ends in
``max``.  The formulas are in `learn.objectives`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.errors import UserError
from coa_jax.extensions import first_line
from coa_jax.learn.algorithms import LOSSES, Algorithm
from coa_jax.learn.batch import Batch
from coa_jax.learn.logps import token_logps, weighted_logp_sum
from coa_jax.learn.objectives import Stats, policy_objective, surrogate, value_objective
from coa_jax.learn.value import token_values
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params


class Loss(Protocol):
    """What `learn.step.train_step` differentiates; hashable."""

    def __call__(
        self,
        params: Params,
        model: ModelConfig,
        batch: Batch,
        compute: Compute,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, Stats]:
        """The loss of a micro-batch.

        Args:
            params: all parameters of the model, adapters among them.
            model: the architecture.
            batch: rows of a micro-batch.
            compute: how to compute.
            allowed: table of the constraint under which the batch was sampled; None without one.

        Returns:
            The sum over tokens, and statistics, of which one is ``loss``.
        """


@dataclasses.dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the policy's tokens (paper eq 7).

    Observations and prompts have mask 0: the policy does not learn to write them.
    """

    def __call__(
        self,
        params: Params,
        model: ModelConfig,
        batch: Batch,
        compute: Compute,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, Stats]:
        """See `Loss`."""
        loss = -weighted_logp_sum(params, model, batch, batch.mask, compute)
        return loss, {"loss": loss}


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Policy-gradient loss; see `objectives.policy_objective`.

    Attributes:
        algorithm: resolved algorithm.
        temperature: temperature of sampling.
    """

    algorithm: Algorithm
    temperature: float

    def __call__(
        self,
        params: Params,
        model: ModelConfig,
        batch: Batch,
        compute: Compute,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, Stats]:
        """See `Loss`."""
        logp, entropy = token_logps(
            params,
            model,
            batch,
            compute,
            temperature=self.temperature,
            allowed=allowed,
            mask=batch.mask,
        )
        return policy_objective(logp, entropy, batch, self.algorithm)


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of the critic's values; see `objectives.value_objective`.

    Attributes:
        bound: bound on the movement of a value; 0 for none.
    """

    bound: float

    def __call__(
        self,
        params: Params,
        model: ModelConfig,
        batch: Batch,
        compute: Compute,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, Stats]:
        """See `Loss`; ``params`` are those of a critic, see `learn.value.init_critic`."""
        return value_objective(token_values(params, model, batch, compute), batch, self.bound)


def check_loss(algorithm: Algorithm) -> None:
    """Tries the loss of an algorithm on ratios around 1 and advantages of both signs.

    Raises:
        UserError: see `objectives.surrogate`; or the loss or its gradient is not finite, or it does
            not depend on the policy.
    """
    if algorithm.loss in LOSSES.built_in:
        return
    ratios = np.array([0.1, 0.7, 0.999, 1.0, 1.001, 1.4, 4.0], np.float32)
    old = np.full((2, 2 * len(ratios)), -3.0, np.float32)
    logp = old + np.log(np.tile(ratios, (2, 2)))
    advantages = np.ones_like(old) * np.array([[1.0], [-0.5]], np.float32)
    mask, segments = np.ones_like(old), np.ones_like(old, np.int32)
    where = f"algorithm.loss: {algorithm.loss}"

    def total(logp: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        old, advantages, mask, segments = arrays
        batch = Batch(segments, segments, segments, mask, old, advantages)  # type: ignore[arg-type]
        loss, _ = surrogate(algorithm, logp, old, advantages, jnp.ones_like(old), batch)
        return jnp.sum(loss), loss

    try:
        gradient = jax.jit(jax.grad(total, has_aux=True))
        slope, loss = jax.device_get(gradient(logp, old, advantages, mask, segments))
    except UserError:
        raise
    except Exception as error:  # such as that of a function without a derivative
        raise UserError(f"{where}: {first_line(error)}") from error
    for at in np.argwhere(~np.isfinite(loss) | ~np.isfinite(slope))[:1]:
        r, a, x, dx = (float(v[tuple(at)]) for v in (np.exp(logp - old), advantages, loss, slope))
        raise UserError(
            f"{where} gave {x:g} with the gradient {dx:g} for a token with ratio {r:g} and "
            f"advantage {a:g}; both must be finite"
        )
    if not slope.any():
        raise UserError(f"{where} has no gradient by logp: nothing would be learned")
