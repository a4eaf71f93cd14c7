"""Reinforces a policy with live tools.

    python -m coa_jax.rl --config=configs/rl/factbook.py --workdir=runs/rl

Writes metrics, every trajectory and checkpoints to the work directory and the model to
``WORKDIR/model``.
"""

from __future__ import annotations

import functools

from absl import flags

from coa_jax.cli import run_main
from coa_jax.learn.command import define_flags, open_run
from coa_jax.learn.rl import train
from coa_jax.learn.rl_config import RLConfig
from coa_jax.settings import build, take
from coa_jax.tools.make import ToolsConfig, make_tools


def main(argv: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS.config.to_dict()
    tools = build(ToolsConfig, take(values, "tools"), "config.tools")
    config = build(RLConfig, values)
    with open_run() as (run, output):
        train(config, run, output, make_tools(tools))


if __name__ == "__main__":
    run_main(main, functools.partial(define_flags, "configs/rl/factbook.py"))
