r"""Compares the tokens of the quickstart's policy with those of the team that taught the policy.

    coa-jax economy --config=configs/economy/factbook.py --workdir=runs/economy

Needs: a finished quickstart in runs/quickstart, or the trajectories of another evaluation by
``coa-jax evaluate``: then set ``traces``, their ``phase`` (``evaluate-STAGE``), the ``model`` whose
tokenizer counts the tokens, and the ``tasks`` of the evaluation.
Takes: seconds with the scripted team. A config that adds ``endpoint``, as in
configs/distill/endpoint.py, measures a team of language models with ten to thirty calls per task.
Gives: the success rates of the policy and of the team, the tokens per task that both solve, the
tokens of all attempts per solved task, and the share of the team's tokens that the policy saves.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.paper.token_savings import Command


def get_config() -> ConfigDict:
    """Returns the configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    evaluated = quickstart.evaluate
    tasks = {name: evaluated[name] for name in ("split", "num_tasks", "seed")}
    values = {"model": "runs/quickstart/models/rl", "number": 100}
    values |= {"traces": "runs/quickstart/traces.jsonl", "phase": "evaluate-rl"}
    values |= {"tasks": {"source": evaluated.tasks, **tasks}}
    values |= {name: quickstart[name] for name in ("teacher", "tools")}
    return complete_config(Command, values)
