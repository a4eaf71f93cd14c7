r"""Compares filters and roles: SFT of SmolLM2-135M-Instruct (Q4_1) on sets of Factbook runs.

    coa-jax fetch smollm2
    coa-jax ablation --config=configs/ablation/pretrained.py --workdir=runs/roles

Needs: 2 CPU cores, 12 GiB of memory, and the requirements of configs/pretrained/factbook.py.
Takes: for each of five arms, the time of the stages ``sft`` and ``evaluate_sft`` of
configs/pretrained/factbook.py.
Gives: runs/roles/report.md, in the form of configs/ablation/factbook.py.

The tasks, the settings of SFT and the evaluation come from configs/pretrained/factbook.py. The
teacher makes as many mistakes as in configs/ablation/factbook.py. The arms are:

- ``unfiltered``: all runs;
- ``filtered``: the runs that pass the quality filters (paper §3.2.1);
- ``correction``: as ``filtered``, but each run that corrected its answer is included twice;
- ``no_reflection``: as ``filtered``, but without the text of the role ``reflection``;
- ``no_double_check``: as ``filtered``, but without the text of the role ``double_check``.

The evaluation does not require a trajectory to obey the protocol, so a policy without a role can
answer correctly. Arms, seed and number of updates were fixed before the first of these policies was
trained.
"""

from coa_jax import ConfigDict, load_config


def get_config() -> ConfigDict:
    """Returns the configuration."""
    pretrained = load_config("configs/pretrained/factbook.py")
    shared = ("prompt_style", "tools", "policy", "model", "sft", "evaluate")
    config = ConfigDict({name: pretrained[name] for name in shared})
    tasks = {name: pretrained.distill[name] for name in ("tasks", "mixture", "train")}
    config.distill = ConfigDict(tasks)
    config.teacher = {"mistake_rate": 0.2, "unrecovered_rate": 0.7}
    config.seeds, config.references = (0,), ("unfiltered", "filtered")
    arms = ("filtered", "correction", "no_reflection", "no_double_check")
    config.arms = {name: {"corrected_copies": 1 + (name == "correction")} for name in arms}
    roles = {"no_reflection": ("reflection",), "no_double_check": ("double_check",)}
    config.without_roles = roles
    return config
