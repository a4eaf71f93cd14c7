"""Compares the results, settings, curves and trajectories of two runs, or two evaluations.

    coa-jax compare runs/a runs/b
    coa-jax compare runs/a/evaluate/sft/results.json runs/a/evaluate/rl/results.json

The arguments are two run directories, two result files, or two files or folders of trajectories,
which may be ATIF documents of any agents (docs/data.md). For every stage (an evaluated policy, such
as ``sft``) that both runs evaluated, the command prints the difference of pass@1 with a paired
confidence interval and a paired test. If the runs have no stage in common, it compares the last
stage of each run. For two run directories it also writes a page, by default to
``report/compare.html`` in the second directory. The page shows the settings that differ, the curves
of both runs in the same charts, and trajectories of the same questions side by side. For
trajectories, the command also prints the reasons of failure, and writes the page if ``--page``
names a file for it. Documents without a task id are paired by question.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax.data.atif import is_atif
from coa_jax.data.rows import open_rows
from coa_jax.errors import UserError
from coa_jax.evaluation.compare import (
    compare,
    differing_settings,
    format_comparison,
    load,
    result_files,
)
from coa_jax.files import durable
from coa_jax.report.comparison_page import PairedEvaluation, outcome_of_traces, pair_page
from coa_jax.report.page import save_page
from coa_jax.report.run import Run, is_run, read_run
from coa_jax.report.traces import stage_rank
from coa_jax.run.command import run_main
from coa_jax.storage import is_url, output, visited, with_urls

Evaluation = Mapping[str, Any]


def outcomes(run: Path) -> dict[str, Evaluation]:
    """Returns the evaluations of a run by the name of their stage, in the order of the run.

    Raises:
        UserError: a result file is damaged.
    """
    stages = {stage: load(str(path)) for stage, path in result_files(run).items()}
    return {stage: stages[stage] for stage in sorted(stages, key=lambda s: (stage_rank(s), s))}


def paired(
    a: Mapping[str, Evaluation], b: Mapping[str, Evaluation]
) -> list[tuple[Evaluation, Evaluation]]:
    """Pairs the evaluations of two runs, by stage, for a comparison.

    If the runs have no stage in common, the only pair is the last evaluation of each run.
    """
    same = [(a[stage], b[stage]) for stage in a if stage in b]
    return same or list(zip([*a.values()][-1:], [*b.values()][-1:], strict=False))


def compared(
    a: Mapping[str, Evaluation], b: Mapping[str, Evaluation]
) -> list[tuple[str, PairedEvaluation]]:
    """Compares the evaluations of two runs; prints the reason if a pair cannot be compared.

    Returns:
        For each pair of evaluations that could be compared, the comparison as text for the terminal
        and as data.
    """
    results = []
    for first, second in paired(a, b):
        try:
            comparison = compare(first, second)
        except UserError as error:  # for example, one evaluation has no grades
            print(f"{first['stage']}: {error}")
            continue
        result = PairedEvaluation(
            first, second, dataclasses.asdict(comparison), differing_settings(first, second)
        )
        results.append((format_comparison(first, second, comparison), result))
    return results


def compare_runs(a: str, b: str, page: str) -> dict[str, dict[str, Any]]:
    """Compares two run directories, prints the results, and writes them to an HTML page.

    Args:
        a, b: the run directories.
        page: file for the HTML page; "" for ``report/compare.html`` in ``b``.

    Returns:
        The comparison of each stage, keyed by the name of the stage in ``a``.
    """
    # If the second directory is in a bucket, the page is uploaded at the end of the block.
    with visited(a) as one, visited(b) as other:
        first, second = read_run(one), read_run(other)
        results = compared(outcomes(first.path), outcomes(second.path))
        print("\n\n".join(summary for summary, _ in results) or "no evaluation to compare")
        with output(page or str(second.path / "report" / "compare.html")) as path:
            save_page(path, pair_page(first, second, [result for _, result in results]))
            print(f"report -> {page or with_urls(path)}")
    return {result.a["stage"]: dict(result.comparison) for _, result in results}


def compare_traces(a: Path, b: Path, page: str) -> dict[str, Any]:
    """Compares the trajectories at two places, prints the results, and writes an HTML page.

    Args:
        a, b: files or folders of trajectories, or of documents in the Agent Trajectory Interchange
            Format (ATIF, see docs/data.md).
        page: file for the HTML page; "" for no page.

    Returns:
        The comparison; {} if no task has graded trajectories at both places.
    """
    first, second = outcome_of_traces(a), outcome_of_traces(b)
    for letter, outcome in (("A", first), ("B", second)):
        total = sum(len(task["samples"]) for task in outcome["tasks"])
        counts = [f"{number:,} {text}" for text, number in outcome["reasons"].items()]
        failed = f"; failed: {', '.join(counts)}" if counts else ""
        print(f"{letter} {outcome['stage']}: {total:,} trajectories{failed}")
    results = compared({"": first}, {"": second})
    for summary, _ in results:
        print(summary)
    if page:
        with output(page) as path:
            evaluations = [result for _, result in results]
            runs = Run(a, {}, {}, []), Run(b, {}, {}, [])
            save_page(path, pair_page(*runs, evaluations, (first, second)))
            print(f"report -> {page}")
    return dict(results[0][1].comparison) if results else {}


def _are_traces(path_or_url: str) -> bool:
    """Returns whether a place has trajectories, and is neither a run nor a result file."""
    path = Path(path_or_url)
    if path.is_dir():
        return not is_run(path) and any(path.rglob("trajectory.json"))
    if not path.name.endswith(".json"):
        return path.is_file() and not path.name.endswith(".json.gz")  # which is a result file
    try:
        value = next(iter(open_rows(path))).value
    except (UserError, StopIteration):  # `load` says what is wrong
        return False
    return is_atif(value) or "tokens" in value


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax compare``."""
    flags.DEFINE_string("out", "", "file for the comparison as JSON")
    flags.DEFINE_string("page", "", "file for the page that compares two runs")


def run(places: Sequence[str], out: str = "", page: str = "") -> None:
    """Compares two runs, two result files, or the trajectories at two places.

    Args:
        places: two run directories, two result files, or two files or folders of trajectories.
        out: file to which the comparison is written as JSON; "" for no file.
        page: file for an HTML page of the comparison, "" in the case of result files. For runs, ""
            means ``report/compare.html`` in the second directory; for trajectories, no page.

    Raises:
        UserError: an argument is wrong, or a file is malformed.
    """
    if len(places) != 2:
        raise UserError("give two runs or two result files: coa-jax compare runs/a runs/b")
    a, b = places
    with_traces = [not is_url(argument) and _are_traces(argument) for argument in places]
    for name, target in (("out", out), ("page", page)):
        path = Path(target)
        if target and not is_url(target) and (path.is_dir() or not path.parent.is_dir()):
            raise UserError(f"--{name}={target}: give a file in a directory that exists")
    of_files = [source.endswith((".json", ".json.gz")) for source in (a, b)]
    if any(with_traces):
        if not all(with_traces):
            raise UserError("give two places with trajectories, not one of them and another place")
        value: dict[str, Any] = compare_traces(Path(a), Path(b), page)
    elif any(of_files):
        if not all(of_files):
            raise UserError(
                f"{a} and {b} are a run and a result file: give two runs or two result files"
            )
        if page:
            raise UserError("--page needs two run directories")
        first, second = load(a), load(b)
        comparison = compare(first, second)
        print(format_comparison(first, second, comparison))
        value = dataclasses.asdict(comparison)
    else:
        value = {"stages": compare_runs(a, b, page)}
    if out:
        with output(out) as path:
            durable.write_json(path, json.loads(json.dumps({"a": a, "b": b, **value})))


def main(argv: list[str]) -> None:
    """Runs ``coa-jax compare``: compares runs, result files or trajectories."""
    run(argv[1:], flags.FLAGS.out, flags.FLAGS.page)


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
