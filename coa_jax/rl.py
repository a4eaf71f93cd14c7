"""Reinforces a policy with live tools.

    python -m coa_jax.rl --config=configs/rl/factbook.py --workdir=runs/rl

Writes metrics, every trajectory and checkpoints to the work directory and the model to
``WORKDIR/model``.

    python -m coa_jax.rl --replay=runs/rl

repeats the recorded steps of a run without tools or judges and compares every trajectory and the
parameters after each step.  Exit code 0: all bits are the same.  1: some differ.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from absl import flags

from coa_jax import files
from coa_jax.cli import run_main
from coa_jax.learn.command import define_flags, open_run
from coa_jax.learn.rl import repeat, train
from coa_jax.learn.rl_config import RLConfig
from coa_jax.protocol import find_protocols
from coa_jax.settings import build
from coa_jax.tasks.ready import check_ready
from coa_jax.tools.make import ToolsConfig, make_tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(RLConfig):
    """The settings of the command: the settings of the run and of its tools.

    Attributes:
        tools: tools of the policy.
    """

    tools: ToolsConfig


def main(argv: list[str]) -> int:
    """Entry point."""
    if flags.FLAGS.replay:
        run_path = Path(flags.FLAGS.replay)
        find_protocols(run_path)
        found = repeat(build(Command, files.read_json_object(run_path / "config.json")), run_path)
        print(found)
        return 0 if found.identical else 1
    config = build(Command, flags.FLAGS.config)
    with open_run() as (run, output):
        tools = None if config.agent else config.tools  # a program brings its own
        live = [] if tools is None else make_tools(tools)
        check_ready(config.probe_s, graders=config.graders, tools=tools)
        train(config, run, output, live)
    return 0


def define() -> None:
    """The flags of the command."""
    define_flags("configs/rl/factbook.py", workdir_required=False)
    flags.DEFINE_string("replay", "", "directory of a run whose steps are repeated and compared")
    flags.register_multi_flags_validator(
        ["workdir", "replay"],
        lambda given: bool(given["workdir"] or given["replay"]),
        "give --workdir, or --replay with the directory of a finished run",
    )


if __name__ == "__main__":
    run_main(main, define)
