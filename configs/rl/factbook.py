r"""Trains the fine-tuned small policy by RL with live tools (DAPO).

    coa-jax rl --config=configs/rl/factbook.py --workdir=runs/rl

Needs: the policy of configs/sft/factbook.py in runs/sft.
Takes: the time of the stage ``rl`` in the ``timings_s`` of a quickstart's summary.json.
Gives: runs/rl/model. Metrics to watch in metrics.jsonl:

- ``reward/mean``: share of right answers in training, which should rise;
- ``group/frac_zero_std``: share of tasks whose samples are all right or all wrong; such tasks give
  no signal;
- ``format/valid``: share of samples that obey the protocol; if it falls, the learning rate is too
  high;
- ``mismatch/abs_logp_max``: largest difference between log-probabilities of sampler and trainer,
  which should be below 1e-4 in most steps with float32 on a CPU.

The debug variant mixes two sources and evaluates the policy on both (``eval/*``).
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.train.rl_config import RLRun


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration; ``debug`` scales it down, see tiny.py."""
    _, debug = parse_variant(arg)
    quickstart = load_config("configs/quickstart/factbook.py")
    values = {**quickstart.rl.to_dict(), "model": "runs/sft/model", "tools": quickstart.tools}
    config = complete_config(RLRun, values)
    if debug:
        config = in_small(config, "rl")
        questions = {"tasks": config.tasks, "weight": 2.0}
        config.mixture = {"questions": questions, "facts": {"tasks": "factbook:hops=1"}}
        config.tasks, config.evaluate_every, config.held_out.num_tasks = "", 1, 2
    return config
