"""What the commands that train have in common: their flags, and the directory of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from coa_jax.cli import config_flag, workdir_flag
from coa_jax.installed import warn_untested
from coa_jax.parallel import processes
from coa_jax.run_dir import RunDir
from coa_jax.settings import build
from coa_jax.storage import run_folder, shown
from coa_jax.tools.net.budget import spending

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
    check_flags()


def check_flags() -> None:
    """The flags ``--check`` and ``--topology`` of a command that `coa_jax.check` knows."""
    flags.DEFINE(
        flags.EnumParser(["false", "true", "compile"]),
        "check",
        "false",
        "run nothing, but look for all that the run needs; --check=compile compiles it, too",
    )
    flags.FLAGS["check"].boolean = True
    flags.DEFINE_string("topology", "", "chips to --check for in place of these, e.g. v5p:4x4x4")


@contextlib.contextmanager
def run_at(workdir: Path, config: Any, wandb_project: str = "") -> Iterator[tuple[RunDir, Path]]:
    """The run of a directory, with its config written, and where its model goes.

    Of several processes the first one writes.

    Args:
        workdir: the directory.
        config: see `RunDir.write_config`.
        wandb_project: project of W&B that gets the metrics too; "" for none.
    """
    active = processes.index() == 0
    if active:
        warn_untested()
    with (
        RunDir(workdir, active=active, wandb_project=wandb_project) as run,
        spending(workdir / "spent", processes.index(), processes.count()),
    ):
        run.write_config(config)
        processes.meet("what the run has spent", 600.0)  # all have read it before any spends
        yield run, run.path / "model"


def run_fit(kind: type[C], train: Callable[[C, RunDir, Path], None]) -> None:
    """Trains with the config of the flags, and says where the model is.

    Args:
        kind: class of the settings.
        train: takes them, the run, and where the model goes.
    """
    values = flags.FLAGS
    config = build(kind, values.config)
    with run_at(run_folder(values.workdir), values.config, values.wandb_project) as (run, output):
        train(config, run, output)
    print(f"model -> {shown(output)}")
