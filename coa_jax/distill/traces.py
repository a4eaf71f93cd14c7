"""Creates a data set from logs of another system, or from published records."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from absl import logging

from coa_jax import jsonl
from coa_jax.bounds import Bounded, Place
from coa_jax.distill.arrange import Completion, Unconvertible, trajectory_of
from coa_jax.distill.messages import MessageLog
from coa_jax.distill.pipeline import DistillConfig, graded_runs, select
from coa_jax.distill.readers import READERS, read_traces
from coa_jax.distill.readers.base import unused
from coa_jax.distill.recorded import log_of, with_figures
from coa_jax.errors import UserError
from coa_jax.extensions import Named
from coa_jax.protocol import get_protocol, split_level
from coa_jax.records import Counts, LeftOut, ProtocolName, iterate_records
from coa_jax.records.rows import find_files
from coa_jax.tasks.base import Task
from coa_jax.trajectory import DistilledRecord, write_records

RECORDS = "records"


@dataclasses.dataclass(frozen=True)
class TracesConfig(Bounded):
    """Settings that say which log files to read, and how to convert them.

    Attributes:
        files: paths of the files. For the format ``records``, folders and glob patterns are
            allowed, too.
        format: name of a log format, see `coa_jax.distill.readers.READERS`; or ``records`` if the
            files contain trajectories in any format that `coa_jax.records` reads. Trajectories are
            filtered, but not converted.
        protocol: protocol of the trajectories. "" is allowed only with the format ``records``,
            because records name their protocol or show it by their tags.
        completion: says which tags may be added if a run took a step but wrote no tag for the step.
        options: options of a custom reader.
    """

    files: tuple[Place, ...]
    format: Annotated[str, Named(READERS, RECORDS)]
    protocol: ProtocolName
    completion: Completion = dataclasses.field(default_factory=Completion)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.protocol and self.format != RECORDS:
            raise UserError(f"protocol is empty; the format {self.format} needs one")


@dataclasses.dataclass(frozen=True)
class Converted:
    """The runs that were read from files and converted.

    Attributes:
        tasks, logs: the task and the reordered messages of each run that could be converted.
        usage: maps the id of a task to the numbers of tokens of its run, if the file states these
            numbers.
        reading: statistics of the records of each file.
        refused: maps each reason to the number of runs that could not be converted for this reason.
        records: trajectory of each run if the files contain trajectories; None if they contain
            logs.
    """

    tasks: list[Task]
    logs: list[MessageLog]
    usage: dict[str, int]
    reading: list[dict[str, Any]]
    refused: dict[str, int]
    records: list[DistilledRecord] | None = None


def convert_files(
    config: TracesConfig,
    on_refusal: Callable[[dict[str, Any]], None] | None = None,
    tasks: Mapping[str, Task] | None = None,
) -> Converted:
    """Reads files of logs, and converts every run that can be converted.

    Args:
        config: the files, and how to convert them.
        on_refusal: function to call with ``{path, line, reason}`` for every record that could not
            be read or converted; None if these records should be ignored.
        tasks: maps ids to known tasks. A run gets the task with its id, and runs of other tasks are
            left out. If ``tasks`` is None, the tasks are taken from the files.

    Raises:
        UserError: a file cannot be read, or the format or the protocol is unknown.
    """
    if not any(config.files):
        raise UserError("give the files to read in config.traces.files")
    if config.format == RECORDS:
        return _read_records(config, on_refusal or (lambda refusal: None))
    get_protocol(config.protocol)
    tell = on_refusal or (lambda refusal: None)
    refused: collections.Counter[str] = collections.Counter()
    made = Converted([], [], {}, [], {})
    names: set[str] = set()
    for path in filter(None, config.files):
        traces, report = read_traces(path, config.format, config.options)
        counts = {k: getattr(report, k) for k in ("path", "records", "used", "ignored", "traces")}
        made.reading.append({**counts, "problems": len(report.problems)})
        for problem in report.problems:
            tell(dataclasses.asdict(problem))
        for trace in traces:
            name, known = trace.log.episode, None
            if tasks is not None:
                # If the question of a task was corrected, there are two runs, and the name of one
                # differs from the id of the task.
                name, known = trace.task, tasks.get(trace.task)
                if known is None or known.question != trace.log.question:
                    refused[_OTHER] += 1
                    tell({"path": path, "line": trace.line, "reason": _OTHER})
                    continue
            # Another file may contain a run with the same name.
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


def _read_records(config: TracesConfig, tell: Callable[[dict[str, Any]], None]) -> Converted:
    """Reads trajectories like `convert_files`; changes nothing but ids that are not unique."""
    made = Converted([], [], {}, [], {}, [])
    assert made.records is not None
    refused: collections.Counter[str] = collections.Counter()
    names: set[str] = set()
    counts = Counts()
    for path in (path for source in filter(None, config.files) for path in find_files(source)):
        used = rows = 0
        for found in iterate_records(path, config.protocol):
            counts.add(found)
            rows += 1
            if isinstance(found, LeftOut):
                refused[_reason(found.reason)] += 1
                tell({"path": str(path), "line": found.number, "reason": found.reason})
                continue
            record, line = found.record, found.row.number
            name = unused(record.id, f"{path.name}:{line}:{record.id}", names)
            names.add(name)
            record = dataclasses.replace(record, id=name)
            log = log_of(record)
            about: dict[str, Any] = {"trace": {"file": path.name, "line": line}}
            if split_level(record.protocol)[0] == "code":  # answers are programs or boxed values
                tests = any(answer.lstrip().startswith("{") for answer in record.gold)
                about["grader"] = "code" if tests else "math"
            task = Task(name, record.question, record.protocol, record.gold, RECORDS, about)
            made.tasks.append(task)
            made.logs.append(log)
            made.records.append(with_figures(record, log))
            used += 1
        read = {"records": rows, "used": used, "ignored": 0, "traces": used}
        made.reading.append({"path": str(path), **read, "problems": rows - used})
    for told in counts.lines()[: len(counts.told)]:  # skipped rows are counted in `refused`
        logging.warning("%s", told)
    return dataclasses.replace(made, refused=dict(refused.most_common()))


_OTHER = "a run of another task than those that were asked"


def _reason(text: str) -> str:
    """Removes the parts of a reason that are specific to one run, to count equal reasons."""
    return re.sub(r"'[^']*'|\d+", "*", text.partition("; ")[0])[:100]


def distill_traces(
    config: TracesConfig,
    filters: DistillConfig,
    workdir: Path,
    count_tokens: Callable[[str], int] | None = None,
    name: str = "train",
    tasks: Mapping[str, Task] | None = None,
) -> tuple[list[DistilledRecord], dict[str, Any]]:
    """Creates a data set from logs of another system.

    The function writes ``NAME.jsonl`` (the data set), ``dropped/NAME.jsonl`` (runs that filters
    dropped) and ``refused/NAME.jsonl`` (records that could not be read or converted).

    Args:
        config: the files, and how to convert them.
        filters: settings of the filters; settings of scripted minds are not used.
        workdir: directory to which the files are written.
        count_tokens: function that counts the tokens of a text; needed for
            ``selection.max_tokens``.
        name: name of the data set and of its files.
        tasks: known tasks by id, see `convert_files`.

    Returns:
        The records of the data set, and statistics of reading, conversion and filters.
    """
    refusals: list[dict[str, Any]] = []
    made = convert_files(config, refusals.append, tasks)
    examples: list[dict[str, Any]] = []
    runs = graded_runs(made.tasks, made.logs, filters.judges, made.records)
    records, report = select(runs, filters, count_tokens, examples.append)
    write_records(workdir / f"{name}.jsonl", records)
    jsonl.write_lines(workdir / "dropped" / f"{name}.jsonl", examples)
    jsonl.write_lines(workdir / "refused" / f"{name}.jsonl", refusals)
    summary = {"reading": made.reading, "refused": made.refused, "filters": report.to_json()}
    return records, {**summary, "teacher_tokens": sum(made.usage.values()) or None}
