"""Trains a policy to prefer its better trajectories (direct preference optimisation).

    coa-jax dpo --config=configs/dpo/factbook.py --workdir=runs/dpo

The command reads the ``traces.jsonl`` of a run with graded samples. It writes metrics and
checkpoints to the work directory, and the model to ``WORKDIR/model``.
"""

from __future__ import annotations

import functools

from absl import flags

from coa_jax.cli.needs import check_settings
from coa_jax.run.command import run_main
from coa_jax.train.command import define_flags, run_fit
from coa_jax.train.config import DPOConfig


def main(argv: list[str]) -> int:
    """Runs ``coa-jax dpo``: trains by DPO; returns the exit code."""
    if flags.FLAGS.check == "false":
        check_settings("dpo")
    # Imported here, so that mistakes in settings are told before JAX is loaded.
    from coa_jax.cli.check import check
    from coa_jax.train.preference import train

    if flags.FLAGS.check != "false":
        return check("dpo")
    run_fit(DPOConfig, train)
    return 0


if __name__ == "__main__":
    run_main(main, functools.partial(define_flags, DPOConfig, "configs/dpo/factbook.py"))
