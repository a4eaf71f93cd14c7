r"""On-policy distillation: a teacher scores the small policy's own trajectories.

    python -m coa_jax.rl --config=configs/rl/opd.py --workdir=runs/opd

Needs: the policy of configs/sft/factbook.py in runs/sft, and a teacher with the same vocabulary:
here that of configs/rl/factbook.py in runs/rl.  The teacher may be any larger model with the
policy's tokenizer, in a directory (``--config.teacher.model``) or behind a server that returns
log-probabilities of prompts (``--config.teacher.url``); see docs/algorithms.md.
Takes: not measured: a step of configs/rl/factbook.py with two more forward passes.
Gives: runs/opd/model.  Metrics to watch in metrics.jsonl: ``opd/reverse_kl`` (divergence from the
teacher in nats per token; should fall) and ``reward/mean`` (not optimised here, but should rise).

Choices: samples are not compared, so each of the 192 samples of a step has its own task; only the
teacher's advantages are used.  With ``--config.algorithm.advantage=group
--config.group_size=8 --config.groups=24`` they are added to the advantages of the rewards.
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
