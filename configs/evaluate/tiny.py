r"""Evaluates a policy with one layer on four questions: the smallest possible evaluation.

    coa-jax evaluate --config=configs/evaluate/tiny.py --workdir=runs/debug/evaluate

Needs: ``coa-jax debug-files``.
Takes: less than a minute on a CPU core, most of which is compilation.
Gives: all files of a large evaluation, with a meaningless pass@1. The debug variants of the other
configs in this folder, such as ``configs/evaluate/web.py:gaia,debug``, combine the sizes of this
config with their own settings and with a few questions in the format of their benchmark. Their
tools need no network, and there is no judge.
"""

from __future__ import annotations

import ml_collections

from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import parse_variant
from coa_jax.tools.make import ToolsConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration; the variant ``debug`` is the same."""
    parse_variant(arg)
    trained = load_config("configs/rl/tiny.py")
    config = complete_config(
        EvaluateConfig,
        {
            "tasks": trained.tasks,
            "split": "test",
            "num_tasks": 4,
            "samples": 2,
            "seed": 0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "engine": trained.engine,
            "rollout": trained.rollout,
        },
    )
    config.model, config.stage = trained.model, "debug"
    config.tools = complete_config(ToolsConfig, trained.tools)
    return config
