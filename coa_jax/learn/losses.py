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

from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.batch import Batch
from coa_jax.learn.logps import token_logps, weighted_logp_sum
from coa_jax.learn.objectives import Stats, policy_objective, value_objective
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
