r"""Evaluates the policy of launch/pretrained.sh on questions in people's own words.

    coa-jax evaluate --config=configs/evaluate/natural.py --workdir=runs/natural

Needs: ``coa-jax fetch smollm2`` (Q4_1), and ``source launch/setup_env.sh demo gguf tasks``.
Takes: 1 minute on 2 CPU cores.
Gives: pass@1 of greedy answers to configs/pretrained/natural_questions.jsonl, by kind of question,
in evaluate/natural. The policy is released/smollm2/adapter, or ``--config.model=DIR``.
``--config.mixture.natural.tasks=FILE`` evaluates other questions about the World Factbook
(docs/data.md), with columns ``kind`` and ``hops``. ``natural.py:debug`` scales the config down.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.variants import in_small, parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration."""
    _, debug = parse_variant(arg)
    pretrained = load_config("configs/pretrained/factbook.py")
    policy = {"model": "released/smollm2/adapter", "stage": "natural", "tools": pretrained.tools}
    changes = pretrained.measures.natural_rl.evaluate.to_dict()
    config = complete_config(EvaluateRun, {**pretrained.evaluate.to_dict(), **changes, **policy})
    config.rollout.prompt_style = "model"
    return in_small(config, "evaluate") if debug else config
