"""Renders the blocks ``{stage}_details`` of summary.json as one HTML table.

Each column is a policy. Each row is a kind of question, a tool, a stop reason or another detail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coa_jax.report.charts import number
from coa_jax.report.page import table
from coa_jax.report.traces import escape

_NONE = "\u2013"


def breakdown(summary: Mapping[str, Any], stages: Sequence[str], titles: Mapping[str, str]) -> str:
    """Renders a table with the details of each evaluated stage; "" if no stage has details.

    Args:
        summary: content of summary.json.
        stages: names of the stages, in the order of the table's columns.
        titles: titles of stages by name; a stage without a title is shown under its name.
    """
    found = {stage: summary.get(f"{stage}_details") for stage in stages}
    details = {stage: block for stage, block in found.items() if isinstance(block, Mapping)}
    if not details:
        return ""
    head = ["", *(titles.get(stage, stage) for stage in details)]
    rows = [
        *_rows(details, "pass_at_k", lambda k: f"pass@{k}", _number3, skip=("1",)),
        *_rows(details, "by_hops", _hops, _rate),
        *_tools(details),
        *_rows(details, "stops", lambda name: f"stop: {name}", number),
        *_single(details, "tokens_per_solved", "tokens per solved task"),
        *_single(details, "ungraded", "ungraded samples"),
    ]
    kinds = _rows(details, "by_kind", str, _rate)
    more = ""
    if kinds:
        more = (
            f'<details class="more"><summary>pass@1 by kind of question ({len(kinds)})</summary>'
            f"{table('pass@1 by kind of question', head, kinds)}</details>"
        )
    shown = table("Details", head, rows) if rows else ""
    return f"<h3>Details</h3>{shown}{more}" if shown or more else ""


def _rows(
    details: Mapping[str, Mapping[str, Any]],
    group: str,
    title: Callable[[str], str],
    show: Callable[[Any], str],
    skip: Sequence[str] = (),
) -> list[list[str]]:
    """Returns a row for each name in a group of the details, such as ``by_hops``."""
    groups = {stage: _mapping(block.get(group)) for stage, block in details.items()}
    names = dict.fromkeys(name for values in groups.values() for name in values)
    return [
        [escape(title(name)), *(show(values[name]) if name in values else _NONE
                                for values in groups.values())]
        for name in sorted(names, key=lambda name: (len(name) if name.isdigit() else 0, name))
        if name not in skip
    ]  # fmt: skip


def _single(details: Mapping[str, Mapping[str, Any]], key: str, title: str) -> list[list[str]]:
    values = [block.get(key) for block in details.values()]
    return [[title, *map(_amount, values)]] if any(values) else []


def _tools(details: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns a row for each tool, with its calls and the shares of outcomes other than ``ok``."""
    return _rows(details, "tools", lambda name: f"{name}: calls", _calls)


def _calls(entry: Any) -> str:
    entry = _mapping(entry)
    calls, outcomes = entry.get("calls"), _mapping(entry.get("outcomes"))
    if not isinstance(calls, int) or not calls:
        return _NONE
    bad = [
        f"{count / calls:.1%} {escape(str(name))}"
        for name, count in sorted(outcomes.items())
        if name != "ok" and isinstance(count, int) and count
    ]
    return f"{calls:,}" + (f' <span class="dim">({", ".join(bad)})</span>' if bad else "")


def _rate(entry: Any) -> str:
    entry = _mapping(entry)
    tasks = f' <span class="dim">of {_amount(entry.get("n"))}</span>'
    return _number3(entry.get("pass_at_1")) + tasks


def _hops(name: str) -> str:
    return f"pass@1, {name} search{'' if name == '1' else 'es'}"


def _number3(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else _NONE


def _amount(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else _NONE


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
