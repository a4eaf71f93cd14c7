"""Fine-tunes a policy on distilled trajectories.

    coa-jax sft --config=configs/sft/factbook.py --workdir=runs/sft
    coa-jax sft --config.model=MODEL --config.data=records.jsonl --workdir=runs/sft

A config file contains the settings that differ from the defaults. Without a file, flags such as
``--config.model`` give these settings. The command writes metrics and checkpoints to the work
directory, and the model to ``WORKDIR/model``.
"""

from __future__ import annotations

import functools

from absl import flags

from coa_jax.cli.needs import check_settings
from coa_jax.run.command import need, run_main
from coa_jax.storage import with_urls
from coa_jax.train.command import define_flags
from coa_jax.train.config import SFTConfig
from coa_jax.train.defaults import with_defaults

FIRST = (
    *("model", "data", "weights", "validation", "format", "protocol", "prompt_style"),
    *("batch_size", "optimizer.learning_rate", "optimizer.total_steps", "optimizer.warmup_steps"),
    *("lora.rank", "validate_every", "evaluate_every", "held_out.tasks", "checkpoint_every"),
    *("keep_best", "seed", "dtype", "remat", "rows", "row_length", "mesh.fsdp", "mesh.tensor"),
)
"""Settings that ``--help`` lists."""


def main(argv: list[str]) -> int:
    """Runs ``coa-jax sft``: fine-tunes a policy; returns the exit code."""
    if flags.FLAGS.check == "false":
        check_settings("sft")
    # Imported here, so that mistakes in settings are told before JAX is loaded.
    from coa_jax.api import train_sft
    from coa_jax.cli.check import check

    values = flags.FLAGS
    if values.check != "false":
        return check("sft")
    run = train_sft(values.config, values.workdir, wandb_project=values.wandb_project)
    print(f"model -> {with_urls(run.model)}")
    return 0


def define() -> None:
    """Defines the command-line flags of ``coa-jax sft``."""
    need("--config.model", example="Qwen/Qwen3-0.6B")
    need("--config.data", example="records.jsonl")
    define_flags(SFTConfig, first=FIRST, with_defaults=functools.partial(with_defaults, "sft"))


if __name__ == "__main__":
    run_main(main, define)
