r"""Writes the HTML page of a run, or of trajectories in files.

    coa-jax report --workdir=runs/rl
    coa-jax report trajectory.json
    coa-jax report --page=agents.html jobs/one jobs/two

For a run, the command reads config.json, metrics.jsonl, traces.jsonl and summary.json, and writes
report/index.html next to them. The run may still be in progress.

For other places, the page shows the trajectories with the reasons of failure. The places are files
of trajectories or of ATIF documents (docs/data.md), or folders that contain such files. The page is
written next to the first of them, or to the file that --page names.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from coa_jax.errors import UserError
from coa_jax.report.build import TRACES_PER_STAGE, build_report, trace_page
from coa_jax.report.page import save_page
from coa_jax.run.command import run_main, workdir_flag
from coa_jax.storage import is_url, output, visited, with_urls

_NOT_READ = ("model", "model-adapters", "profile", "spool", "steps.jsonl", "tensorboard")
"""Names in a work directory that the page does not show; they are not downloaded from a bucket."""


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax report``."""
    workdir_flag("directory of the run", required=False)
    flags.DEFINE_integer(
        "traces_per_stage", TRACES_PER_STAGE, "most traces shown of each stage", lower_bound=0
    )
    flags.DEFINE_string("page", "", "file for the page of trajectories that belong to no run")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax report``: writes the HTML page of a run or of files of trajectories."""
    values, places = flags.FLAGS, argv[1:]
    if bool(places) == bool(values.workdir):
        raise UserError("give --workdir, the directory of a run, or files of trajectories")
    if places:
        name = values.page or _default_page(places[0])
        content = trace_page(places, values.traces_per_stage)
        with output(name) as path:
            save_page(path, content)
        print(name)
        return
    if values.page:
        raise UserError("--page is for files of trajectories; a run has report/index.html")
    with visited(values.workdir, names_only=_NOT_READ) as folder:
        page = build_report(folder, values.traces_per_stage)
    print(with_urls(page))


def _default_page(source: str) -> str:
    if is_url(source):
        raise UserError(f"{source}: is not on this machine; name a file for the page with --page")
    path = Path(source)
    return str(path / "report.html" if path.is_dir() else path.with_suffix(".html"))


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
