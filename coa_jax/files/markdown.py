"""Formats tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Formats a table in Markdown.

    Args:
        head: titles of the columns.
        rows: cells of each row.

    Returns:
        The lines of the table.
    """
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines]
