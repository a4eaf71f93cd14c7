"""Renders what all report pages have in common: the HTML frame, tables, rates and numbers."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.files import durable
from coa_jax.report.charts import Series, interval_bar, number

NONE = "\u2013"
"""Text that a table shows in place of a missing value."""

_STYLE, _SCRIPT = (
    Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js")
)
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")


def escape(text: str) -> str:
    """Escapes text for HTML elements and attributes; control characters become U+FFFD."""
    return html.escape(_UNSEEN.sub("\ufffd", text.replace("\r\n", "\n")))


def save_page(path: Path, page: str) -> Path:
    """Writes an HTML page and returns the path; creates the folder of the page if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, page.encode("utf-8", "replace"))
    return path


def whole_page(name: str, sections: Iterable[str], *, style: str = "", script: bool = True) -> str:
    """Renders a whole HTML page, which needs no other file.

    Args:
        name: title of the page.
        sections: HTML of the page's sections.
        style: CSS rules in addition to those of all pages.
        script: whether the page has the script for charts and trajectories.
    """
    # The content security policy allows only this script, in case some text of a trace were not
    # escaped.
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; {allowed}base-uri 'none'; "
        "form-action 'none'"
    )
    code = f"\n<script>{_SCRIPT}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=False)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_STYLE}{style}</style></head>\n<body>"
        f"<main>{''.join(sections)}</main>{code}</body></html>\n"
    )


def table(
    name: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "detail"
) -> str:
    """Renders a table that can scroll sideways in a narrow window.

    Args:
        name: name of the table, which is read aloud by screen readers.
        head: titles of the columns, as text; "" for a column without a title.
        rows: HTML of the cells of each row.
        kind: CSS classes of the table.
    """
    heads = "".join(f"<th>{escape(title)}</th>" if title else "<td></td>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    # With a keyboard one can only scroll an element that can have the focus.
    return (
        f'<div class="card scroll" tabindex="0" role="group" aria-label="{escape(name)}">'
        f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(values: Iterable[tuple[str, Any]], kind: str = "facts") -> str:
    """Returns an HTML description list of pairs (name, value).

    Args:
        values: the pairs; names and values are escaped.
        kind: CSS class of the list.
    """
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>"
        f"{escape(number(value) if as_number(value) is not None else str(value))}</dd></div>"
        for name, value in values
    )
    return f'<dl class="{kind}">{items}</dl>'


def rate_cells(name: str, value: Any, interval: Any) -> tuple[str, str, str]:
    """Renders a rate for a table: the rate, its confidence interval, and a plot of both.

    Args:
        name: name of the rate, which is read aloud by screen readers.
        value: the rate, from 0 to 1; anything else is shown as "not graded".
        interval: lower and upper end of the interval; anything else is not shown.
    """
    ends = [as_number(end) for end in interval] if isinstance(interval, list | tuple) else []
    rate, span, plot = as_number(value), "", ""
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        span = f"{ends[0]:.3f} {NONE} {ends[1]:.3f}"
        plot = "" if rate is None else interval_bar(name, rate, ends[0], ends[1])
    return "not graded" if rate is None else f"<strong>{rate:.3f}</strong>", span, plot


def as_number(value: Any) -> float | None:
    """Converts a number to a float; returns None if the value is not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def fixed(value: Any, digits: int, none: str = "") -> str:
    """Formats a number with a fixed number of decimals.

    Args:
        value: the number.
        digits: number of decimals.
        none: text if ``value`` is not a number.
    """
    figure = as_number(value)
    return none if figure is None else f"{figure:,.{digits}f}"


# --- rows of metrics.jsonl -----------------------------------------------------------------


def step_of(row: Mapping[str, Any]) -> float:
    """Returns the step in a row of ``metrics.jsonl``; 0 if the row has no step."""
    return as_number(row.get("step")) or 0.0


def phase_of(row: Mapping[str, Any]) -> str:
    """Returns the training phase in a row of ``metrics.jsonl``, such as ``rl``, or else ``run``."""
    return str(row.get("phase", "run"))


def phases_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Groups rows of ``metrics.jsonl`` by training phase, in the order in which the phases ran.

    The rows of a phase are sorted by step.
    """
    phases: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        phases.setdefault(phase_of(row), []).append(row)
    return {phase: sorted(mine, key=step_of) for phase, mine in phases.items()}


def phase_title(phase: str) -> str:
    """Returns the title of a training phase for a page, such as ``RL`` for ``rl``."""
    return phase.upper() if phase in ("sft", "rl") else phase


def series_of(metric: str, rows: Iterable[Mapping[str, Any]], name: str = "") -> Series:
    """Returns the line of a chart that shows the values of a metric by step.

    Args:
        metric: name of the metric.
        rows: rows of metrics.jsonl. Rows without the metric are skipped.
        name: name of the line; "" for the name of the metric.
    """
    points = [(step_of(row), as_number(row[metric])) for row in rows if metric in row]
    return Series(name or metric, tuple(x for x, _ in points), tuple(y for _, y in points))


def charts_of(phase: str, charts: Iterable[str]) -> str:
    """Returns the charts of a training phase as HTML, below the title of the phase.

    Args:
        phase: name of the phase.
        charts: HTML of the charts.
    """
    title = escape(phase_title(phase))
    return f'<h3>{title}, by step</h3><div class="charts">{"".join(charts)}</div>'
