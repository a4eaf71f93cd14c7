r"""Fine-tunes the small policy on its own right trajectories (rejection sampling).

    coa-jax rft --config=configs/rft/factbook.py --workdir=runs/rft

This is a baseline for RL.

Needs: the policy of configs/sft/factbook.py in runs/sft, and graded trajectories of this policy.
They come from configs/rl/factbook.py, in runs/rl/traces.jsonl, or from an evaluation on the
training split (then set ``config.phase`` to the phase of this evaluation).
Takes: a time that depends on ``config.optimizer.total_steps``; it was not measured.
Gives: runs/rft/model.

Choices: the trajectories come from the whole RL run, so most were sampled by better policies than
the one that is fine-tuned. At most four trajectories per task are used, so that easy tasks do not
dominate.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.settings import complete_config
from coa_jax.train.config import RFTConfig


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    return complete_config(
        RFTConfig,
        {
            "model": "runs/sft/model",
            "traces": "runs/rl/traces.jsonl",
            "phase": "rl",
            "min_reward": 1.0,
            "per_task": 4,
            "seed": 0,
            "batch_size": 32,
            "rows": 4,
            "row_length": 512,
            "dtype": "float32",
            "export_dtype": "float32",
            "remat": "none",
            "optimizer": {
                "learning_rate": 1e-4,
                "total_steps": 60,
                "warmup_steps": 3,
                "final_ratio": 0.1,
            },
            "checkpoint_every": 20,
        },
    )
