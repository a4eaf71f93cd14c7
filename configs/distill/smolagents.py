r"""Distil Factbook questions from smolagents: a CodeAgent that manages a search agent.

    python -m coa_jax.distill --config=configs/distill/smolagents.py --workdir=runs/smolagents

Needs: the extra ``distill`` and an endpoint, as configs/distill/endpoint.py says.
Takes: as long as the endpoint takes for ten to twenty calls a task.
Gives: ``smolagents/SPLIT.jsonl`` with the memory of the agents, one run a line, and what
configs/distill/traces.py makes of it.  Started again it solves what is missing.
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config
from coa_jax.distill.smol_runs import SmolConfig
from coa_jax.settings import complete


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    config = load_config("configs/distill/endpoint.py")
    with config.unlocked():
        config.smolagents = complete(SmolConfig, {})
        config.traces = load_config("configs/distill/traces.py").traces
        config.traces.format, config.traces.protocol = "smolagents", "generalist"
    return config
