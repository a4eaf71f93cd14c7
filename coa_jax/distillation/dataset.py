"""Writes the distilled data set to disk, and computes its statistics.

A work directory holds the journals (``journal/<split>.jsonl``), which are files with the finished
runs of the teacher. It also holds the records made from these runs (``<split>.jsonl``), and a few
runs that each filter dropped (``dropped/<split>.jsonl``). Records and dropped runs depend only on
the journal and are always written as a whole. So a killed and restarted command writes the same
bytes as an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.data.trajectory import DistilledRecord, write_records
from coa_jax.distillation.endpoint import Endpoint
from coa_jax.distillation.filters import FilterReport, TeacherRun
from coa_jax.distillation.journal import open_journal
from coa_jax.distillation.llm import language_model_agents
from coa_jax.distillation.pipeline import DistillConfig, graded_runs, run_teacher, select
from coa_jax.files import jsonl
from coa_jax.tasks.base import Task
from coa_jax.tools.base import Tool


@dataclasses.dataclass(frozen=True)
class DistilledSplit:
    """One split of a finished data set.

    Attributes:
        runs: graded runs of the teacher, in the order of the tasks.
        records: records of the runs that passed the filters, in the order of the tasks.
        report: statistics of the filters.
        resumed: number of ``runs`` that this process read from disk, because an earlier process had
            finished them.
    """

    runs: Sequence[TeacherRun]
    records: Sequence[DistilledRecord]
    report: FilterReport
    resumed: int


def distill_split(
    name: str,
    tasks: Sequence[Task],
    tools: Mapping[str, Tool],
    config: DistillConfig,
    workdir: Path,
    tool_settings: Mapping[str, Any] | None = None,
    on_done: Callable[[int], None] | None = None,
    count_tokens: Callable[[str], int] | None = None,
    endpoint: Endpoint | None = None,
) -> DistilledSplit:
    """Lets the teacher solve the tasks of a split, filters the runs, and writes the records.

    Runs that an earlier, interrupted process finished are read from the journal in ``workdir``.

    Args:
        name: name of the split, and of its files.
        tasks: questions for the teacher, with accepted answers.
        tools: maps the name of each tool to the tool.
        config: settings of the teacher and the filters.
        workdir: work directory to which all files are written.
        tool_settings: settings on which the results of the tools depend, as JSON values.
        on_done: function to call whenever a run ends, with the number of finished runs.
        count_tokens: function that counts the tokens of a text; needed if
            ``config.selection.max_tokens`` is set.
        endpoint: model that decides for the agents; None if scripted rules decide. Its connection
            is closed when all tasks are done.

    Raises:
        UserError: the journal belongs to other settings or is malformed.
    """
    fingerprint = {
        **{key: getattr(config, key) for key in ("mistake_rate", "unrecovered_rate", "seed")},
        "max_messages": config.max_messages,
        "tools": dict(tool_settings or {}),
        **({"teacher": endpoint.config.label} if endpoint else {}),
        **({"team": config.team} if config.team != "scripted" else {}),
    }
    journal = open_journal(workdir / "journal" / f"{name}.jsonl", fingerprint)
    fresh = 0

    def note(done: int) -> None:
        nonlocal fresh
        fresh += 1
        if on_done is not None:
            on_done(done)

    agents = language_model_agents(endpoint) if endpoint else config.agents()
    work = run_teacher(tasks, tools, config, agents, journal, note)
    logs = asyncio.run(endpoint.closing(work) if endpoint else work)
    runs = graded_runs(tasks, logs, config.judges)
    records, report = write_split(name, runs, config, workdir, count_tokens)
    return DistilledSplit(runs, records, report, len(tasks) - fresh)


def write_split(
    name: str,
    runs: Sequence[TeacherRun],
    config: DistillConfig,
    workdir: Path,
    count_tokens: Callable[[str], int] | None = None,
) -> tuple[Sequence[DistilledRecord], FilterReport]:
    """Filters graded runs, and writes the records of a split and a few dropped runs.

    Args:
        name: name of the split, and of its files.
        runs: graded runs of the teacher, in the order of the tasks.
        config: settings of the filters.
        workdir: work directory to which the files are written.
        count_tokens: function that counts the tokens of a text; needed if
            ``config.selection.max_tokens`` is set.

    Returns:
        The kept records in the order of ``runs``, and statistics of the filters.
    """
    examples: list[dict[str, Any]] = []
    records, report = select(runs, config, count_tokens, examples.append, workdir)
    write_records(workdir / f"{name}.jsonl", records)
    jsonl.write_lines(workdir / "dropped" / f"{name}.jsonl", examples)
    return records, report


def policy_chars(record: DistilledRecord) -> int:
    """Returns the number of characters that the policy wrote in a record (no observations)."""
    return sum(len(text) for author, text in record.parts if author == "policy")


def statistics_of(records: Sequence[DistilledRecord]) -> dict[str, Any]:
    """Returns statistics of a data set's records as a JSON object.

    They are the number of records, the shares of records with a reflection and with a corrected
    answer, and the number of deliberate mistakes of each kind. For each number of hops (searches
    per question), they also contain the number of records, the mean number of tool calls, and the
    mean and maximum number of characters, in total and by the policy.
    """
    reflected = corrected = 0
    mistakes = Counter[str]()
    by_hops: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for record in records:
        about = record.metadata
        sizes = policy_chars(record), len(record.text), about["tool_calls"]
        by_hops[str(about.get("hops", "?"))].append(sizes)
        mistakes.update(about["mistakes"])
        reflected += about["reflections"] > 0
        corrected += about["corrected"]
    share = 1 / max(len(records), 1)
    return {
        "records": len(records),
        "with_reflection": share * reflected,
        "with_correction": share * corrected,
        "mistakes": dict(sorted(mistakes.items())),
        "by_hops": {
            hops: {
                "records": len(policy),
                "policy_chars_mean": statistics.fmean(policy),
                "policy_chars_max": max(policy),
                "text_chars_mean": statistics.fmean(text),
                "text_chars_max": max(text),
                "tool_calls_mean": statistics.fmean(calls),
            }
            for hops, group in sorted(by_hops.items())
            for policy, text, calls in [tuple(zip(*group, strict=True))]
        },
    }
