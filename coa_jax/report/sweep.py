"""Compares the runs of a sweep in a table and in curves.

The directory of a sweep has a subdirectory ``NAME-SEED`` for each run. Runs with the same NAME are
repetitions of a setting. The evaluation of a run is in its ``summary.json`` or
``evaluate/summary.json``. If runs have several phases (``sft`` and then ``rl``), their last phases
are compared.

The command prints the table. It writes ``report/index.html``, with training curves averaged over
the repetitions, and ``sweep.json`` to the directory of the sweep. Runs may still be in progress.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax.errors import UserError
from coa_jax.files import durable, jsonl
from coa_jax.report.charts import Series, line_chart, number
from coa_jax.report.page import (
    as_number,
    escape,
    fixed,
    phase_title,
    phases_of,
    rate_cells,
    save_page,
    step_of,
    whole_page,
)
from coa_jax.report.page import table as html_table
from coa_jax.report.traces import stage_rank
from coa_jax.run.command import run_main, workdir_flag
from coa_jax.storage import visited, with_urls

CHARTED = (
    ("Mean reward", "reward/mean"),
    ("Episodes that obey the protocol (share)", "format/valid"),
    ("Entropy of the policy (nats)", "policy/entropy"),
    ("Episode length (tokens)", "len/mean"),
    ("Tool calls per episode", "tool/calls"),
    ("Groups without a signal (share)", "group/frac_zero_std"),
    ("Gradient norm", "optim/grad_norm"),
    ("Largest sampler against trainer |log p| gap", "mismatch/abs_logp_max"),
    ("Loss", "loss"),
)
"""Title and metric of each chart; a chart has a line for each setting."""


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """The results of one run.

    Attributes:
        name: NAME in the name ``NAME-SEED`` of the run's directory.
        seed: SEED in the name of the directory; "" if the name does not end with a number.
        rows: rows of metrics.jsonl that belong to ``phase``, sorted by step.
        result: entry of the last evaluated stage in summary.json; None if the run was not
            evaluated.
        phase: last training phase that any run with the same ``name`` has begun; "" if there are no
            metrics.
    """

    name: str
    seed: str
    rows: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    phase: str = ""


@dataclasses.dataclass(frozen=True)
class SettingSummary:
    """Statistics over the runs of one setting, that is, over the runs with the same name.

    Statistics of evaluations are computed over the evaluated runs; they are None if no run was
    evaluated.

    Attributes:
        name: name of the setting.
        phase: training phase that ``reward``, ``steps`` and ``gap`` belong to; "" if there are no
            metrics.
        runs: number of runs.
        measured: number of evaluated runs.
        pass_at_1: mean pass@1 over the evaluated runs.
        low: lowest pass@1 of any run.
        high: highest pass@1 of any run.
        deviation: standard deviation of pass@1 over the runs; None for fewer than two evaluated
            runs.
        tasks: number of tasks in each evaluation.
        tokens_per_task: mean number of tokens per task.
        format_valid: mean share of samples that obey the protocol.
        reward: mean reward over the last quarter of the training steps; None if there are no
            rewards.
        steps: number of steps of ``phase`` that every run of the setting has finished.
        gap: largest difference between log-probabilities of sampler and trainer in any step; None
            if the metric is missing.
    """

    name: str
    phase: str
    runs: int
    measured: int
    pass_at_1: float | None
    low: float | None
    high: float | None
    deviation: float | None
    tasks: int | None
    tokens_per_task: float | None
    format_valid: float | None
    reward: float | None
    steps: int
    gap: float | None


def read_runs(parent: Path) -> list[SweepRun]:
    """Reads the runs of a sweep, in the order of the names of their subdirectories.

    Raises:
        UserError: the directory does not exist, or contains no run.
    """
    if not parent.is_dir():
        raise UserError(f"{parent}: no such directory; give the directory of the runs")
    runs = [run for path in sorted(parent.iterdir()) if (run := _read(path)) is not None]
    if not runs:
        raise UserError(
            f"{parent}: no run in it; runs are subdirectories NAME-SEED with metrics.jsonl or "
            "summary.json"
        )
    # Only rows of the last phase are kept, so that the steps of a setting are comparable.
    phases: dict[str, tuple[str, ...]] = {}
    for run in runs:
        phases[run.name] = max(phases.get(run.name, ()), tuple(phases_of(run.rows)), key=len)
    sweep = []
    for run in runs:
        last = phases[run.name][-1] if phases[run.name] else ""
        rows = tuple(phases_of(run.rows).get(last, ()))
        sweep.append(dataclasses.replace(run, rows=rows, phase=last))
    return sweep


def _read(path: Path) -> SweepRun | None:
    metrics = path / "metrics.jsonl"
    places = (path / "evaluate" / "summary.json", path / "summary.json")
    summary = next((file for file in places if file.exists()), None)
    if summary is None and not metrics.exists():
        return None
    blocks = {} if summary is None else durable.read_json_object(summary)
    measured = {k: v for k, v in blocks.items() if isinstance(v, Mapping) and "pass_at_1" in v}
    # The result of a pipeline is the result of its last evaluated stage.
    last = max(measured, key=stage_rank, default="")
    name, seed = re.fullmatch(r"(.+?)(?:-(\d+))?", path.name).groups(default="")  # type: ignore[union-attr]
    return SweepRun(name, seed, tuple(jsonl.read_objects(metrics)), measured.get(last))


def summarize(runs: Sequence[SweepRun]) -> list[SettingSummary]:
    """Returns the statistics of each setting of a sweep, the highest mean pass@1 first.

    Settings without an evaluated run come last.
    """
    groups: dict[str, list[SweepRun]] = defaultdict(list)
    for run in runs:
        groups[run.name].append(run)
    rows = [_row(name, mine) for name, mine in groups.items()]
    return sorted(rows, key=lambda row: (row.pass_at_1 is None, -(row.pass_at_1 or 0.0), row.name))


def _row(name: str, runs: Sequence[SweepRun]) -> SettingSummary:
    results = [run.result for run in runs if run.result is not None]
    rates, tasks = _values(results, "pass_at_1"), _values(results, "n")
    rewards = [_values(run.rows, "reward/mean") for run in runs]
    late = [values[-math.ceil(len(values) / 4) :] for values in rewards if values]
    gaps = _values([row for run in runs for row in run.rows], "mismatch/abs_logp_max")
    return SettingSummary(
        name=name,
        phase=runs[0].phase,
        runs=len(runs),
        measured=len(results),
        pass_at_1=_mean(rates),
        low=min(rates, default=None),
        high=max(rates, default=None),
        deviation=statistics.stdev(rates) if len(rates) > 1 else None,
        tasks=int(max(tasks)) if tasks else None,
        tokens_per_task=_mean(_values(results, "tokens_per_task")),
        format_valid=_mean(_values(results, "format_valid")),
        reward=_mean([sum(values) / len(values) for values in late]),
        steps=int(min((step_of(run.rows[-1]) for run in runs if run.rows), default=0)),
        gap=max(gaps, default=None),
    )


def curves(runs: Sequence[SweepRun], metric: str) -> list[Series]:
    """Returns the average curve of a metric for each setting of a sweep.

    The value at a step is the mean over those runs of the setting that have the step.
    """
    lines = []
    for name in dict.fromkeys(run.name for run in runs):
        points: dict[float, list[float]] = defaultdict(list)
        for row in (row for run in runs if run.name == name for row in run.rows):
            points[step_of(row)] += _values([row], metric)
        steps = sorted(step for step, values in points.items() if values)
        if steps:
            lines.append(Series(name, tuple(steps), tuple(_mean(points[x]) for x in steps)))
    return lines


def build_sweep(parent: Path) -> tuple[Path, list[SettingSummary]]:
    """Writes the page of a sweep and ``sweep.json``.

    Args:
        parent: directory of the sweep.

    Returns:
        The path of the page, and the statistics of each setting, see `summarize`.
    """
    runs = read_runs(parent)
    rows = summarize(runs)
    listed = {row.name: index for index, row in enumerate(rows)}
    runs = sorted(runs, key=lambda run: (listed[run.name], run.seed))  # colours as in the table
    name = parent.resolve().name
    page = whole_page(
        name,
        [
            f"<h1>{escape(name)}</h1>",
            '<h2 id="results">Results</h2>',
            _html_table(rows),
            '<p class="dim">Means over the repetitions; the bar reaches from the lowest to the '
            "highest repetition. Training reward: mean over the last quarter of the steps. Steps, "
            "training reward and curves belong to the phase in the row.</p>",
            '<h2 id="curves">Curves</h2><p class="dim">By step, averaged over the repetitions.</p>',
            *(_charts(phase, runs) for phase in dict.fromkeys(run.phase for run in runs)),
        ],
    )
    path = save_page(parent / "report" / "index.html", page)
    result = [dataclasses.asdict(row) for row in rows]
    durable.replace(parent / "sweep.json", (json.dumps(result, indent=1) + "\n").encode())
    return path, rows


def _charts(phase: str, runs: Sequence[SweepRun]) -> str:
    mine = [run for run in runs if run.phase == phase]
    charts = [
        line_chart(title, lines) for title, metric in CHARTED if (lines := curves(mine, metric))
    ]
    if not charts:
        return ""
    return f'<h3>{escape(phase_title(phase))}</h3><div class="charts">{"".join(charts)}</div>'


def table(rows: Sequence[SettingSummary]) -> str:
    """Formats the statistics of a sweep's settings as a table for a terminal."""
    width = max(4, *(len(row.name) for row in rows))
    lines = [
        f"{'name':{width}}  runs  pass@1  lowest  highest  tokens  format  training reward  gap",
    ]
    for row in rows:
        cells = (
            f"{row.name:{width}}",
            f"{row.measured:2d}/{row.runs}",
            f"{fixed(row.pass_at_1, 3):>6}",
            f"{fixed(row.low, 3):>6}",
            f"{fixed(row.high, 3):>7}",
            f"{fixed(row.tokens_per_task, 0):>6}",
            f"{fixed(row.format_valid, 3):>6}",
            f"{fixed(row.reward, 3):>15}",
            "" if row.gap is None else f"{row.gap:.1e}",
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _html_table(rows: Sequence[SettingSummary]) -> str:
    body = []
    for row in rows:
        rate = ("", "", "")
        if row.pass_at_1 is not None:
            rate = rate_cells(row.name, row.pass_at_1, (row.low, row.high))
        cells = (
            escape(row.name),
            f"{row.measured} of {row.runs}",
            *rate,
            fixed(row.deviation, 3),
            number(row.tasks),
            fixed(row.tokens_per_task, 1),
            fixed(row.format_valid, 3),
            escape(phase_title(row.phase)),
            number(row.steps),
            fixed(row.reward, 3),
            "" if row.gap is None else f"{row.gap:.1e}",
        )
        body.append(cells)
    heads = (
        "Name", "runs measured", "pass@1", "lowest \u2013 highest", "", "deviation", "tasks",
        "tokens per task", "format valid", "phase", "steps", "training reward",
        "largest |log p| gap",
    )  # fmt: skip
    return html_table("Results", heads, body, "")


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    numbers = (as_number(row.get(name)) for row in rows)
    return [value for value in numbers if value is not None and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax sweep``."""
    workdir_flag("directory whose subdirectories are runs")


def main(argv: list[str]) -> None:
    """Writes the page of a sweep, and prints the table."""
    with visited(flags.FLAGS.workdir) as folder:
        path, rows = build_sweep(folder)
    print(table(rows))
    print(f"report -> {with_urls(path)}")


if __name__ == "__main__":
    run_main(main, define_flags)
