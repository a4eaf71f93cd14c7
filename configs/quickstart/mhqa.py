r"""The whole pipeline in small under the protocol of the MHQA agent.

    bash launch/quickstart.sh --config=configs/quickstart/mhqa.py --workdir=runs/quickstart-mhqa

Needs: 2 CPU cores, 4 GB of memory.
Takes: 17 minutes on 2 cores that a dozen other programs shared; 7 of them are SFT, 6 are RL.
Gives: on 400 held-out questions of one and two hops at temperature 1, pass@1 0.000 (95 %
0.000-0.010) before SFT, 0.233 (0.194-0.276) after SFT and 0.212 (0.175-0.255) after RL (one run,
seed 0).  Eight steps of RL change nothing that 400 questions could show; 32 larger steps do, see
configs/quickstart/factbook.py.
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
            "sft.optimizer.learning_rate": 6e-4,
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
