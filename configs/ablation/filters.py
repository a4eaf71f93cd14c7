r"""What the filters are worth to a policy that learns for longer: one comparison, planned ahead.

    python -m coa_jax.ablation --config=configs/ablation/filters.py --workdir=runs/filters

Needs: what configs/ablation/factbook.py needs.
Takes: for each of two arms and four seeds two and a half times as long as the stage ``sft`` in the
``timings_s`` of a quickstart's summary.json, and once its ``evaluate_sft``.
Gives: runs/filters/report.md, as configs/ablation/factbook.py does.

After the 800 updates of that ablation a policy solves one question in five: most answers are wrong
for want of skill, and it matters little whether the data held wrong answers too.  Here each policy
is given 2,000.  Teacher, filters and questions are the same; the seeds are others.  Arms, seeds and
updates were fixed before the first of these policies was trained.
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
