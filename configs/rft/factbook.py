r"""Fine-tunes the small policy on its own right trajectories (rejection sampling).

    coa-jax rft --config=configs/rft/factbook.py --workdir=runs/rft

This is a baseline for RL.

Needs: the policy of configs/sft/factbook.py in runs/sft, and graded trajectories of this policy.
They come from configs/rl/factbook.py, in runs/rl/traces.jsonl, or from an evaluation on the
training split (then set ``config.phase`` to the phase of this evaluation).
Takes: a time that depends on ``config.optimizer.total_steps``; it was not measured.
Gives: runs/rft/model.

The trajectories come from the whole RL run, so most were sampled by better policies than the one
that is fine-tuned. With at most four trajectories per task, easy tasks do not dominate.
"""

from coa_jax import ConfigDict, complete_config
from coa_jax.train.config import RFTConfig


def get_config() -> ConfigDict:
    """Returns the configuration."""
    values = {"model": "runs/sft/model", "traces": "runs/rl/traces.jsonl", "phase": "rl"}
    config = complete_config(RFTConfig, {**values, "min_reward": 1.0, "per_task": 4})
    config.update(rows=4, row_length=512, remat="none", dtype="float32", export_dtype="float32")
    config.optimizer.update(learning_rate=1e-4, final_ratio=0.1, total_steps=60, warmup_steps=3)
    return config
