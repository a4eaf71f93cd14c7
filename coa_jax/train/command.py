"""Defines the flags of the commands that train, and opens their run directory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from absl import flags

from coa_jax.config.installed import warn_untested
from coa_jax.files import durable
from coa_jax.run.command import config_flag, workdir_flag
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.storage import run_folder, with_urls
from coa_jax.tools.net.budget import charge_to_run
from coa_jax.train.config import TrainingConfig
from coa_jax.train.defaults import with_adapters
from coa_jax.train.optimizer import make_optimizer

if TYPE_CHECKING:
    from coa_jax.model.config import ModelConfig

# --help lists the flags that this module defines under the command that calls `define_flags`.
flags.disclaim_key_flags()

C = TypeVar("C", bound=TrainingConfig)

MAY_CHANGE = (
    "optimizer.total_steps",  # but not below the number of finished steps
    *("checkpoint_every", "checkpoint_seconds", "keep_last", "keep_best"),
    *("export_dtype", "traces", "profile_steps", "probe_s"),
    # Evaluations during training do not change the trained parameters.
    *("evaluate_every", "held_out", "validate_every", "validation"),
    # Devices, and the sizes and the dtype of computations that suit them.
    *("mesh", "rows", "remat", "dtype", "attention", "data_workers", "*.concurrency"),
    *("engine.slots", "engine.pages", "engine.page_size", "engine.chunk", "engine.engines"),
    *("engine.extend_buckets", "engine.extend_block", "engine.decode_programs", "engine.attention"),
    # Limits on cost, stored answers, and addresses of models.
    *("tools.budgets", "tools.store", "*.max_calls", "*.max_total_tokens", "*.max_money"),
    *("*.max_per_second", "*.prices", "*.cache", "graders.judge.chat.url", "teacher.url"),
)
"""Settings that may differ when a run continues, see docs/runs.md and `RunDir.keep_config`."""


def define_flags(
    settings: type[Any],
    config: str = "",
    first: Sequence[str] = (),
    with_defaults: Callable[[Any], Any] | None = None,
    *,
    workdir_required: bool = True,
) -> None:
    """Defines the command-line flags of a command that trains a model.

    Args:
        settings, first, with_defaults: see `run.command.config_flag`.
        config: default value of ``--config``, a path; "" for the defaults of all settings.
        workdir_required: whether the command always needs ``--workdir``.
    """
    config_flag(config, settings, first, with_defaults)
    workdir_flag("directory of the run", required=workdir_required)
    flags.DEFINE_string("wandb_project", "", "W&B project to log the metrics to, too; '' for none")
    check_flags()


def check_flags() -> None:
    """Defines the flags ``--check`` and ``--topology``, which `coa_jax.cli.check` reads.

    With ``--check``, the command checks what the run needs, but does not start the run.
    ``--topology`` names other chips for which to check, such as ``v5p:4x4x4``.
    """
    flags.DEFINE(
        flags.EnumParser(["false", "true", "compile"]),
        "check",
        "false",
        "check everything that the run needs, without running; --check=compile also compiles the "
        "programs",
    )
    flags.FLAGS["check"].boolean = True
    flags.DEFINE_string(
        "topology", "", "chips to --check for instead of this machine's, such as v5p:4x4x4"
    )


def with_rank(config: C, workdir: Path, model_config: ModelConfig | None = None) -> C:
    """Chooses ``lora.rank`` if a config leaves it open (-1): as the run in the directory has it.

    If the directory has no run yet, the memory decides, see `with_adapters`.
    """
    path = workdir / "config.json"
    if not hasattr(config, "lora") or config.lora.rank >= 0:
        return config
    if not path.exists():
        return with_adapters(config, model_config)
    rank = durable.read_json_object(path).get("lora", {}).get("rank", 0)
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=rank))


@contextlib.contextmanager
def run_at(
    workdir: Path, config: C, wandb_project: str = "", model_config: ModelConfig | None = None
) -> Iterator[tuple[RunDir, Path, C]]:
    """Opens the directory of a training run, and checks that its settings are those of the config.

    If a run has several processes, only the first process writes.

    Args:
        workdir: the run directory.
        config: settings of the run, a dataclass, which `RunDir.begin` writes.
        wandb_project: Weights & Biases project to which the metrics are logged; "" for none.
        model_config: architecture of the model; None to read it from the model's files.

    Yields:
        The run directory, the path at which to save the trained model, and the settings, in which
        ``lora.rank`` is chosen.

    Raises:
        UserError: the run in the directory has another value of a setting that is not in
            `MAY_CHANGE`, or the optimiser cannot be created.
    """
    from coa_jax.parallel import processes  # here, because it loads JAX

    if hasattr(config, "optimizer"):  # a wrong optimiser ends the run before it begins
        make_optimizer(config.optimizer)
    active = processes.index() == 0
    if active:
        warn_untested()
    with (
        RunDir(workdir, active=active, wandb_project=wandb_project) as run,
        charge_to_run(workdir / "spent", processes.index(), processes.count()),
    ):
        config = with_rank(
            config, run.path, model_config
        )  # a run in a bucket has its files only now
        run.keep_config(config, MAY_CHANGE)
        # Every process must have read how much the run has spent before any process spends more.
        processes.barrier("what the run has spent", 600.0)
        yield run, run.path / "model", config


def run_fit(kind: type[C], train: Callable[[C, RunDir, Path], None]) -> None:
    """Trains with the config that the command-line flags name, and prints the model's path.

    Args:
        kind: class of the settings, such as `SFTConfig`.
        train: function that trains; it is called with the settings, the run directory and the path
            for the model.
    """
    values = flags.FLAGS
    path = run_folder(values.workdir)
    config = build_config(kind, values.config)
    with run_at(path, config, values.wandb_project) as (run, output, settings):
        train(settings, run, output)
    print(f"model -> {with_urls(output)}")
