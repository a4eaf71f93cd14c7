"""Losses of a micro-batch: for supervised fine-tuning, policy gradients, and a critic.

A loss is a frozen dataclass, which is a static argument of the compiled training step and is called
as ``loss(params, batch, net)``. The call returns ``(sum, statistics)``. The training step adds up
the sums of all micro-batches of an update and divides by the number of policy tokens, so the
gradient does not depend on how sequences are split into micro-batches. A statistic is a sum over
tokens too, or a maximum if its name ends in ``max``. `train.objectives` has the formulas.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.config.extensions import first_line
from coa_jax.errors import UserError
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import DecodeParams, Params, whole
from coa_jax.train.algorithms import LOSSES, Algorithm
from coa_jax.train.batch import Batch
from coa_jax.train.critic import token_values
from coa_jax.train.logps import logp_sum, token_logps
from coa_jax.train.objectives import (
    Stats,
    blaming_loss,
    checked_loss,
    loss_arguments,
    policy_objective,
    value_objective,
)


class Net(NamedTuple):
    """What a loss needs besides the trained parameters and a batch.

    Attributes:
        frozen: the parameters that are not trained; {} in a run without adapters.
        model_config: architecture of the model.
        compute: dtype, operations and sharding of the computation.
        allowed: tokens that the run's constraint allows, the table `ConstraintTables.allowed`; None
            without constrained decoding.
    """

    frozen: Params | DecodeParams
    model_config: ModelConfig
    compute: Compute
    allowed: jax.Array | None = None


class Loss(Protocol):
    """The interface of a loss: a hashable object, which `train.step.train_step` differentiates.

    A loss is called with parameters, a `Batch` and a `Net`. It returns (sum of the loss over the
    tokens, statistics).
    """

    def __call__(self, params: Params, batch: Batch, net: Net) -> tuple[jax.Array, Stats]:
        """Computes the loss of a micro-batch.

        Args:
            params: the trained parameters. For `ValueLoss` they are those of a critic, see
                `train.critic.init_critic`.
            batch: packed rows of a micro-batch.
            net: the rest of the model.

        Returns:
            The loss summed over tokens, float32 ``[]``, and statistics, which include ``loss``.
        """


@dataclasses.dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the policy's tokens (eq 7 of the Chain-of-Agents paper).

    Tokens of observations and prompts have mask 0, and therefore no loss.
    """

    def __call__(self, params: Params, batch: Batch, net: Net) -> tuple[jax.Array, Stats]:
        """Computes the loss of a micro-batch; see `Loss`."""
        loss = -logp_sum(whole(params, net.frozen), net.model_config, batch, net.compute)
        return loss, {"loss": loss}


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The loss of a policy-gradient algorithm; see `objectives.policy_objective`.

    Attributes:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        temperature: sampling temperature, by which the logits are divided in training too.
    """

    algorithm: Algorithm
    temperature: float

    def __call__(self, params: Params, batch: Batch, net: Net) -> tuple[jax.Array, Stats]:
        """Computes the loss of a micro-batch; see `Loss`."""
        logp, entropy = token_logps(
            whole(params, net.frozen),
            net.model_config,
            batch,
            net.compute,
            temperature=self.temperature,
            allowed=net.allowed,
            mask=batch.mask,
        )
        return policy_objective(logp, entropy, batch, self.algorithm)


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """The loss of a critic, which is half the squared error of the critic's values.

    See `objectives.value_objective`.

    Attributes:
        bound: bound on the change of a value since the start of the step, see
            `Algorithm.value_clip`; 0 for no bound.
    """

    bound: float

    def __call__(self, params: Params, batch: Batch, net: Net) -> tuple[jax.Array, Stats]:
        """Computes the loss of a micro-batch; see `Loss`."""
        values = token_values(params, batch, model_config=net.model_config, compute=net.compute)
        return value_objective(values, batch, self.bound)


def check_loss(algorithm: Algorithm) -> None:
    """Checks a user's loss function by calling it on ratios around 1 and advantages of both signs.

    Raises:
        UserError: JAX cannot trace the loss, its result has a wrong shape (see
            `objectives.checked_loss`), the loss or its gradient is not finite, or the gradient with
            respect to the policy is zero.
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
        arguments = loss_arguments(algorithm, logp, old, advantages, jnp.ones_like(old), batch)
        with blaming_loss(algorithm):
            result = algorithm.loss_call.function(**arguments)
        loss, _ = checked_loss(algorithm, result, logp)
        return jnp.sum(loss), loss

    try:
        gradient = jax.jit(jax.grad(total, has_aux=True))
        slope, loss = jax.device_get(gradient(logp, old, advantages, mask, segments))
    except UserError:
        raise
    except Exception as error:  # e.g. from a function that JAX cannot differentiate
        raise UserError(f"{where}: {first_line(error)}") from error
    for at in np.argwhere(~np.isfinite(loss) | ~np.isfinite(slope))[:1]:
        r, a, x, dx = (float(v[tuple(at)]) for v in (np.exp(logp - old), advantages, loss, slope))
        raise UserError(
            f"{where} returned {x:g} with the gradient {dx:g} for a token with ratio {r:g} and "
            f"advantage {a:g}; both must be finite"
        )
    if not slope.any():
        raise UserError(f"{where} has no gradient by logp, so the policy would not be trained")
