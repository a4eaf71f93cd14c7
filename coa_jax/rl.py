"""Reinforces a policy with live tools.

    python -m coa_jax.rl --config=configs/rl/factbook.py --workdir=runs/rl

Writes metrics, every trajectory and checkpoints to the work directory and the model to
``WORKDIR/model``.
"""

from __future__ import annotations

import dataclasses
import functools

from absl import flags

from coa_jax.cli import run_main
from coa_jax.learn.command import define_flags, open_run
from coa_jax.learn.rl import train
from coa_jax.learn.rl_config import RLConfig
from coa_jax.settings import build
from coa_jax.tasks.ready import check_ready
from coa_jax.tools.make import ToolsConfig, make_tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(RLConfig):
    """The settings of the command: the settings of the run and of its tools."""

    tools: ToolsConfig


def main(argv: list[str]) -> None:
    """Entry point."""
    config = build(Command, flags.FLAGS.config)
    with open_run() as (run, output):
        live = make_tools(config.tools)
        check_ready(config.probe_s, graders=config.graders, tools=config.tools)
        train(config, run, output, live)


if __name__ == "__main__":
    run_main(main, functools.partial(define_flags, "configs/rl/factbook.py"))
