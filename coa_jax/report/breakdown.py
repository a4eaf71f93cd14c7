"""Renders the blocks ``{stage}_details`` of summary.json as one HTML table.

A stage is the evaluation of one policy of the run. Each column is a stage. Each row is a kind of
question, a tool, a stop reason or another detail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coa_jax.report.charts import number
from coa_jax.report.page import NONE, as_number, escape, fixed, table


def breakdown(summary: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """Renders a table of each evaluated stage: pass@k, tool calls, stop reasons and other details.

    The result is "" if no stage has such details.

    Args:
        summary: content of summary.json, in which the key ``{stage}_details`` has the details of a
            stage.
        titles: maps the name of each stage to its title, in the order of the table's columns.
    """
    details = {stage: _mapping(summary.get(f"{stage}_details")) for stage in titles}
    details = {stage: block for stage, block in details.items() if block}
    if not details:
        return ""
    head = ["", *(titles[stage] for stage in details)]
    blocks = list(details.values())
    at_k = _rows(blocks, "pass_at_k", lambda k: f"pass@{k}", lambda v: fixed(v, 3, NONE))
    rows = [
        *(row for row in at_k if row[0] != "pass@1"),  # the table of results has pass@1
        *_rows(blocks, "by_hops", _hops, _rate),
        *_rows(blocks, "tools", lambda name: f"{name}: calls", _calls),
        *_rows(blocks, "stops", lambda name: f"stop: {name}", _amount),
    ]
    for key, title in (
        ("tokens_per_solved", "tokens per solved task"),
        ("ungraded", "ungraded samples"),
    ):
        if any(values := [block.get(key) for block in blocks]):
            rows.append([title, *map(_amount, values)])
    kinds = _rows(blocks, "by_kind", str, _rate)
    more = ""
    if kinds:
        more = (
            f'<details class="more"><summary>pass@1 by kind of question ({len(kinds)})</summary>'
            f"{table('pass@1 by kind of question', head, kinds)}</details>"
        )
    shown = table("Details", head, rows) if rows else ""
    return f"<h3>Details</h3>{shown}{more}" if shown or more else ""


def _rows(
    blocks: list[Mapping[str, Any]],
    group: str,
    title: Callable[[str], str],
    show: Callable[[Any], str],
) -> list[list[str]]:
    """Returns a row for each name in a group of the details, such as ``by_hops``."""
    groups = [_mapping(block.get(group)) for block in blocks]
    names = {name for values in groups for name in values}
    return [
        [escape(title(name)), *(show(v[name]) if name in v else NONE for v in groups)]
        for name in sorted(names, key=lambda name: (len(name) if name.isdigit() else 0, name))
    ]


def _calls(entry: Any) -> str:
    """Returns the number of calls of a tool, with the shares of outcomes other than ``ok``."""
    entry = _mapping(entry)
    calls, outcomes = entry.get("calls"), _mapping(entry.get("outcomes"))
    if not isinstance(calls, int) or not calls:
        return NONE
    bad = [
        f"{count / calls:.1%} {escape(str(name))}"
        for name, count in sorted(outcomes.items())
        if name != "ok" and isinstance(count, int) and count
    ]
    return f"{calls:,}" + (f' <span class="dim">({", ".join(bad)})</span>' if bad else "")


def _rate(entry: Any) -> str:
    entry = _mapping(entry)
    tasks = f' <span class="dim">of {_amount(entry.get("n"))}</span>'
    return fixed(entry.get("pass_at_1"), 3, NONE) + tasks


def _hops(name: str) -> str:
    return f"pass@1, {name} search{'' if name == '1' else 'es'}"


def _amount(value: Any) -> str:
    return number(as_number(value))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
