r"""Evaluates a small policy on questions about places that occur in no training question.

    coa-jax evaluate --config=configs/evaluate/factbook.py --workdir=runs/evaluate

Needs: the policy of configs/rl/factbook.py in runs/rl. For another policy give its directory and a
name for its results: ``--config.model=runs/sft/model --config.stage=sft``. If several stages share
a work directory, its summary.json and its report list them side by side.
Takes: the time of the stage ``evaluate_rl`` in the ``timings_s`` of a quickstart's summary.json.
Gives: pass@1 with its 95 % interval, results by hops and kind of question, tool calls and tokens.
They are in evaluate/rl/results.json and on an HTML page in the same folder. ``--config.samples=8``
adds pass@2, pass@3, pass@4, pass@8 and a majority vote. If a killed evaluation is started again, it
continues. ``factbook.py:debug`` scales the config down, see configs/evaluate/tiny.py.
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
    quickstart = load_config("configs/quickstart/factbook.py")
    config = complete_config(EvaluateConfig, quickstart.evaluate)
    config.rollout.prompt_style = "model"
    config.model, config.stage = "runs/rl/model", "rl"
    config.tools = complete_config(ToolsConfig, quickstart.tools)
    return in_small(config, "evaluate") if debug else config
