"""Trains a policy by reinforcement learning with live tools.

    python -m coa_jax.rl --config=configs/rl/factbook.py --workdir=runs/rl

The command writes metrics, every trajectory and checkpoints to the work directory, and the model to
``WORKDIR/model``.

    python -m coa_jax.rl --replay=runs/rl

With ``--replay`` the command repeats the recorded steps of a run without tools or judges. It
compares every trajectory, and the parameters after each step, with the recording. The exit code is
0 if all bits are equal, and 1 if some differ or no trajectory was compared.
"""

from __future__ import annotations

from absl import flags

from coa_jax import files
from coa_jax.api import RLRun, train_rl
from coa_jax.check import check
from coa_jax.cli import run_main
from coa_jax.learn.command import define_flags
from coa_jax.learn.rl import repeat
from coa_jax.protocol import find_protocols
from coa_jax.settings import build
from coa_jax.storage import visited, with_urls
from coa_jax.storage.mirror import NAMES_ONLY


def main(argv: list[str]) -> int:
    """Runs ``python -m coa_jax.rl``: trains by RL, or replays a run; returns the exit code."""
    values = flags.FLAGS
    if values.check != "false":
        return check("rl")
    if values.replay:
        with visited(values.replay, (*NAMES_ONLY, "traces.jsonl", "spool")) as run_path:
            find_protocols(run_path)
            config = files.read_json_object(run_path / "config.json")
            found = repeat(build(RLRun, config), run_path)
        print(found)
        return 0 if found.identical else 1
    run = train_rl(values.config, values.workdir, wandb_project=values.wandb_project)
    print(f"model -> {with_urls(run.model)}")
    return 0


def define() -> None:
    """Defines the command-line flags of ``python -m coa_jax.rl``."""
    define_flags("configs/rl/factbook.py", workdir_required=False)
    flags.DEFINE_string("replay", "", "directory of a run whose steps are repeated and compared")
    flags.register_multi_flags_validator(
        ["workdir", "replay"],
        lambda given: bool(given["workdir"] or given["replay"]),
        "give --workdir, or --replay with the directory of a finished run",
    )


if __name__ == "__main__":
    run_main(main, define)
