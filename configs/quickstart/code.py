r"""The whole pipeline in small under the protocol of the code agent.

    bash launch/quickstart.sh --config=configs/quickstart/code.py --workdir=runs/quickstart-code

Needs: 2 CPU cores, 4 GB of memory, and the sandbox for programs (bubblewrap, or Landlock).
Takes: 
Gives: 
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config

TASKS = "arithmetic:products,gcd,lcm,count_bits"


def get_config() -> ml_collections.ConfigDict:
    """The settings of configs/quickstart/mhqa.py, for calculations that a program answers."""
    return load_config(
        "configs/quickstart/mhqa.py",
        {
            "tools.names": ("code",),
            "distill.tasks": TASKS,
            "distill.train": 1000,
            "sft.optimizer.total_steps": 600,
            "rl.tasks": TASKS,
            "rl.rollout.max_turn_tokens": 112,
            "evaluate.tasks": TASKS,
            "evaluate.rollout.max_turn_tokens": 112,
        },
    )
