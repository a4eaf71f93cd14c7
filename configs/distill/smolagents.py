r"""Distils Factbook questions from smolagents: a CodeAgent that manages a search agent.

    coa-jax distill --config=configs/distill/smolagents.py --workdir=runs/smolagents

Needs: the extra ``distill`` and an endpoint as in configs/distill/endpoint.py.
Takes: ten to twenty calls of the model per task.
Gives: ``smolagents/SPLIT.jsonl`` with the memory of the agents, one run per line, and the files of
configs/distill/traces.py. If the command is started again, it solves the missing tasks.
"""

from __future__ import annotations

import ml_collections

from coa_jax.distillation.smol_runs import SmolConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = load_config("configs/distill/endpoint.py")
    with config.unlocked():
        config.smolagents = complete_config(SmolConfig, {})
        config.traces = load_config("configs/distill/traces.py").traces
        config.traces.format, config.traces.protocol = "smolagents", "generalist"
        # The protocol demands thoughts and a double check, which smolagents does not write. They
        # are invented, and marked in the records.
        config.traces.completion.thoughts = config.traces.completion.verification = True
    return config
