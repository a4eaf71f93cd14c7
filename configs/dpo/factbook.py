r"""Trains the small policy by DPO to prefer right trajectories to wrong ones: a baseline for RL.

    coa-jax dpo --config=configs/dpo/factbook.py --workdir=runs/dpo

Needs: the policy of configs/sft/factbook.py in runs/sft, and graded trajectories of this policy.
They come from configs/rl/factbook.py, in runs/rl/traces.jsonl, or from an evaluation on the
training split (then set ``config.phase`` to the phase of this evaluation).
Takes: a time that depends on ``config.optimizer.total_steps``; it was not measured.
Gives: runs/dpo/model. In metrics.jsonl, ``dpo/accuracy``, the share of pairs in the right order,
should rise from 0.5. If ``dpo/chosen_log_ratio`` falls far below 0, right trajectories become less
likely, too: lower the learning rate or raise ``beta``.
"""

from coa_jax import ConfigDict, complete_config
from coa_jax.train.config import DPOConfig


def get_config() -> ConfigDict:
    """Returns the configuration."""
    values = {"model": "runs/sft/model", "traces": "runs/rl/traces.jsonl", "phase": "rl"}
    config = complete_config(DPOConfig, {**values, "beta": 0.1, "min_gap": 0.5, "per_task": 4})
    # A row holds two trajectories.
    config.update(batch_size=16, rows=4, row_length=832, remat="none")
    config.update(dtype="float32", export_dtype="float32")
    config.optimizer.update(total_steps=60, warmup_steps=3)
    config.optimizer.update(learning_rate=3e-5, final_ratio=0.1, weight_decay=0.0)
    return config
