r"""Compares filters: SFT of the quickstart's small policy on differently filtered Factbook runs.

    coa-jax ablation --config=configs/ablation/factbook.py --workdir=runs/ablation

Needs: the requirements of the quickstart. launch/quickstart.sh shows malloc settings that make a
step on a CPU faster.
Takes: for each of four arms and three seeds, the time of the stages ``sft`` and ``evaluate_sft`` in
the ``timings_s`` of a quickstart's summary.json.
Gives: runs/ablation/report.md with pass@1 on 800 held-out questions for each arm, and the
differences between each arm and the arms ``unfiltered`` and ``filtered``, with intervals over seeds
and over tasks.

In this config the teacher makes many mistakes, and most of its wrong suggestions pass its own
check. So the unfiltered set contains the defects that filters should remove: wrong answers, and
right answers despite a mistake. The arms are:

- ``unfiltered``: all runs;
- ``filtered``: the runs that pass the quality filters (paper §3.2.1), as in
  configs/distill/factbook.py;
- ``reflection``: as ``filtered``, but without half of the runs that have no reflection;
- ``correction``: as ``filtered``, but each run that corrected its answer is included twice.
"""

from __future__ import annotations

import ml_collections
from ml_collections import ConfigDict

from coa_jax.run.command import load_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    config = ConfigDict()
    config.seeds = (0, 1, 2)
    config.references = ("unfiltered", "filtered")
    config.prompt_style = quickstart.prompt_style
    config.tools = quickstart.tools.to_dict()
    config.distill = {"tasks": quickstart.distill.tasks, "train": 7000}
    config.teacher = {"mistake_rate": 0.2, "unrecovered_rate": 0.7}
    config.arms = {
        "filtered": {"plain_fraction": 1.0, "corrected_copies": 1},
        "reflection": {"plain_fraction": 0.5, "corrected_copies": 1},
        "correction": {"plain_fraction": 1.0, "corrected_copies": 2},
    }
    config.policy = quickstart.policy.to_dict()
    config.sft = quickstart.sft.to_dict()
    config.evaluate = quickstart.evaluate.to_dict()
    return config
