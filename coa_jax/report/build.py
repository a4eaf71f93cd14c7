"""Builds the HTML page of a run from the files of the run directory.

Every part of the page is optional. For example, the page of a run without an evaluation has curves
but no table of results, and the page of a run in progress shows the files that exist so far. The
page is a single file that works offline.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax import files, jsonl, shards
from coa_jax.errors import UserError
from coa_jax.learn.watch import warnings_of
from coa_jax.report.breakdown import breakdown
from coa_jax.report.charts import Interval, Series, interval_bar, line_chart, number
from coa_jax.report.page import (
    as_number,
    facts,
    fixed,
    phase_title,
    series_of,
    step_of,
    table,
    whole_page,
)
from coa_jax.report.tokens import Spell, render_tokens, spelling
from coa_jax.report.traces import (
    STAGES,
    Sample,
    escape,
    render_trace,
    sample_traces,
    stage_of,
    verdict_of,
)

TRACES_PER_STAGE = 60
_WITH_TOKENS = 12  # traces per stage with tokens, which make up most of the page
_FILES = ("config.json", "metrics.jsonl", "traces.jsonl", "traces", "summary.json")

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
            traces.jsonl, traces/ and summary.json.
        per_stage: maximum number of traces that the page shows per stage.

    Returns:
        Path of the page.

    Raises:
        UserError: the directory does not exist or contains none of these files, or a file is
            malformed.
    """
    root = Path(run_dir)
    if not root.is_dir():
        raise UserError(f"{root}: no such run directory; pass the --workdir of a run")
    there = {name for name in _FILES if (root / name).exists()}
    if not there:
        raise UserError(f"{root}: not a run directory: it has none of {', '.join(_FILES)}")
    config = files.read_json_object(root / "config.json") if "config.json" in there else None
    summary = files.read_json_object(root / "summary.json") if "summary.json" in there else {}
    rows = jsonl.read_objects(root / "metrics.jsonl")
    sample = sample_traces(root, per_stage) if shards.of_run(root) else Sample({}, {})
    name = root.resolve().name
    page = whole_page(
        name,
        [
            _header(name, config, rows, sample),
            _warnings(rows),
            _results(summary),
            _curves(rows),
            _traces(sample, spelling(root, config)),
        ],
    )
    path = root / "report" / "index.html"
    path.parent.mkdir(exist_ok=True)
    files.replace(path, page.encode("utf-8", "replace"))
    return path


def _header(
    name: str, config: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], sample: Sample
) -> str:
    phases = dict.fromkeys(str(row.get("phase", "run")) for row in rows)
    steps = [
        f"{phase} to step "
        f"{number(max(step_of(r) for r in rows if str(r.get('phase', 'run')) == phase))}"
        for phase in phases
    ]
    total = sum(sum(count.values()) for count in sample.counts.values())
    facts = [*steps, *([f"{total:,} traces"] if total else [])]
    shown = ""
    if config is not None:
        text = escape(json.dumps(config, indent=2, ensure_ascii=False))
        shown = (
            '<details class="more"><summary>Configuration</summary>'
            f'<pre class="card config">{text}</pre></details>'
        )
    return (
        f"<header><h1>{escape(name)}</h1>"
        f'<p class="dim">{escape(", ".join(facts)) or "no steps yet"}</p>'
        '<nav><a href="#results">Results</a><a href="#curves">Curves</a>'
        f'<a href="#traces">Traces</a></nav>{shown}</header>'
    )


def _warnings(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the warnings of the run; returns "" if there are none."""
    found = warnings_of(rows)
    if not found:
        return ""
    # If the same problem occurs again, its warnings differ only in their figures.
    same: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for phase, step, text in found:
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
    order = [s for s in STAGES if s in blocks] + sorted(set(blocks) - set(STAGES))
    parts = ['<h2 id="results">Results</h2>']
    if blocks:
        head = (
            "Policy", "pass@1", "95% interval", "", "tasks", "tokens per task",
            "tool calls per task", "format valid",
        )  # fmt: skip
        rows = [_result_row(name, blocks[name]) for name in order]
        parts.append(table("Results", head, rows, ""))
        parts.append(breakdown(summary, order, {stage: _title(stage) for stage in order}))
    else:
        parts.append(
            '<p class="dim">No evaluation yet. <code>coa-jax evaluate</code> adds its results to '
            "this directory.</p>"
        )
    times = summary.get("timings_s")
    if isinstance(times, dict) and times:
        parts.append(
            "<h3>Wall time in seconds</h3>"
            + facts({name.replace("_", " "): seconds for name, seconds in times.items()})
        )
    others = {
        k: v for k, v in summary.items() if isinstance(v, str | int | float) and k != "timings_s"
    }
    return "".join(parts) + (facts(others) if others else "")


def _result_row(name: str, block: Mapping[str, Any]) -> list[str]:
    value, interval = as_number(block.get("pass_at_1")), block.get("ci95")
    shown = "not graded" if value is None else f"{value:.3f}"
    ends = [as_number(end) for end in interval] if isinstance(interval, list) else []
    valid = as_number(block.get("format_valid"))
    plot = span = ""
    if value is not None and len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        plot = interval_bar(Interval(name, value, ends[0], ends[1]))
        span = f"{ends[0]:.3f} \u2013 {ends[1]:.3f}"
    return [
        escape(_title(name)),
        f"<strong>{shown}</strong>",
        span,
        plot,
        fixed(block.get("n"), 0),
        fixed(block.get("tokens_per_task"), 1),
        fixed(block.get("tool_calls_per_task"), 2),
        "" if valid is None else f"{valid:.1%}",
    ]


def _curves(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = ['<h2 id="curves">Curves</h2>']
    if not rows:
        parts.append('<p class="dim">No metrics yet. Training writes a row after each step.</p>')
    phases = dict.fromkeys(str(row.get("phase", "run")) for row in rows)
    for phase in phases:
        mine = [row for row in rows if str(row.get("phase", "run")) == phase]
        parts.append(_phase_curves(phase, sorted(mine, key=step_of)))
    return "".join(parts)


def _phase_curves(phase: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the charts of a phase; metrics outside `_CHARTS` are in a collapsed section."""
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if name not in ("step", "phase") and (value is None or as_number(value) is not None)
    )
    series = {name: series_of(name, rows) for name in names}
    charts, used = [], set()
    for title, wanted in _CHARTS:
        group = [n for n in names if any(fnmatch.fnmatchcase(n, w) for w in wanted)]
        used.update(group)
        if group:
            charts.append(line_chart(title, [_short_name(series[n], wanted) for n in group]))
    others = [line_chart(name, [series[name]]) for name in names if name not in used]
    heading = f"<h3>{escape(phase_title(phase))}, by step</h3>"
    more = ""
    if any(others):
        more = (
            f'<details class="more"><summary>{escape(phase)}: {len(others)} more'
            f'</summary><div class="charts">{"".join(others)}</div></details>'
        )
    return f'{heading}<div class="charts">{"".join(charts)}</div>{more}'


def _short_name(series: Series, wanted: Sequence[str]) -> Series:
    """Drops the part before the slash of a metric's name if all lines of a chart share it."""
    groups = {name.partition("/")[0] for name in wanted}
    name = series.name.partition("/")[2] if len(groups) == 1 else series.name
    return Series(name or series.name, series.x, series.y)


def _traces(sample: Sample, spell: Spell | None) -> str:
    parts = ['<h2 id="traces">Traces</h2>']
    shown = [trace for traces in sample.shown.values() for trace in traces]
    if not shown:
        return "".join([*parts, '<p class="dim">No traces yet.</p>'])
    verdicts = ("correct", "partial", "wrong", "ungraded")
    counts = []
    for stage, traces in sample.shown.items():
        count = sample.counts[stage]
        kinds = ", ".join(f"{count[v]:,} {v}" for v in verdicts if count[v])
        total = sum(count.values())
        part = f", {len(traces)} of them here" if len(traces) < total else ""
        counts.append(f"<li><b>{escape(stage)}</b>: {total:,} ({kinds}){part}</li>")
    limited = any(len(t) < sum(sample.counts[s].values()) for s, t in sample.shown.items())
    if limited:
        parts.append(
            '<p class="dim">This page shows a sample. It has the same tasks for every evaluation, '
            "and random episodes of training. The counts are those of all traces.</p>"
        )
    parts.append(f'<ul class="dim">{"".join(counts)}</ul>')
    hops = {str(trace.metadata.get("hops")) for trace in shown} - {"None"}
    choices = {
        "stage": ("every stage", dict.fromkeys(map(stage_of, shown))),
        "verdict": ("any verdict", dict.fromkeys(v for v in verdicts
                                                if v in {verdict_of(t) for t in shown})),
        "hops": ("any hops", dict.fromkeys(sorted(hops, key=lambda h: (len(h), h)))),
    }  # fmt: skip
    selects = "".join(_select(name, *choices[name]) for name in choices)
    parts.append(
        f'<div class="filters">{selects}<input id="filter-text" type="search" '
        'placeholder="words in the trace" aria-label="words in the trace">'
        '<button id="filter-reset" type="button" hidden>show all</button>'
        f'<output id="filter-count">{len(shown)} traces</output></div>'
    )
    for traces in sample.shown.values():
        for place, trace in enumerate(traces):
            tokens = render_tokens(trace, spell) if spell and place < _WITH_TOKENS else ""
            parts.append(render_trace(trace, tokens))
    return "".join(parts)


def _select(name: str, everything: str, values: Mapping[str, None]) -> str:
    prefix = "hops: " if name == "hops" else ""
    options = "".join(
        f'<option value="{escape(value)}">{prefix}{escape(value)}</option>' for value in values
    )
    return (
        f'<select id="filter-{name}" aria-label="{name}"><option value="">{everything}</option>'
        f"{options}</select>"
    )
