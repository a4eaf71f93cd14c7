r"""Evaluates a policy with one layer on four questions: the smallest possible evaluation.

    coa-jax evaluate --config=configs/evaluate/tiny.py --workdir=runs/debug/evaluate

Needs: ``coa-jax debug-files``.
Takes: less than a minute on a CPU core, most of which is compilation.
Gives: all files of a large evaluation, with a meaningless pass@1. The debug variants of the other
configs in this folder, such as ``configs/evaluate/web.py:gaia,debug``, combine the sizes of this
config with their own settings and a few questions in the format of their benchmark, without network
or judge.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.variants import parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration; the variant ``debug`` is the same."""
    parse_variant(arg)
    trained = load_config("configs/rl/tiny.py")
    values = {name: trained[name] for name in ("model", "tasks", "engine", "rollout", "tools")}
    sampling = {"split": "test", "num_tasks": 4, "samples": 2, "temperature": 1.0}
    return complete_config(EvaluateRun, {**values, **sampling, "stage": "debug"})
