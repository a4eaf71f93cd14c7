"""Builds the HTML page of a run from the files of the run directory.

Every part of the page is optional. For example, the page of a run without an evaluation has curves
but no table of results. The page of a run in progress shows the files that exist so far. The page
is a single file that works offline.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.data import trace_shards
from coa_jax.data.atif import decode_trajectory
from coa_jax.data.trajectory import iterate_trajectories
from coa_jax.data.verdicts import verdict_of
from coa_jax.report.breakdown import breakdown
from coa_jax.report.charts import line_chart, number
from coa_jax.report.page import (
    as_number,
    charts_of,
    escape,
    facts,
    fixed,
    phase_title,
    phases_of,
    rate_cells,
    save_page,
    series_of,
    step_of,
    table,
    whole_page,
)
from coa_jax.report.run import Run, read_run
from coa_jax.report.tokens import Spell, render_tokens, spelling
from coa_jax.report.traces import (
    ShownTrajectories,
    render_trace,
    sample_traces,
    select_traces,
    stage_of,
    stage_rank,
)
from coa_jax.train.run_warnings import warnings_of

TRACES_PER_STAGE = 60
_WITH_TOKENS = 12  # traces per stage with tokens, which make up most of the page

# The time of the whole step, then the times of its parts, which do not overlap.
_PARTS = (
    *("step", "data", "rollout_wait", "update", "publish", "traces", "checkpoint"),
    *("validation", "evaluation"),
)

# Charts as (title, patterns of the metrics in the chart); a star matches any text.
_CHARTS = (
    ("Evaluation during training: pass@1", ("eval/pass_at_1", "eval/*/pass_at_1")),
    ("Mean reward", ("reward/mean",)),
    ("Mean reward by source", ("source/*/reward",)),
    ("Solved by source (share)", ("source/*/solved",)),
    ("Tasks paused by the pool", ("pool/resting",)),
    ("Groups without a signal (share)", ("group/frac_zero_std",)),
    ("Entropy of the policy (nats)", ("policy/entropy",)),
    ("Clipped tokens (share)", ("policy/clip_low", "policy/clip_high")),
    ("Sampler-trainer gap of log p", ("mismatch/abs_logp_mean", "mismatch/abs_logp_max")),
    ("Episode length (tokens)", ("len/mean", "len/max")),
    ("Tool calls per episode", ("tool/calls",)),
    ("Failed tool calls (share)", ("tool/fail_frac",)),
    ("Episodes that obey the protocol (share)", ("format/valid",)),
    ("Stop reasons (share)", ("stop/*",)),
    ("Loss", ("loss", "validation/loss")),
    ("Gradient norm", ("optim/grad_norm",)),
    ("Learning rate", ("optim/lr",)),
    ("Seconds per step", tuple(f"time/{part}" for part in _PARTS)),
)
_STAGE_TITLES = {
    "teacher": "Teacher (multi-agent system)",
    "base": "Base model",
    "sft": "After SFT",
    "rl": "After RL",
}


def _title(stage: str) -> str:
    """Returns the title of a stage: ``natural_rl`` is "Natural RL"."""
    words = [w.upper() if w in ("sft", "rl", "rft") else w for w in stage.split("_")]
    return _STAGE_TITLES.get(stage, " ".join([words[0][:1].upper() + words[0][1:], *words[1:]]))


def build_report(run_dir: str | os.PathLike[str], per_stage: int = TRACES_PER_STAGE) -> Path:
    """Writes the HTML page of a run to ``report/index.html`` in its directory.

    Args:
        run_dir: directory of the run. It must contain at least one of config.json, metrics.jsonl,
            traces.jsonl, traces/, summary.json and evaluate/.
        per_stage: maximum number of trajectories that the page shows per stage.

    Returns:
        Path of the page.

    Raises:
        UserError: the directory does not exist or contains none of these files, or a file is
            malformed.
    """
    run = read_run(Path(run_dir))
    sample = (
        sample_traces(run.path, per_stage)
        if trace_shards.trace_files_of_run(run.path)
        else ShownTrajectories({}, {}, {})
    )
    page = whole_page(
        run.path.resolve().name,
        [
            _header(run, sample),
            _warnings(run.rows),
            _results(run.summary),
            _curves(run.rows),
            _traces(sample, spelling(run.path, run.config)),
        ],
    )
    return save_page(run.path / "report" / "index.html", page)


def trace_page(paths: Sequence[str], per_stage: int = TRACES_PER_STAGE) -> str:
    """Renders a page of trajectories that belong to no run, such as those of another program.

    Args:
        paths: files and folders, see `iterate_trajectories`. They may contain documents in ATIF,
            the Agent Trajectory Interchange Format (docs/data.md).
        per_stage: maximum number of trajectories that the page shows per stage. The name of an
            agent counts as the stage of its trajectories.

    Raises:
        UserError: a file cannot be read, or is malformed.
    """
    reads = (iterate_trajectories(path, decode_trajectory) for path in paths)
    sample = select_traces(itertools.chain.from_iterable(reads), per_stage)
    title = Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} files"
    total = sum(count.total() for count in sample.counts.values())
    head = f'<header><h1>{escape(title)}</h1><p class="dim">{total:,} traces</p></header>'
    return whole_page(title, [head, _traces(sample, None)])


def _header(run: Run, sample: ShownTrajectories) -> str:
    progress = [
        f"{phase} to step {number(step_of(rows[-1]))}"
        for phase, rows in phases_of(run.rows).items()
    ]
    if total := sum(sum(count.values()) for count in sample.counts.values()):
        progress.append(f"{total:,} traces")
    config = ""
    if run.config:
        config = (
            '<details class="more"><summary>Configuration</summary><pre class="card config">'
            f"{escape(json.dumps(run.config, indent=2, ensure_ascii=False))}</pre></details>"
        )
    return (
        f"<header><h1>{escape(run.path.resolve().name)}</h1>"
        f'<p class="dim">{escape(", ".join(progress)) or "no steps yet"}</p>'
        '<nav><a href="#results">Results</a><a href="#curves">Curves</a>'
        f'<a href="#traces">Traces</a></nav>{config}</header>'
    )


def _warnings(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the warnings of the run; returns "" if there are none."""
    warnings = warnings_of(rows)
    if not warnings:
        return ""
    # If the same problem occurs again, its warnings differ only in their figures.
    same: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for phase, step, text in warnings:
        same.setdefault((phase, re.sub(r"\d+", "", text)), []).append((step, text))
    items = []
    for (phase, _), times in same.items():
        first, (last, text) = times[0][0], times[-1]
        when = f"step {number(last)}"
        if len(times) > 1:
            when = f"{len(times)} times, steps {number(first)} to {number(last)}"
        items.append(f"<li><b>{escape(phase_title(phase))}, {when}</b>: {escape(text)}</li>")
    return f'<h2 id="warnings">Warnings</h2><ul class="warnings">{"".join(items)}</ul>'


def _results(summary: Mapping[str, Any]) -> str:
    blocks = {k: v for k, v in summary.items() if isinstance(v, dict) and "pass_at_1" in v}
    order = sorted(blocks, key=lambda stage: (stage_rank(stage), stage))
    parts = ['<h2 id="results">Results</h2>']
    if blocks:
        head = (
            "Policy", "pass@1", "95% interval", "", "tasks", "tokens per task",
            "tool calls per task", "format valid",
        )  # fmt: skip
        rows = [_result_row(name, blocks[name]) for name in order]
        parts.append(table("Results", head, rows, ""))
        parts.append(breakdown(summary, {stage: _title(stage) for stage in order}))
    else:
        parts.append(
            '<p class="dim">No evaluation yet. <code>coa-jax evaluate</code> adds its results to '
            "this directory.</p>"
        )
    times = summary.get("timings_s")
    if isinstance(times, dict) and times:
        stages = ((name.replace("_", " "), seconds) for name, seconds in times.items())
        parts.append(f"<h3>Wall time in seconds</h3>{facts(stages)}")
    others = [(k, v) for k, v in summary.items() if isinstance(v, str | int | float)]
    return "".join(parts) + (facts(others) if others else "")


def _result_row(name: str, block: Mapping[str, Any]) -> list[str]:
    valid = as_number(block.get("format_valid"))
    return [
        escape(_title(name)),
        *rate_cells(name, block["pass_at_1"], block.get("ci95")),
        fixed(block.get("n"), 0),
        fixed(block.get("tokens_per_task"), 1),
        fixed(block.get("tool_calls_per_task"), 2),
        "" if valid is None else f"{valid:.1%}",
    ]


def _curves(rows: Sequence[Mapping[str, Any]]) -> str:
    charts = [_phase_curves(phase, mine) for phase, mine in phases_of(rows).items()]
    none = '<p class="dim">No metrics yet. Training writes a row after each step.</p>'
    return f'<h2 id="curves">Curves</h2>{"".join(charts) or none}'


def _phase_curves(phase: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the charts of a phase; metrics outside `_CHARTS` are in a collapsed section."""
    remaining = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if name not in ("step", "phase") and (value is None or as_number(value) is not None)
    )
    charts = []
    for title, patterns in _CHARTS:
        matching = [
            n for n in remaining if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)
        ]
        # If all lines share the part before the slash, the legend leaves it out.
        shared = len({pattern.partition("/")[0] for pattern in patterns}) == 1
        names = [name.partition("/")[2] if shared else name for name in matching]
        lines = [series_of(m, rows, n) for m, n in zip(matching, names, strict=True)]
        charts += [line_chart(title, lines)] if lines else []
        for name in matching:
            del remaining[name]
    others = [line_chart(name, [series_of(name, rows)]) for name in remaining]
    more = ""
    if any(others):
        more = (
            f'<details class="more"><summary>{escape(phase)}: {len(others)} more'
            f'</summary><div class="charts">{"".join(others)}</div></details>'
        )
    return charts_of(phase, charts) + more


def _traces(sample: ShownTrajectories, spell: Spell | None) -> str:
    title = '<h2 id="traces">Traces</h2>'
    shown = [trace for traces in sample.shown.values() for trace in traces]
    if not shown:
        return f'{title}<p class="dim">No traces yet.</p>'
    verdicts = ("correct", "partial", "wrong", "ungraded")
    counts, limited = [], ""
    for stage, traces in sample.shown.items():
        count = sample.counts[stage]
        kinds = ", ".join(f"{count[v]:,} {v}" for v in verdicts if count[v])
        part = ""
        if len(traces) < count.total():
            part = f", {len(traces)} of them here"
            limited = (
                '<p class="dim">This page shows a sample. It has the same tasks for every '
                "evaluation, and random episodes of training. The counts are those of all "
                "traces.</p>"
            )
        failures = sample.reasons.get(stage, Counter()).most_common()
        why = "".join(f"<li>{escape(text)}: {times:,}</li>" for text, times in failures)
        counts.append(
            f"<li><b>{escape(stage)}</b>: {count.total():,} ({kinds}){part}"
            f"{why and f'<ul>{why}</ul>'}</li>"
        )
    present = set(map(verdict_of, shown))
    hops = {str(trace.metadata.get("hops")) for trace in shown} - {"None"}
    selects = (
        _select("stage", "every stage", dict.fromkeys(map(stage_of, shown)))
        + _select("verdict", "any verdict", (v for v in verdicts if v in present))
        + _select("hops", "any hops", sorted(hops, key=lambda h: (len(h), h)), "hops: ")
    )
    filters = (
        f'<div class="filters">{selects}<input id="filter-text" type="search" '
        'placeholder="words in the trace" aria-label="words in the trace">'
        '<button id="filter-reset" type="button" hidden>show all</button>'
        f'<output id="filter-count">{len(shown)} traces</output></div>'
    )
    rendered = [
        render_trace(trace, render_tokens(trace, spell) if spell and index < _WITH_TOKENS else "")
        for traces in sample.shown.values()
        for index, trace in enumerate(traces)
    ]
    return f'{title}{limited}<ul class="dim">{"".join(counts)}</ul>{filters}{"".join(rendered)}'


def _select(name: str, everything: str, values: Iterable[str], prefix: str = "") -> str:
    options = "".join(
        f'<option value="{escape(value)}">{prefix}{escape(value)}</option>' for value in values
    )
    return (
        f'<select id="filter-{name}" aria-label="{name}"><option value="">{everything}</option>'
        f"{options}</select>"
    )
