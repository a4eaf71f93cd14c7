"""Renders the result file of an evaluation as an HTML page: results, breakdowns and all tasks.

The page loads no other file and runs no script. Like the result file, the page contains no question
and no answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.report.charts import Series, line_chart, number
from coa_jax.report.page import (
    NONE,
    escape,
    facts,
    fixed,
    rate_cells,
    save_page,
    table,
    whole_page,
)

MOST_TASKS = 2000
_STYLE = """
.marks { white-space: normal; letter-spacing: 3px; } .marks span { font-weight: 700; }
.correct { color: var(--good); } .wrong { color: var(--bad); }
.columns { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); }
.columns > * { align-self: start; }
.tasks td { white-space: normal; overflow-wrap: anywhere; }
"""


def write_page(outcome: Mapping[str, Any], path: Path) -> Path:
    """Writes the page of a result file.

    Args:
        outcome: content of the result file.
        path: path of the page to write.

    Returns:
        The path of the page.
    """
    return save_page(path, page(outcome))


def page(outcome: Mapping[str, Any]) -> str:
    """Returns the content of an evaluation's result file as an HTML page."""
    figures, stage = outcome["figures"], str(outcome["stage"])
    sections = [
        _header(stage, outcome["settings"], figures, outcome.get("not_plain") or ()),
        _headline(figures),
        _at_k_table(figures),
        _breakdown(figures["by"]),
        _costs(figures),
        _left_out(figures),
        _tasks(outcome["tasks"], figures["by"]),
    ]
    return whole_page(stage, sections, style=_STYLE, script=False)


def _header(
    stage: str, settings: Mapping[str, Any], figures: Mapping[str, Any], not_plain: Sequence[str]
) -> str:
    sampling = settings.get("sampling") or {}
    entries = {
        "policy": settings.get("policy"),
        "tasks": settings.get("tasks"),
        "samples": f"{figures['tasks']:,} tasks, {len(figures['rounds'])} each",
        "temperature": sampling.get("temperature"),
        "top-p": sampling.get("top_p"),
        "top-k": sampling.get("top_k"),
        "tokens": (settings.get("rollout") or {}).get("max_tokens"),
        "not a plain pass@1": ", ".join(not_plain),
    }
    shown = ((name, str(value)) for name, value in entries.items() if value not in (None, ""))
    return f"<header><h1>{escape(stage)}</h1>{facts(shown)}</header>"


def _headline(figures: Mapping[str, Any]) -> str:
    rounds = [value for value in figures["rounds"] if value is not None]
    name = "pass@1" if len(rounds) < 2 else f"pass@1, mean of {len(rounds)} rounds"
    rows = [_rate_row(name, figures)]
    met = figures["exposure"]
    if met["named_blocked_address"] or met["shown_question"]:
        rows.append(_rate_row("without samples exposed to the benchmark", met["unexposed"]))
    lines = ["<h2>Result</h2>", table("Result", ["", "", "95 %", "error", "tasks"], rows)]
    if len(rounds) > 1:
        shown = ", ".join(f"{value:.3f}" for value in rounds)
        lines.append(f'<p class="dim">Rounds: {shown}. The error is clustered by task.</p>')
    if figures["mean_value"] != figures["pass_at_1"]:
        lines.append(f'<p class="dim">Mean of the grades: {figures["mean_value"]:.3f}.</p>')
    return "".join(lines)


def _rate_row(name: str, entry: Mapping[str, Any]) -> list[str]:
    rate, _, plot = rate_cells(name, entry["pass_at_1"], entry["ci95"])
    return [escape(name), rate, plot, fixed(entry["se"], 3, NONE), f"{entry['n']:,}"]


def _at_k_table(figures: Mapping[str, Any]) -> str:
    at, scaling = figures["at_k"], figures["scaling"]
    if len(at) < 2 and not scaling:
        return ""
    rows = [
        [f"pass@{k}", f"{e['value']:.3f}", _error(e["se"]), f"{e['n']:,}"] for k, e in at.items()
    ]
    for name, e in scaling.items():
        tasks = f"{e['n']:,}" + (f" ({e['ungraded']:,} ungraded)" if e["ungraded"] else "")
        rate = fixed(e["pass_at_1"], 3, "not graded")
        rows.append([escape(name), rate, _error(e["se"]), tasks])
    chart = ""
    if len(at) > 1:
        rates = tuple(entry["value"] for entry in at.values())
        chart = line_chart("pass@k over k", [Series("pass@k", tuple(map(float, at)), rates)])
    shown = table("Test-time scaling", ["several samples", "", "error", "tasks"], rows)
    return f'<h2>Test-time scaling</h2><div class="columns">{shown}{chart}</div>'


def _error(value: float | None) -> str:
    return NONE if value is None else f"\u00b1 {value:.3f}"


def _breakdown(by: Mapping[str, Mapping[str, Any]]) -> str:
    tables = [
        table(
            f"Results by {field}",
            [field, "pass@1", "95 %", "error", "tasks"],
            [_rate_row(name, entry) for name, entry in groups.items()],
        )
        for field, groups in by.items()
    ]
    shown = f'<h2>Results by group</h2><div class="columns">{"".join(tables)}</div>'
    return shown if tables else ""


def _costs(figures: Mapping[str, Any]) -> str:
    cost, valid = figures["costs"], figures["format_valid"]
    rows = [
        ["policy tokens per sample", number(cost["tokens_per_sample"])],
        ["all tokens per sample", number(cost["length_per_sample"])],
        ["tool calls per sample", number(cost["calls_per_sample"])],
        ["tokens per solved sample", number(cost["tokens_per_solved"])],
        ["tool calls per solved sample", number(cost["calls_per_solved"])],
        ["samples that obey the protocol", NONE if valid is None else f"{valid:.1%}"],
    ]
    calls = []
    for name, entry in cost["tools"].items():
        outcomes = ", ".join(f"{escape(k)} {v:,}" for k, v in entry["outcomes"].items())
        calls.append([escape(name), f"{entry['calls']:,}", outcomes])
    ends = [[escape(name), number(count)] for name, count in figures["stops"].items()]
    tables = table("Costs", ["costs", ""], rows)
    tables += table("Stop reasons", ["stop reason", "samples"], ends)
    if calls:
        tables += table("Tools", ["tool", "calls", "outcomes"], calls)
    return f'<h2>Costs and stop reasons</h2><div class="columns">{tables}</div>'


def _left_out(figures: Mapping[str, Any]) -> str:
    samples, met = figures["samples"], figures["exposure"]
    lines = [
        f"{samples['finished']:,} of {samples['wanted']:,} samples are finished, "
        f"{samples['graded']:,} are graded; {samples['unanswered']:,} of these have no answer, "
        "which counts as a failure.",
    ]
    lines += [
        f"{count:,} samples are ungraded ({escape(why.replace('_', ' '))}) and not counted."
        for why, count in samples["ungraded"].items()
        if count
    ]
    lines += [
        f"{escape(name)}: {count:,} without a verdict: {escape(why)}"
        for name, reasons in (
            ("judge", figures.get("unjudged", {})),
            *((name, entry.get("why", {})) for name, entry in figures["scaling"].items()),
        )
        for why, count in reasons.items()
    ]
    named, shown = met["named_blocked_address"], met["shown_question"]
    lines.append(
        f"{named:,} samples named an address of the block list; in {shown:,} samples a tool "
        "returned a question of the benchmark."
    )
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f"<h2>Samples counted</h2><ul>{items}</ul>"


def _tasks(tasks: Sequence[Mapping[str, Any]], by: Mapping[str, Any]) -> str:
    rows = []
    for task in tasks[:MOST_TASKS]:
        samples = task["samples"]
        marks = "".join(_verdict_mark(sample["value"]) for sample in samples)
        tokens = sum(sample["tokens"] for sample in samples) / len(samples) if samples else None
        fields = [escape(str(task.get(field, NONE))) for field in by]
        shown = f'<span class="marks">{marks}</span>'
        rows.append([escape(str(task["id"])), *fields, shown, number(tokens)])
    more = len(tasks) - len(rows)
    note = f'<p class="dim">{more:,} more are in the result file.</p>' if more > 0 else ""
    shown = table("Tasks", ["task", *by, "samples", "tokens"], rows, "detail tasks")
    return f"<h2>Tasks</h2>{shown}{note}"


def _verdict_mark(value: float | None) -> str:
    if value is None:
        return '<span class="">?</span>'
    kind, sign = ("correct", "\u2713") if value == 1.0 else ("wrong", "\u2717")
    return f'<span class="{kind}">{sign}</span>'
