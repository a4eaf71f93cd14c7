"""Fine-tunes a policy on its own correct trajectories (rejection sampling).

    coa-jax rft --config=configs/rft/factbook.py --workdir=runs/rft

The command reads the ``traces.jsonl`` of a run with graded samples. It writes metrics and
checkpoints to the work directory, and the model to ``WORKDIR/model``.
"""

from __future__ import annotations

import functools

from absl import flags

from coa_jax.cli.needs import check_settings
from coa_jax.run.command import run_main
from coa_jax.train.command import define_flags, run_fit
from coa_jax.train.config import RFTConfig


def main(argv: list[str]) -> int:
    """Runs ``coa-jax rft``: fine-tunes on right trajectories; returns the exit code."""
    if flags.FLAGS.check == "false":
        check_settings("rft")
    # Imported here, so that mistakes in settings are told before JAX is loaded.
    from coa_jax.cli.check import check
    from coa_jax.train.rejection import train

    if flags.FLAGS.check != "false":
        return check("rft")
    run_fit(RFTConfig, train)
    return 0


if __name__ == "__main__":
    run_main(main, functools.partial(define_flags, RFTConfig, "configs/rft/factbook.py"))
