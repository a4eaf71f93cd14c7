r"""Evaluates SmolLM2-135M-Instruct (Q4_1) after RL on places that no training question has.

    coa-jax evaluate --config=configs/evaluate/smollm2.py --workdir=runs/smollm2-evaluate

Needs: the policy of configs/rl/smollm2.py in runs/smollm2-rl. To evaluate the original model, give
``--config.model=weights/SmolLM2-135M-Instruct --config.stage=base``; for the model after SFT, give
``--config.model=runs/smollm2-sft/model --config.stage=sft``.
Takes: about three times as long as the rollouts of a step of configs/rl/smollm2.py, by the number
of questions (100) and slots (32). This was not measured.
Gives: pass@1 with its 95 % interval, results by hops and kind of question, tool calls and tokens.
The original model has never seen the protocol, and the brief prompt does not explain it, so a
pass@1 of 0 says nothing about its knowledge. ``smollm2.py:debug`` scales the config down, see
configs/evaluate/tiny.py.
"""

from __future__ import annotations

import ml_collections

from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.tools.make import ToolsConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration."""
    _, debug = parse_variant(arg)
    trained = load_config("configs/rl/smollm2.py")
    config = complete_config(
        EvaluateConfig,
        {
            "tasks": trained.tasks,
            "split": "test",
            "num_tasks": 100,
            "samples": 1,
            "seed": 0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "engine": trained.engine,
            "rollout": {**trained.rollout.to_dict(), "strict": False},
        },
    )
    config.model, config.stage = "runs/smollm2-rl/model", "rl"
    config.tools = complete_config(ToolsConfig, trained.tools)
    return in_small(config, "evaluate") if debug else config
