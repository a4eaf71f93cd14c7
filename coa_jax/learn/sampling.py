"""What samples the groups of a run: the engines with their tools, or a program of the user."""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.agents import agent_sampler
from coa_jax.learn.learner import Learner
from coa_jax.learn.rl_config import RLConfig
from coa_jax.rollout.sampler import EngineSampler, Sampler
from coa_jax.tools.base import Tool


def sampler_of(config: RLConfig, learner: Learner, tools: Sequence[Tool], version: int) -> Sampler:
    """The sampler of a run.

    Args:
        config: of the run.
        learner: its engines are taken over.
        tools: live ones.
        version: policy version of the engines.
    """
    model, engines, budgets = learner.model, learner.engines, config.budgets
    recompute = config.in_flight_weights == "recompute"
    if config.agent:
        return agent_sampler(model, engines, config.agent, budgets, version, recompute=recompute)
    return EngineSampler(engines, model.tokenizer, tools, budgets, version, recompute=recompute)
