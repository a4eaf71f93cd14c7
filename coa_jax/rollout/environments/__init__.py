"""Environments: objects that respond to the policy's turns with observations and rewards."""

from coa_jax.rollout.environments.base import (
    ENVIRONMENTS,
    Environment,
    EnvironmentConfig,
    Step,
    Turn,
)

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentConfig", "Step", "Turn"]
