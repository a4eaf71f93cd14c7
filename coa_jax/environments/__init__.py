"""Environments: what answers the policy's turns, and when an episode is over."""

from coa_jax.environments.base import (
    ENVIRONMENTS,
    Environment,
    EnvironmentConfig,
    Step,
    Turn,
)

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentConfig", "Step", "Turn"]
