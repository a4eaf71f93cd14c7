"""Reinforces a policy with live tools.

    python -m coa_jax.rl --config=configs/rl/factbook.py --workdir=runs/rl

Writes metrics, every trajectory and checkpoints to the work directory and the model to
``WORKDIR/model``.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from coa_jax.cli import config_flag, run_main
from coa_jax.learn.rl import train
from coa_jax.learn.rl_config import RLConfig
from coa_jax.parallel import processes
from coa_jax.run_dir import RunDir
from coa_jax.settings import build, take
from coa_jax.tools.make import ToolsConfig, make_tools


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/rl/factbook.py")
    flags.DEFINE_string("workdir", None, "where the run is written", required=True)
    flags.DEFINE_string("wandb_project", "", "project of W&B that gets the metrics too")


def main(argv: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS.config.to_dict()
    tools = build(ToolsConfig, take(values, "tools"), "config.tools")
    config = build(RLConfig, values)
    workdir = Path(flags.FLAGS.workdir)
    active, project = processes.index() == 0, flags.FLAGS.wandb_project
    with RunDir(workdir, active=active, wandb_project=project) as run:
        run.write_config(flags.FLAGS.config)
        train(config, run, workdir / "model", make_tools(tools))
    print(f"model -> {workdir / 'model'}")


if __name__ == "__main__":
    run_main(main, define_flags)
