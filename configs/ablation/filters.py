r"""Measures the effect of the filters on a policy that trains longer; fixed in advance.

    python -m coa_jax.ablation --config=configs/ablation/filters.py --workdir=runs/filters

Needs: the requirements of configs/ablation/factbook.py.
Takes: for each of two arms and four seeds, two and a half times the stage ``sft`` in the
``timings_s`` of a quickstart's summary.json, and once its ``evaluate_sft``.
Gives: runs/filters/report.md, in the form of configs/ablation/factbook.py.

After the 800 updates of configs/ablation/factbook.py a policy solves one question in five.  Most
answers are wrong because the policy is weak, so wrong answers in the data make little difference.
Here each policy is trained for 2,000 updates.  Teacher, filters and questions are the same; the
seeds differ.  Arms, seeds and updates were fixed before the first of these policies was trained.
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    config = load_config("configs/ablation/factbook.py")
    with config.unlocked():
        config.seeds = (3, 4, 5, 6)
        config.references = ("unfiltered",)
        config.arms = {"filtered": config.arms.filtered.to_dict()}
        config.sft.optimizer.total_steps = 2000
    return config
