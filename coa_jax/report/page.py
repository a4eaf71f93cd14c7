"""Renders what all report pages have in common: the HTML frame, tables and numbers."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.report.assets import SCRIPT, STYLE
from coa_jax.report.charts import Series, number
from coa_jax.report.traces import escape


def whole_page(name: str, sections: Sequence[str], *, style: str = "", script: str = SCRIPT) -> str:
    """Renders a whole HTML page, which needs no other file.

    Args:
        name: title of the page.
        sections: HTML of the page's sections.
        style: CSS rules in addition to those of all pages.
        script: JavaScript of the page; "" for none.
    """
    # The content security policy allows only this script, in case some text of a trace were not
    # escaped.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; {allowed}base-uri 'none'; "
        "form-action 'none'"
    )
    code = f"\n<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=False)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}{style}</style></head>\n<body>"
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


def as_number(value: Any) -> float | None:
    """Converts a number to a float; returns None if the value is not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def fixed(value: Any, digits: int) -> str:
    """Formats a number with a fixed number of decimals; "" if the value is not a number."""
    figure = as_number(value)
    return "" if figure is None else f"{figure:,.{digits}f}"


def facts(values: Mapping[str, Any]) -> str:
    """Renders names with their values as an HTML description list."""
    items = "".join(
        f"<div><dt>{escape(str(key))}</dt><dd>"
        f"{escape(number(value) if as_number(value) is not None else str(value))}</dd></div>"
        for key, value in values.items()
    )
    return f'<dl class="facts">{items}</dl>'


def step_of(row: Mapping[str, Any]) -> float:
    """Returns the step of a row of metrics.jsonl; 0 if the row has no step."""
    return as_number(row.get("step")) or 0.0


def phase_title(phase: str) -> str:
    """Returns the title of a training phase."""
    return phase.upper() if phase in ("sft", "rl") else phase


def series_of(name: str, rows: Sequence[Mapping[str, Any]]) -> Series:
    """Returns the values of a metric by step, from those rows that contain the metric."""
    points = [(step_of(row), as_number(row[name])) for row in rows if name in row]
    return Series(name, tuple(x for x, _ in points), tuple(y for _, y in points))
