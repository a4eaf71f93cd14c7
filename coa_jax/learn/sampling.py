"""Chooses the sampler of a run: the decoding engines with tools, or a user's agent program."""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.agents import agent_sampler
from coa_jax.learn.learner import Learner
from coa_jax.learn.rl_config import RLConfig
from coa_jax.rollout.sampler import EngineSampler, Sampler
from coa_jax.tools.base import Tool


def sampler_of(config: RLConfig, learner: Learner, tools: Sequence[Tool], version: int) -> Sampler:
    """Creates the sampler of a run.

    The sampler runs the agent program if the config names one, and is an `EngineSampler` otherwise.

    Args:
        config: settings of the run.
        learner: state of the run, whose engines the sampler uses from now on.
        tools: live tools that an `EngineSampler` uses; an agent program does not use these tools.
        version: policy version of the weights that the engines currently have.
    """
    model, engines, budgets = learner.model, learner.engines, config.budgets
    recompute = config.in_flight_weights == "recompute"
    if config.agent:
        return agent_sampler(model, engines, config.agent, budgets, version, recompute=recompute)
    return EngineSampler(engines, model.tokenizer, tools, budgets, version, recompute=recompute)
