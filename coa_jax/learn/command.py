"""What the commands that train have in common: their flags, and the directory of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from absl import flags

from coa_jax.cli import config_flag, workdir_flag
from coa_jax.installed import warn_untested
from coa_jax.parallel import processes
from coa_jax.run_dir import RunDir
from coa_jax.settings import build

# Flags defined by the helper below belong to the command that calls it (for --help).
flags.disclaim_key_flags()

C = TypeVar("C")


def define_flags(config: str, *, workdir_required: bool = True) -> None:
    """The flags of a command that trains.

    Args:
        config: the file that is taken without ``--config``.
        workdir_required: whether the command always needs ``--workdir``.
    """
    config_flag(config)
    workdir_flag("where the run is written", required=workdir_required)
    flags.DEFINE_string("wandb_project", "", "project of W&B that gets the metrics too")


@contextlib.contextmanager
def open_run() -> Iterator[tuple[RunDir, Path]]:
    """The run that the flags name, with its config written, and where its model goes.

    Says where the model is when the block has ended without an error.  Of several processes the
    first one writes.
    """
    workdir = Path(flags.FLAGS.workdir)
    active, project = processes.index() == 0, flags.FLAGS.wandb_project
    if active:
        warn_untested()
    with RunDir(workdir, active=active, wandb_project=project) as run:
        run.write_config(flags.FLAGS.config)
        yield run, workdir / "model"
    print(f"model -> {workdir / 'model'}")


def run_fit(kind: type[C], train: Callable[[C, RunDir, Path], None]) -> None:
    """Trains with the config of the flags.

    Args:
        kind: class of the settings.
        train: takes them, the run, and where the model goes.
    """
    config = build(kind, flags.FLAGS.config)
    with open_run() as (run, output):
        train(config, run, output)
