r"""SFT of the quickstart's small policy on differently filtered Factbook runs.

    python -m coa_jax.ablation --config=configs/ablation/factbook.py --workdir=runs/ablation

Needs: what the quickstart needs; launch/quickstart.sh shows settings of malloc that make a step on
a CPU shorter.
Takes: for each of four arms and three seeds as long as the stages ``sft`` and ``evaluate_sft`` in
the ``timings_s`` of a quickstart's summary.json.
Gives: runs/ablation/report.md: pass@1 on 800 held-out questions for each arm, and its differences
to the unfiltered and the filtered set with intervals over seeds and over tasks.

The teacher slips often here, and most of its wrong suggestions pass its own check, so that the
unfiltered set holds the defects that filters are for: wrong answers, and mistakes that were lucky.
The arms:

- ``unfiltered``: every run as it is;
- ``filtered``: the filters of quality (paper §3.2.1), as in configs/distill/factbook.py;
- ``reflection``: these, and of the runs without reflection one half;
- ``correction``: these, and runs that corrected their answer count twice.
"""

from __future__ import annotations

import ml_collections
from ml_collections import ConfigDict

from coa_jax.cli import load_config


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    config = ConfigDict()
    config.seeds = (0, 1, 2)
    config.references = ("unfiltered", "filtered")
    config.prompt_style = quickstart.prompt_style
    config.tools = quickstart.tools.to_dict()
    config.distill = {"tasks": quickstart.distill.tasks, "train": quickstart.distill.train}
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
