r"""Trains the small policy by on-policy distillation: a teacher scores its own trajectories.

    coa-jax rl --config=configs/rl/opd.py --workdir=runs/opd

Needs: the policy of configs/sft/factbook.py in runs/sft, and a teacher with the same vocabulary:
the policy of configs/rl/factbook.py in runs/rl, another model (``--config.teacher.model``), or a
server that returns log-probabilities of prompts (``--config.teacher.url``); see docs/algorithms.md.
Takes: the time of configs/rl/factbook.py plus two forward passes per step; this was not measured.
Gives: runs/opd/model. ``opd/reverse_kl``, the divergence from the teacher in nats per token, should
fall. ``reward/mean`` should rise although it is not optimised.

The advantages of the teacher do not compare samples, so each of the 192 samples of a step has its
own task. With ``--config.algorithm.advantage=group --config.group_size=8 --config.groups=24``, they
are added to the advantages from the rewards.
"""

from coa_jax import ConfigDict, load_config
from coa_jax.run.variants import in_small, parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration; ``debug`` scales it down, see tiny.py."""
    _, debug = parse_variant(arg)
    config = load_config("configs/rl/factbook.py")
    config.update(groups=192, group_size=1)
    config.algorithm, config.teacher = {"name": "opd"}, {"model": "runs/rl/model"}
    if debug:
        config = in_small(config, "rl")
        config.teacher.model = config.model
    return config
