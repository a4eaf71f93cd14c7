"""A data set from the traces of another system: read, convert, filter, write."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from coa_jax import jsonl
from coa_jax.bounds import Bounded, OneOf, Place
from coa_jax.distill.arrange import Completion, Unconvertible, trajectory_of
from coa_jax.distill.messages import MessageLog
from coa_jax.distill.pipeline import DistillConfig, graded_runs, select
from coa_jax.distill.readers import READERS, read_traces
from coa_jax.distill.readers.base import unused
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol, protocol_names
from coa_jax.tasks.base import Task
from coa_jax.trajectory import DistilledRecord, write_records


@dataclasses.dataclass(frozen=True)
class TracesConfig(Bounded):
    """Which files, and what is made of them.

    Attributes:
        files: paths.
        format: of the files, see `coa_jax.distill.readers.READERS`.
        protocol: of the trajectories.
        completion: what may be written out that a run did without words.
    """

    files: tuple[Place, ...]
    format: Annotated[str, OneOf(*READERS)]
    protocol: Annotated[str, OneOf(protocol_names)]
    completion: Completion = dataclasses.field(default_factory=Completion)


@dataclasses.dataclass(frozen=True)
class Converted:
    """The traces of some files under one protocol.

    Attributes:
        tasks, logs: a task and the arranged messages of each trace that has a trajectory.
        usage: id of a task -> tokens that its run cost, where the file says so.
        reading: for each file what became of its records.
        refused: reason -> traces that have no trajectory for it.
    """

    tasks: list[Task]
    logs: list[MessageLog]
    usage: dict[str, int]
    reading: list[dict[str, Any]]
    refused: dict[str, int]


def convert_files(
    config: TracesConfig,
    on_refusal: Callable[[dict[str, Any]], None] | None = None,
    tasks: Mapping[str, Task] | None = None,
) -> Converted:
    """Reads and converts every trace of the files.

    Args:
        config: which files, and how.
        on_refusal: called with ``{path, line, reason}`` of every record that could not be read or
            converted.
        tasks: those that were asked, by their ids: what is known of them is kept, and runs of
            others are left out.  None if only the files say what was asked.

    Raises:
        UserError: a file cannot be read, or format or protocol are unknown.
    """
    get_protocol(config.protocol)
    if not any(config.files):
        raise UserError("give the files to read in config.traces.files")
    tell = on_refusal or (lambda refusal: None)
    refused: collections.Counter[str] = collections.Counter()
    made = Converted([], [], {}, [], {})
    names: set[str] = set()
    for path in filter(None, config.files):
        traces, report = read_traces(path, config.format)
        counts = {k: getattr(report, k) for k in ("path", "records", "used", "ignored", "traces")}
        made.reading.append({**counts, "problems": len(report.problems)})
        for problem in report.problems:
            tell(dataclasses.asdict(problem))
        for trace in traces:
            name, known = trace.log.episode, None
            if tasks is not None:
                # A task whose question was mended has two runs: the name of one is not its id.
                name, known = trace.task, tasks.get(trace.task)
                if known is None or known.question != trace.log.question:
                    refused[_OTHER] += 1
                    tell({"path": path, "line": trace.line, "reason": _OTHER})
                    continue
            # There may be another run of the same task, also in a file of the same name.
            name = unused(name, f"{Path(path).name}:{trace.line}:{name}", names)
            names.add(name)
            try:
                log, _ = trajectory_of(trace, config.protocol, config.completion)
            except Unconvertible as why:
                refused[_reason(str(why))] += 1
                tell({"path": path, "line": trace.line, "reason": str(why)})
                continue
            log = dataclasses.replace(log, episode=name)
            about = {"trace": {**trace.metadata, "file": Path(path).name, "line": trace.line}}
            task = Task(name, log.question, config.protocol, trace.gold, config.format)
            if known is not None:
                task = dataclasses.replace(known, id=name, protocol=config.protocol)
                about = {**known.metadata, **about}
            made.tasks.append(dataclasses.replace(task, metadata=about))
            made.logs.append(log)
            if trace.usage:
                made.usage[name] = sum(trace.usage.values())
    return dataclasses.replace(made, refused=dict(refused.most_common()))


_OTHER = "a run of another task than those that were asked"


def _reason(text: str) -> str:
    """A reason without what is special about one run."""
    return re.sub(r"'[^']*'|\d+", "*", text.partition("; ")[0])[:100]


def distill_traces(
    config: TracesConfig,
    filters: DistillConfig,
    workdir: Path,
    count_tokens: Callable[[str], int] | None = None,
    name: str = "train",
    tasks: Mapping[str, Task] | None = None,
) -> tuple[list[DistilledRecord], dict[str, Any]]:
    """Writes ``NAME.jsonl``, ``dropped/NAME.jsonl`` and ``refused/NAME.jsonl``.

    Args:
        config: which files, and how they are converted.
        filters: thresholds; what is said there about scripted minds is not used.
        workdir: where the files are written.
        count_tokens: length of a text in tokens; needed for ``selection.max_tokens``.
        name: of the set, and of its files.
        tasks: see `convert_files`.

    Returns:
        The records, and what happened to all others.
    """
    refusals: list[dict[str, Any]] = []
    made = convert_files(config, refusals.append, tasks)
    examples: list[dict[str, Any]] = []
    runs = graded_runs(made.tasks, made.logs, filters.judges)
    records, report = select(runs, filters, count_tokens, examples.append)
    write_records(workdir / f"{name}.jsonl", records)
    jsonl.write_lines(workdir / "dropped" / f"{name}.jsonl", examples)
    jsonl.write_lines(workdir / "refused" / f"{name}.jsonl", refusals)
    summary = {"reading": made.reading, "refused": made.refused, "filters": report.to_json()}
    return records, {**summary, "teacher_tokens": sum(made.usage.values()) or None}
