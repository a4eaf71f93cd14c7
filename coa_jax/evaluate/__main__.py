"""Measures a policy on held-out tasks or benchmarks with live tools.

    python -m coa_jax.evaluate --config=configs/evaluate/factbook.py --workdir=runs/evaluate

Writes ``evaluate/STAGE/results.json`` and the same as a page, ``summary.json`` and every trajectory
to the work directory, and prints the figures.  Killed and started again it goes on where it was,
and its result file is that of an evaluation that nobody killed.  Two result files are compared by
``python -m coa_jax.evaluate.compare``.
"""

from __future__ import annotations

from absl import flags

from coa_jax.api import evaluate_policy
from coa_jax.cli import config_flag, run_main, workdir_flag
from coa_jax.storage import shown


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/evaluate/factbook.py")
    workdir_flag("where the results are written")
    flags.DEFINE_bool("fresh", False, "drop the samples of the stage that are there")


def main(argv: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS
    evaluation = evaluate_policy(values.config, values.workdir, fresh=values.fresh)
    print(evaluation)
    print(f"page -> {shown(evaluation.page)}")


if __name__ == "__main__":
    run_main(main, define_flags)
