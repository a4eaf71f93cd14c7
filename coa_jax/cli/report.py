"""Writes the HTML page of a run.

The command reads config.json, metrics.jsonl, traces.jsonl and summary.json of the run, which may
still be in progress. It writes report/index.html next to them, and prints the path of the page.
"""

from __future__ import annotations

from absl import flags

from coa_jax.report.build import TRACES_PER_STAGE, build_report
from coa_jax.run.command import run_main, workdir_flag
from coa_jax.storage import visited, with_urls

_NOT_READ = ("model", "model-adapters", "profile", "spool", "steps.jsonl", "tensorboard")
"""Names in a work directory that the page does not show; they are not downloaded from a bucket."""


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax report``."""
    workdir_flag("directory of the run")
    flags.DEFINE_integer(
        "traces_per_stage", TRACES_PER_STAGE, "most traces shown of each stage", lower_bound=0
    )


def main(argv: list[str]) -> None:
    """Writes the page of a run and prints its path."""
    with visited(flags.FLAGS.workdir, names_only=_NOT_READ) as folder:
        page = build_report(folder, flags.FLAGS.traces_per_stage)
    print(with_urls(page))


if __name__ == "__main__":
    run_main(main, define_flags)
