"""Fine-tunes a policy on distilled trajectories.

    python -m coa_jax.sft --config=configs/sft/factbook.py --workdir=runs/sft

Writes metrics and checkpoints to the work directory and the model to ``WORKDIR/model``.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from coa_jax.cli import config_flag, run_main
from coa_jax.learn.sft import SFTConfig, train
from coa_jax.parallel import processes
from coa_jax.run_dir import RunDir
from coa_jax.settings import build


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/sft/factbook.py")
    flags.DEFINE_string("workdir", None, "where the run is written", required=True)
    flags.DEFINE_string("wandb_project", "", "project of W&B that gets the metrics too")


def main(argv: list[str]) -> None:
    """Entry point."""
    config = build(SFTConfig, flags.FLAGS.config)
    workdir = Path(flags.FLAGS.workdir)
    active, project = processes.index() == 0, flags.FLAGS.wandb_project
    with RunDir(workdir, active=active, wandb_project=project) as run:
        run.write_config(flags.FLAGS.config)
        train(config, run, workdir / "model")
    print(f"model -> {workdir / 'model'}")


if __name__ == "__main__":
    run_main(main, define_flags)
