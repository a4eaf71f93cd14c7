r"""Trains the small policy by on-policy distillation: a teacher scores its own trajectories.

    coa-jax rl --config=configs/rl/opd.py --workdir=runs/opd

Needs: the policy of configs/sft/factbook.py in runs/sft, and a teacher with the same vocabulary,
which is the policy of configs/rl/factbook.py in runs/rl by default. The teacher can also be any
larger model with the policy's tokenizer, in a directory (``--config.teacher.model``) or behind a
server that returns log-probabilities of prompts (``--config.teacher.url``); see docs/algorithms.md.
Takes: the time of configs/rl/factbook.py plus two forward passes per step; this was not measured.
Gives: runs/opd/model. Watch two metrics in metrics.jsonl. ``opd/reverse_kl``, the divergence from
the teacher in nats per token, should fall. ``reward/mean`` should rise although it is not
optimised.

Choices: only the advantages from the teacher are used. They do not compare samples, so each of the
192 samples of a step has its own task. With ``--config.algorithm.advantage=group
--config.group_size=8 --config.groups=24``, the advantages from the teacher are added to the
advantages from the rewards.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.tools.make import ToolsConfig
from coa_jax.train.rl_config import RLConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration; ``debug`` scales it down, see tiny.py."""
    _, debug = parse_variant(arg)
    quickstart = load_config("configs/quickstart/factbook.py")
    config = complete_config(
        RLConfig,
        {
            **quickstart.rl.to_dict(),
            "model": "runs/sft/model",
            "groups": 192,
            "group_size": 1,
            "algorithm": {"name": "opd"},
            "teacher": {"model": "runs/rl/model"},
        },
    )
    config.tools = complete_config(ToolsConfig, quickstart.tools)
    if debug:
        config = in_small(config, "rl")
        config.teacher.model = config.model
    return config
