"""Fine-tunes a policy on distilled trajectories.

    python -m coa_jax.sft --config=configs/sft/factbook.py --workdir=runs/sft

Writes metrics and checkpoints to the work directory and the model to ``WORKDIR/model``.
"""

from __future__ import annotations

import functools
from pathlib import Path

from coa_jax.cli import run_main
from coa_jax.learn import sft
from coa_jax.learn.command import define_flags, run_fit
from coa_jax.run_dir import RunDir
from coa_jax.small.augment import renaming
from coa_jax.tools.make import make_tools


def train(config: sft.SFTConfig, run: RunDir, output: Path) -> None:
    """See `learn.sft.train`."""
    live = make_tools(config.tools) if config.evaluate_every else ()
    sft.train(config, run, output, renaming(config.rename_share), live)


def main(argv: list[str]) -> None:
    """Entry point."""
    run_fit(sft.SFTConfig, train)


if __name__ == "__main__":
    run_main(main, functools.partial(define_flags, "configs/sft/factbook.py"))
