"""Writes the card of a data set: a Markdown page with statistics of its records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coa_jax.protocol import get_protocol, parse
from coa_jax.trajectory import DistilledRecord

LICENCES = {
    "factbook": "The World Factbook (CIA): public domain",
    "arithmetic": "reasoning-gym: Apache-2.0",
}
"""Maps the name of a task source to the licence of its texts."""


def tags_of(record: DistilledRecord) -> Counter[str]:
    """Counts how often each tag of the protocol occurs in the policy's text of a record."""
    rules = get_protocol(record.protocol)
    said = "".join(text for author, text in record.parts if author == "policy")
    return Counter(s.role for s in parse(rules, said).segments if s.role is not None)


def card(
    name: str, records: Sequence[DistilledRecord], funnel: Mapping[str, Any] | None = None
) -> str:
    """Returns the data card, which describes a data set, as Markdown.

    Args:
        name: name of the data set.
        records: all records of the data set.
        funnel: statistics of the filters, see `FilterReport`; None if unknown.
    """
    tags: Counter[str] = sum(map(tags_of, records), Counter())
    tools = {t for r in records for t in get_protocol(r.protocol).tools}
    sources = Counter(str(r.metadata.get("source", "unknown")) for r in records)
    lines = [f"# {name}", "", f"{len(records)} chain-of-agents trajectories.", ""]
    lines += _table("source", sources)
    lines += _table("protocol", Counter(r.protocol for r in records))
    lines += _table("hops", Counter(str(r.metadata.get("hops", "?")) for r in records))
    lines += _table("tag", tags)
    lines += _table("tool", {tool: tags[tool] for tool in sorted(tools)})
    if records:
        lines += _lengths(records)
    if funnel:
        lines += [f"Runs before the filters: {funnel['total']}, kept: {funnel['kept']}.", ""]
        lines += _table("dropped by", funnel["dropped"])
    lines += ["## Licences", ""]
    for source in sorted({text.partition(":")[0] for text in sources}):
        lines.append(
            f"- {source}: {LICENCES.get(source, 'not known; ask the source of the tasks')}"
        )
    return "\n".join([*lines, ""])


def _lengths(records: Iterable[DistilledRecord]) -> list[str]:
    rows = {
        "whole": [len(r.text) for r in records],
        "policy": [sum(len(t) for author, t in r.parts if author == "policy") for r in records],
    }
    lines = ["| characters | mean | median | longest |", "| --- | --- | --- | --- |"]
    for what, values in rows.items():
        middle = statistics.median(values)
        lines.append(f"| {what} | {statistics.fmean(values):.0f} | {middle:.0f} | {max(values)} |")
    return [*lines, ""]


def _table(head: str, counts: Mapping[str, int]) -> list[str]:
    rows = [f"| {key} | {count} |" for key, count in sorted(counts.items())]
    return [f"| {head} | count |", "| --- | --- |", *rows, ""]
