"""Writes the card of a data set: a Markdown page with statistics of its records."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coa_jax.config.extensions import find
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol, parse
from coa_jax.storage import with_header
from coa_jax.tasks import SOURCES, source_name
from coa_jax.tasks.base import Licence

_UNKNOWN = Licence("not known; ask the source of the tasks")
_SIZES = {10**3: "n<1K", 10**4: "1K<n<10K", 10**5: "10K<n<100K", 10**6: "100K<n<1M"}


def licence_of(source: str) -> Licence:
    """Returns what a task source, such as ``arithmetic:gcd``, declares about its texts."""
    try:
        load = find(SOURCES, source_name(source)[0], "the source of the tasks")
    except UserError:  # such as a package that is not installed here
        return _UNKNOWN
    return getattr(load, "licence", _UNKNOWN)


def datasets_of(tasks: Iterable[str]) -> list[str]:
    """Returns the names of the data behind task sources, such as ``reasoning-gym``, sorted.

    Args:
        tasks: task sources, such as ``arithmetic:gcd``; sources without a name are left out.
    """
    return sorted({name for text in tasks if (name := licence_of(text).data)})


def tags_of(record: DistilledRecord) -> Counter[str]:
    """Counts how often each tag of the protocol occurs in the policy's text of a record."""
    rules = get_protocol(record.protocol)
    policy_text = "".join(text for author, text in record.parts if author == "policy")
    return Counter(s.role for s in parse(rules, policy_text).segments if s.role is not None)


def card(
    name: str,
    records: Sequence[DistilledRecord],
    funnel: Mapping[str, Any] | None = None,
    configs: Sequence[Mapping[str, Any]] = (),
    tasks: Mapping[str, str] | None = None,
) -> str:
    """Returns the data card, which describes a data set: a YAML header for the Hub, and Markdown.

    The header leaves out licence and language if a source of the tasks does not declare them.

    Args:
        name: name of the data set.
        records: all records of the data set.
        funnel: statistics of the filters, see `FilterReport`; None if unknown.
        configs: the formats in which the data set is stored, such as ``sharegpt``, with their
            files, as the Hub expects them under ``configs``.
        tasks: task source behind each name that ``source`` has in the records, such as
            ``{"sums": "arithmetic:gcd"}`` for a mixture; None if ``source`` is the task source.
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
    used = {
        source: (tasks or {}).get(source, source)
        for source in sorted({text.partition(":")[0] for text in sources})
    }
    licences = {source: licence_of(name) for source, name in used.items()}
    lines += [f"- {source}: {licence.text}" for source, licence in licences.items()]
    identifiers = {licence.identifier for licence in licences.values()}
    languages = {licence.language for licence in licences.values()}
    header = {
        "license": [] if "" in identifiers else sorted(identifiers),
        "language": [] if "" in languages else sorted(languages),
        "source_datasets": [f"extended|other-{name}" for name in datasets_of(used.values())],
        "task_categories": ["question-answering", "text-generation"],
        "size_categories": [next((s for n, s in _SIZES.items() if len(records) < n), "n>1M")],
        "tags": ["agent-traces", "chain-of-agents", "coa_jax"],
        "configs": list(configs),
    }
    return _with_header(header, "\n".join([*lines, ""]))


def joined(cards: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the card of a folder with several data sets, which contains their cards.

    Args:
        cards: the cards of the data sets.
        configs: the formats in which the data sets are stored, and their files, as for `card`.
    """
    from huggingface_hub import DatasetCard

    parsed = [DatasetCard(text) for text in cards]
    header: dict[str, Any] = {}
    for key in (
        "license",
        "language",
        "source_datasets",
        "task_categories",
        "size_categories",
        "tags",
    ):
        values = [each.data.get(key) for each in parsed]
        header[key] = sorted(set(itertools.chain(*values))) if all(values) else []
    text = "\n".join(each.text.lstrip() for each in parsed)
    return _with_header({**header, "configs": list(configs)}, text)


def _with_header(header: Mapping[str, Any], text: str) -> str:
    # The Hub has no identifier for texts in the public domain.
    name = "public-domain" if "other" in header["license"] else ""
    return with_header({**header, "license_name": name}, text)


def _lengths(records: Iterable[DistilledRecord]) -> list[str]:
    rows = {
        "whole": [len(r.text) for r in records],
        "policy": [sum(len(t) for author, t in r.parts if author == "policy") for r in records],
    }
    lines = ["| characters | mean | median | longest |", "| --- | --- | --- | --- |"]
    for label, values in rows.items():
        middle = statistics.median(values)
        lines.append(f"| {label} | {statistics.fmean(values):.0f} | {middle:.0f} | {max(values)} |")
    return [*lines, ""]


def _table(head: str, counts: Mapping[str, int]) -> list[str]:
    rows = [f"| {key} | {count} |" for key, count in sorted(counts.items())]
    return [f"| {head} | count |", "| --- | --- |", *rows, ""]
