r"""The whole pipeline under the protocol of the code agent, with a policy trained from nothing.

    bash launch/quickstart.sh --config=configs/quickstart/code.py --workdir=runs/quickstart-code

Needs: 2 CPU cores, 4 GB of memory, and the sandbox for programs (bubblewrap, or Landlock).
Takes: 
Gives: 
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config

TASKS = "arithmetic:chain_sum,basic_arithmetic,products,gcd,lcm,count_bits"


def get_config() -> ml_collections.ConfigDict:
    """The configuration: that of the quickstart with these changes."""
    return load_config(
        "configs/quickstart/factbook.py",
        {
            "tools.names": ("code",),
            "distill.tasks": TASKS,
            "distill.train": 3000,
            "rl.tasks": TASKS,
            "evaluate.tasks": TASKS,
            "evaluate.num_tasks": 400,
            "sft.optimizer.total_steps": 200,
            "sft.optimizer.warmup_steps": 20,
            "rl.optimizer.total_steps": 12,
        },
    )
