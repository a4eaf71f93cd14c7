"""What every page has in common: the frame, and how values of runs become text and lines."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.report.assets import SCRIPT, STYLE
from coa_jax.report.charts import Series, number
from coa_jax.report.traces import escape


def whole_page(name: str, sections: Sequence[str]) -> str:
    """A whole page: one file without outside parts."""
    # Only this very script may run, wherever in the page markup might slip through.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=False)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head>\n<body>"
        f"{''.join(sections)}\n<script>{SCRIPT}</script></body></html>\n"
    )


def as_number(value: Any) -> float | None:
    """A value as a number; None if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def fixed(value: Any, digits: int) -> str:
    """A figure of a column, which all have the same digits; nothing if there is none."""
    figure = as_number(value)
    return "" if figure is None else f"{figure:,.{digits}f}"


def facts(values: Mapping[str, Any]) -> str:
    """Names and values as a list."""
    items = "".join(
        f"<div><dt>{escape(str(key))}</dt><dd>"
        f"{escape(number(value) if as_number(value) is not None else str(value))}</dd></div>"
        for key, value in values.items()
    )
    return f'<dl class="facts">{items}</dl>'


def step_of(row: Mapping[str, Any]) -> float:
    """The step of a row of metrics.jsonl."""
    return as_number(row.get("step")) or 0.0


def phase_title(phase: str) -> str:
    """A phase of training as a page names it."""
    return phase.upper() if phase in ("sft", "rl") else phase


def series_of(name: str, rows: Sequence[Mapping[str, Any]]) -> Series:
    """A metric over the steps of the rows that have it."""
    points = [(step_of(row), as_number(row[name])) for row in rows if name in row]
    return Series(name, tuple(x for x, _ in points), tuple(y for _, y in points))
