r"""The whole pipeline under the protocol of the MHQA agent, with a policy trained from nothing.

    bash launch/quickstart.sh --config=configs/quickstart/mhqa.py --workdir=runs/quickstart-mhqa

Needs: 2 CPU cores, 4 GB of memory.
Takes: 
Gives: 
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config

TASKS = "factbook:protocol=mhqa,weights=60/40/0/0,templates=1"


def get_config() -> ml_collections.ConfigDict:
    """The configuration: that of the quickstart with these changes."""
    return load_config(
        "configs/quickstart/factbook.py",
        {
            "tools.names": ("wiki_search",),
            "distill.tasks": TASKS,
            "distill.train": 3000,
            "rl.tasks": TASKS,
            "evaluate.tasks": TASKS,
            "evaluate.num_tasks": 400,
            "sft.optimizer.total_steps": 300,
            "sft.optimizer.warmup_steps": 20,
            "rl.optimizer.total_steps": 12,
        },
    )
