r"""Compares filters: SFT of the quickstart's small policy on differently filtered Factbook runs.

    coa-jax ablation --config=configs/ablation/factbook.py --workdir=runs/ablation

Needs: the requirements of the quickstart. launch/quickstart.sh shows malloc settings that make a
step on a CPU faster.
Takes: for each of four arms and three seeds, the time of the stages ``sft`` and ``evaluate_sft`` in
the ``timings_s`` of a quickstart's summary.json. With ``factbook.py:longer``, for each of two arms
and four seeds two and a half times ``sft``, and once ``evaluate_sft``.
Gives: runs/ablation/report.md with pass@1 on 800 held-out questions for each arm, and the
differences between each arm and the arms ``unfiltered`` and ``filtered``, with intervals over seeds
and over tasks.

The teacher makes many mistakes, and most of its wrong suggestions pass its own check. So the
unfiltered set contains the defects that filters should remove. The arms are:

- ``unfiltered``: all runs;
- ``filtered``: the runs that pass the quality filters (paper §3.2.1), as in
  configs/distill/factbook.py;
- ``reflection``: as ``filtered``, but without half of the runs that have no reflection;
- ``correction``: as ``filtered``, but each run that corrected its answer is included twice.

After 800 updates most answers are wrong because the policy is weak, so wrong answers in the data
make little difference. ``factbook.py:longer`` trains for 2,000 updates, with other seeds and the
first two arms. All this was fixed before its first policy was trained.
"""

from coa_jax import ConfigDict, load_config
from coa_jax.run.variants import parse_variants


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration, or that of the variant ``longer``."""
    (longer,) = parse_variants(arg, ("", "longer"))
    quickstart = load_config("configs/quickstart/factbook.py")
    shared = ("prompt_style", "tools", "policy", "sft", "evaluate")
    config = ConfigDict({name: quickstart[name] for name in shared})
    config.distill = {"tasks": quickstart.distill.tasks, "train": 7000}
    config.teacher = {"mistake_rate": 0.2, "unrecovered_rate": 0.7}
    config.seeds, config.references = (0, 1, 2), ("unfiltered", "filtered")
    config.arms = {"filtered": {"plain_fraction": 1.0, "corrected_copies": 1}}
    if longer:
        config.sft.optimizer.total_steps = 2000
        config.seeds, config.references = (3, 4, 5, 6), ("unfiltered",)
        return config
    config.arms.reflection = {"plain_fraction": 0.5, "corrected_copies": 1}
    config.arms.correction = {"plain_fraction": 1.0, "corrected_copies": 2}
    return config
