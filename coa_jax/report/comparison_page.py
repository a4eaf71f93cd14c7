"""Renders the page that compares two runs, by results, settings, curves and trajectories.

The page has the style of the report. It is a single file that works offline. Run A is always drawn
first and in the first colour.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.data import trace_shards
from coa_jax.data.atif import decode_trajectory
from coa_jax.data.intervals import rates, wilson_interval
from coa_jax.data.trajectory import Trajectory, iterate_trajectories
from coa_jax.data.verdicts import failure_of, verdict_of
from coa_jax.report.charts import line_chart
from coa_jax.report.page import (
    NONE,
    charts_of,
    escape,
    phases_of,
    rate_cells,
    series_of,
    table,
    whole_page,
)
from coa_jax.report.run import Run
from coa_jax.report.sweep import CHARTED
from coa_jax.report.traces import render_body, stage_of

QUESTIONS = 6
"""Maximum number of questions that the page shows of each kind, such as "both are right"."""

_KINDS: dict[tuple[bool, bool] | None, str] = {
    (False, True): "B is right, A is wrong",
    (True, False): "A is right, B is wrong",
    (False, False): "Both are wrong",
    (True, True): "Both are right",
    None: "At least one is not graded",
}


@dataclasses.dataclass(frozen=True)
class PairedEvaluation:
    """The evaluations of the same tasks in two runs, with their comparison.

    Attributes:
        a, b: contents of the result files of the first and the second run.
        comparison: the fields of `evaluation.compare.Comparison`, by name.
        notes: names of the settings, other than the policy, in which the evaluations differ.
    """

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    comparison: Mapping[str, Any]
    notes: Sequence[str]


def outcome_of_traces(path: Path) -> dict[str, Any]:
    """Computes the result of an evaluation from trajectories that are not in a run directory.

    All trajectories count, whatever their stage.

    Args:
        path: a file or a folder of trajectories (see `iterate_trajectories`), or of documents in
            the Agent Trajectory Interchange Format (ATIF, see `coa_jax.data.atif`).

    Returns:
        The keys of a result file that `evaluation.compare.compare` reads: ``stage``, ``settings``,
        ``tasks`` and ``figures``. Moreover ``reasons``: the number of trajectories by their reason
        of failure, see `failure_of`.

    Raises:
        UserError: a file cannot be read, or is malformed.
    """
    tasks, reasons = dict[str, list[dict[str, Any]]](), Counter[str]()
    for one in iterate_trajectories(path, decode_trajectory):
        value = None if one.reward is None else one.reward.value
        tasks.setdefault(one.task_id, []).append({"value": value})
        if failure := failure_of(one):
            reasons[failure] += 1
    listed = [{"id": name, "samples": samples} for name, samples in tasks.items()]
    shares = [float(share) for share in rates({"tasks": listed}).values()]
    n = len(shares)
    interval = list(wilson_interval(sum(shares), n)) if n else None
    figures = {"pass_at_1": sum(shares) / n if n else None, "n": n, "ci95": interval}
    about = {"stage": path.name, "settings": {}, "reasons": dict(reasons.most_common())}
    return {**about, "tasks": listed, "figures": figures}


def pair_page(
    a: Run,
    b: Run,
    results: Sequence[PairedEvaluation],
    outcomes: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> str:
    """Renders the page that compares two runs.

    Args:
        a, b: the two runs.
        results: evaluations of the two runs, with their comparisons.
        outcomes: results of an evaluation of ``a`` and of one of ``b``, whose questions the page
            shows side by side; None for the last pair in ``results``.

    Raises:
        UserError: a file of trajectories is malformed.
    """
    if outcomes is None and results:
        outcomes = results[-1].a, results[-1].b
    paths = [run.path.resolve() for run in (a, b)]
    names = [path.name for path in paths]
    if names[0] == names[1]:  # for example runs/x/rl and runs/y/rl
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    title = f"{names[0]} and {names[1]}"
    keys = "".join(
        f'<span><i class="s{index}"></i>{letter}: {escape(name)}</span>'
        for index, (letter, name) in enumerate(zip("AB", names, strict=True))
    )
    sections = [
        f'<header><h1>{escape(title)}</h1><div class="legend">{keys}</div>'
        '<nav><a href="#results">Results</a><a href="#settings">Settings</a>'
        '<a href="#curves">Curves</a><a href="#questions">Questions</a></nav></header>',
        '<h2 id="results">Results</h2>',
        "".join(map(_result, results)) or '<p class="dim">No stage is evaluated in both runs.</p>',
        '<h2 id="settings">Settings that differ</h2>',
        _settings(a.config, b.config),
        '<h2 id="curves">Curves</h2>',
        _curves(a.rows, b.rows) or '<p class="dim">The runs have no phase in common.</p>',
        '<h2 id="questions">The same questions</h2>',
        _questions(a, b, outcomes)
        or '<p class="dim">The runs have no trajectories to compare.</p>',
    ]
    return whole_page(title, sections)


def _result(result: PairedEvaluation) -> str:
    paired, rows = result.comparison, []
    for letter, outcome in (("A", result.a), ("B", result.b)):
        figures = outcome["figures"]
        cells = rate_cells(letter, figures["pass_at_1"], figures["ci95"])
        rows.append([f"{letter}: {escape(str(outcome['stage']))}", *cells, f"{figures['n']:,}"])
    span = paired["ci95"]
    interval = f"95% interval {span[0]:+.3f} to {span[1]:+.3f}" if span else "no interval"
    lines = [
        f"<strong>B \u2212 A: {paired['difference']:+.3f}</strong> ({interval}, paired over "
        f"{paired['tasks']:,} common tasks), p = {paired['p']:.2g} ({escape(paired['test'])}).",
        f"B is better at {paired['better']:,} tasks, worse at {paired['worse']:,}, and the same at "
        f"{paired['same']:,}.",
        *(f"The evaluations differ in {escape(name)} too." for name in result.notes),
    ]
    stage = escape(str(result.b["stage"]))
    head = ("", "pass@1", "95% interval", "", "tasks")
    return f"<h3>{stage}</h3>{table(stage, head, rows, '')}" + "".join(f"<p>{x}</p>" for x in lines)


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    first, second = dict(_flat(a)), dict(_flat(b))
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if not names:
        return '<p class="dim">The two configurations are equal.</p>'
    rows = [
        [escape(name), *(escape(str(side.get(name, NONE))) for side in (first, second))]
        for name in names
    ]
    return table("Settings that differ", ("setting", "A", "B"), rows, "detail settings")


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) for each setting of a config."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, value


def _curves(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> str:
    """Renders charts of the phases that both runs have, with a line for each run."""
    first, second = phases_of(a), phases_of(b)
    parts = []
    for phase in (phase for phase in first if phase in second):
        charts = [
            line_chart(
                title,
                [series_of(metric, first[phase], "A"), series_of(metric, second[phase], "B")],
            )
            for title, metric in CHARTED
        ]
        parts.append(charts_of(phase, charts))
    return "".join(parts)


def _questions(a: Run, b: Run, outcomes: tuple[Mapping[str, Any], Mapping[str, Any]] | None) -> str:
    """Renders trajectories of the same questions of two evaluations side by side."""
    if outcomes is None:
        return ""
    values = [
        {t["id"]: t["samples"][0]["value"] for t in outcome["tasks"] if t["samples"]}
        for outcome in outcomes
    ]
    kinds: dict[tuple[bool, bool] | None, list[str]] = {kind: [] for kind in _KINDS}
    for task in (task for task in values[0] if task in values[1]):
        one, other = values[0][task], values[1][task]
        kinds[None if None in (one, other) else (one == 1.0, other == 1.0)].append(task)
    chosen = {task for tasks in kinds.values() for task in tasks[:QUESTIONS]}
    first, second = (
        _trajectories(side.path, None if "reasons" in outcome else str(outcome["stage"]), chosen)
        for side, outcome in zip((a, b), outcomes, strict=True)
    )
    parts = []
    for kind, tasks in kinds.items():
        shown = [task for task in tasks[:QUESTIONS] if task in first and task in second]
        if shown:
            parts.append(f"<h3>{_KINDS[kind]} ({len(tasks):,})</h3>")
            parts += [_question(first[task], second[task]) for task in shown]
    if not parts:
        return ""
    about = f"The first sample of each task, at most {QUESTIONS} tasks of each kind."
    return f'<p class="dim">{about}</p>{"".join(parts)}'


def _trajectories(run: Path, stage: str | None, tasks: set[str]) -> dict[str, Trajectory]:
    """Returns the first sample of each task in the evaluation of a stage, by task id.

    If ``stage`` is None, the path is no run, and the first trajectory of each task is returned.
    """
    if stage is not None and not trace_shards.trace_files_of_run(run):
        return {}
    shown = dict[str, Trajectory]()
    for one in iterate_trajectories(run, decode_trajectory, growing=True):
        first = one.sample_id == 0 and stage_of(one) == stage
        if one.task_id in tasks and (first or (stage is None and one.task_id not in shown)):
            shown[one.task_id] = one
    return shown


def _question(a: Trajectory, b: Trajectory) -> str:
    sides = "".join(
        f"<div><h4>{letter}: {verdict_of(one)}</h4>{render_body(one)}</div>"
        for letter, one in (("A", a), ("B", b))
    )
    question = f'<span class="question">{escape(a.question)}</span>'
    return (
        f'<details class="trace"><summary>{question}</summary>'
        f'<div class="pair">{sides}</div></details>'
    )
