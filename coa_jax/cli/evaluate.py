"""Evaluates a policy on held-out tasks or benchmarks with live tools.

    coa-jax evaluate --config=configs/evaluate/factbook.py --workdir=runs/evaluate
    coa-jax evaluate --config.model=MODEL --config.tasks=questions.jsonl --workdir=runs/evaluate

A config file contains the settings that differ from the defaults. Without a file, flags such as
``--config.model`` give these settings.
The command prints the results and writes them to the work directory:
``evaluate/STAGE/results.json``, an HTML page next to it, ``summary.json`` and every trajectory. If
a killed evaluation is started again, it continues, and its result file is the same as without the
kill. ``coa-jax compare`` compares two result files.
"""

from __future__ import annotations

import functools

from absl import flags

from coa_jax.cli.needs import check_settings
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.command import config_flag, need, run_main, workdir_flag
from coa_jax.storage import with_urls
from coa_jax.train.command import check_flags
from coa_jax.train.defaults import with_defaults


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax evaluate``."""
    need("--config.model", "--config.endpoint", "--config.agent", example="Qwen/Qwen3-0.6B")
    need("--config.tasks", "--config.mixture", example="questions.jsonl")
    defaults = functools.partial(with_defaults, "evaluate")
    config_flag("", EvaluateRun, with_defaults=defaults)
    workdir_flag("where the results are written")
    flags.DEFINE_bool("fresh", False, "delete the existing samples of the stage")
    check_flags()


def main(argv: list[str]) -> int:
    """Runs ``coa-jax evaluate``: evaluates a policy; returns the exit code."""
    if flags.FLAGS.check == "false":
        check_settings("evaluate")
    # Imported here, so that mistakes in settings are told before JAX is loaded.
    from coa_jax.api import evaluate
    from coa_jax.cli.check import check

    values = flags.FLAGS
    if values.check != "false":
        return check("evaluate")
    evaluation = evaluate(values.config, values.workdir, fresh=values.fresh)
    print(evaluation)
    print(f"page -> {with_urls(evaluation.page)}")
    return 0


if __name__ == "__main__":
    run_main(main, define_flags)
