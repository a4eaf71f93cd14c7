"""Fine-tunes a policy on its own trajectories that were right (rejection sampling).

    python -m coa_jax.rft --config=configs/rft/factbook.py --workdir=runs/rft

Reads the ``traces.jsonl`` of a run that sampled and graded.  Writes metrics and checkpoints to the
work directory and the model to ``WORKDIR/model``.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from coa_jax.cli import config_flag, run_main
from coa_jax.learn.rejection import RFTConfig, train
from coa_jax.run_dir import RunDir
from coa_jax.settings import build


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/rft/factbook.py")
    flags.DEFINE_string("workdir", None, "where the run is written", required=True)


def main(argv: list[str]) -> None:
    """Entry point."""
    config = build(RFTConfig, flags.FLAGS.config)
    workdir = Path(flags.FLAGS.workdir)
    with RunDir(workdir) as run:
        run.write_config(flags.FLAGS.config)
        train(config, run, workdir / "model")
    print(f"model -> {workdir / 'model'}")


if __name__ == "__main__":
    run_main(main, define_flags)
