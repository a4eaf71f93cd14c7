r"""Evaluates a small policy on questions about places that occur in no training question.

    coa-jax evaluate --config=configs/evaluate/factbook.py --workdir=runs/evaluate

Needs: the policy of configs/rl/factbook.py in runs/rl. For another policy give its directory and a
name for its results: ``--config.model=runs/sft/model --config.stage=sft``. The report lists the
stages of a work directory side by side.
Takes: the time of the stage ``evaluate_rl`` in the ``timings_s`` of a quickstart's summary.json.
Gives: pass@1 with its 95 % interval, results by hops and kind of question, tool calls and tokens,
in evaluate/rl/results.json and on an HTML page. ``--config.samples=8`` adds pass@2, pass@3, pass@4,
pass@8 and a majority vote. ``factbook.py:debug`` scales the config down, see tiny.py.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.variants import in_small, parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration."""
    _, debug = parse_variant(arg)
    quickstart = load_config("configs/quickstart/factbook.py")
    policy = {"model": "runs/rl/model", "stage": "rl", "tools": quickstart.tools}
    config = complete_config(EvaluateRun, {**quickstart.evaluate.to_dict(), **policy})
    config.rollout.prompt_style = "model"
    return in_small(config, "evaluate") if debug else config
