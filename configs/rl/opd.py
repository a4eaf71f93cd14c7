r"""Distils a teacher into the small policy on the policy's own trajectories.

    python -m coa_jax.rl --config=configs/rl/opd.py --workdir=runs/opd

Needs: the policy of configs/sft/factbook.py in runs/sft, and a teacher with the same vocabulary:
here that of configs/rl/factbook.py in runs/rl.  Any larger model with the policy's tokenizer will
do, in a directory (``--config.teacher.model``) or behind a server that returns log-probabilities of
prompts (``--config.teacher.url``); see docs/algorithms.md.
Takes: no figure: a step is one of configs/rl/factbook.py with two more forward passes.
Gives: runs/opd/model.  Read in metrics.jsonl: ``opd/reverse_kl`` (divergence from the teacher in
nats a token, falls) and ``reward/mean`` (which nothing here maximises, rises with it).

Choices: no two samples are compared, so each of the 192 of a step has a task of its own; the
teacher's advantages stand alone.  With ``--config.algorithm.advantage=group
--config.group_size=8 --config.groups=24`` they are added to those of rewards.
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.variants import in_small, parse_variant
from coa_jax.settings import complete
from coa_jax.tools.make import ToolsConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """The configuration; ``debug`` is the same in small, see tiny.py."""
    _, debug = parse_variant(arg)
    quickstart = load_config("configs/quickstart/factbook.py")
    config = complete(
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
    config.tools = complete(ToolsConfig, quickstart.tools)
    if debug:
        config = in_small(config, "rl")
        config.teacher.model = config.model
    return config
