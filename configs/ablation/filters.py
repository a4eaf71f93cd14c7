r"""Measures the effect of the filters on a policy that is trained longer.

    coa-jax ablation --config=configs/ablation/filters.py --workdir=runs/filters

Needs: the requirements of configs/ablation/factbook.py.
Takes: for each of two arms and four seeds, two and a half times the stage ``sft`` in the
``timings_s`` of a quickstart's summary.json, and once its ``evaluate_sft``.
Gives: runs/filters/report.md, in the form of configs/ablation/factbook.py.

After the 800 updates of configs/ablation/factbook.py, a policy solves one question in five. Most
answers are then wrong because the policy is weak, so wrong answers in the data make little
difference. This config trains each policy for 2,000 updates. Teacher, filters and questions are the
same as in configs/ablation/factbook.py, but the seeds differ. Arms, seeds and the number of updates
were fixed before the first of these policies was trained.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.command import load_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = load_config("configs/ablation/factbook.py")
    with config.unlocked():
        config.seeds = (3, 4, 5, 6)
        config.references = ("unfiltered",)
        config.arms = {"filtered": config.arms.filtered.to_dict()}
        config.sft.optimizer.total_steps = 2000
    return config
