r"""The whole pipeline in small under the protocol of the MHQA agent.

    bash launch/quickstart.sh --config=configs/quickstart/mhqa.py --workdir=runs/quickstart-mhqa

Needs: 2 CPU cores, 4 GB of memory.
Takes: 
Gives: 
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config

TASKS = "factbook:protocol=mhqa,weights=70/30/0/0,templates=1"


def get_config() -> ml_collections.ConfigDict:
    """The quickstart with fewer and shorter steps.

    Two trajectories make an update: early in training many small updates teach more than few large
    ones of the same number of tokens.
    """
    return load_config(
        "configs/quickstart/factbook.py",
        {
            "tools.names": ("wiki_search",),
            "distill.tasks": TASKS,
            "distill.train": 3000,
            "policy.vocab_size": 512,
            "sft.batch_size": 2,
            "sft.optimizer.total_steps": 1200,
            "rl.tasks": TASKS,
            "rl.groups": 16,
            "rl.rollout.max_turn_tokens": 144,
            "rl.optimizer.total_steps": 8,
            "evaluate.tasks": TASKS,
            "evaluate.num_tasks": 400,
            "evaluate.rollout.max_turn_tokens": 144,
        },
    )
