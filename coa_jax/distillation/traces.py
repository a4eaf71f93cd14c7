"""Creates a data set from logs of another system, or from published records."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from absl import logging

from coa_jax.config.extensions import Named
from coa_jax.config.fields import Bounded, Place
from coa_jax.data.records import Counts, LeftOut, ProtocolName, iterate_records
from coa_jax.data.rows import find_files
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.distillation.arrange import Completion, Unconvertible, trajectory_of
from coa_jax.distillation.convert import invented_segments
from coa_jax.distillation.dataset import write_split
from coa_jax.distillation.messages import MessageLog
from coa_jax.distillation.pipeline import DistillConfig, graded_runs
from coa_jax.distillation.readers import READERS, read_traces
from coa_jax.distillation.readers.base import unused
from coa_jax.distillation.recorded import log_of, with_figures
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.protocol import get_protocol, split_level
from coa_jax.tasks.base import Task

RECORDS = "records"


@dataclasses.dataclass(frozen=True)
class TraceFilesConfig(Bounded):
    """Settings that say which log files to read, and how to convert them.

    Attributes:
        files: paths of the files. For the format ``records``, folders and glob patterns are
            allowed, too.
        format: name of a log format, see `distillation.readers.READERS`; or ``records`` if the
            files contain trajectories in any format that `data.records` reads. Such trajectories
            are filtered, but not converted.
        protocol: protocol of the trajectories. "" is allowed only with the format ``records``,
            because records name their protocol or show it by their tags.
        completion: settings that say which tags may be added to a run that lacks them.
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
        records: trajectory of each run if the files contain trajectories; empty if they contain
            logs.
        tokens: number of tokens of each run for which the files state this number.
        reading: statistics of the records of each file.
        refusals: file, line and reason of each record that could not be read or converted.
        refused: maps each reason to the number of runs that could not be converted for this reason.
    """

    tasks: list[Task] = dataclasses.field(default_factory=list)
    logs: list[MessageLog] = dataclasses.field(default_factory=list)
    records: list[DistilledRecord] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    reading: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refusals: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)

    def refuse(self, path: str, line: int, reason: str) -> None:
        """Records that a run could not be read or converted.

        Args:
            path: file of the run.
            line: line number of its record.
            reason: why the run cannot be used.
        """
        self.refusals.append({"path": path, "line": line, "reason": reason})
        # Parts that are specific to one run are removed, to count equal reasons.
        self.refused[re.sub(r"'[^']*'|\d+", "*", reason.partition("; ")[0])[:100]] += 1


def convert_files(config: TraceFilesConfig, tasks: Mapping[str, Task] | None = None) -> Converted:
    """Reads files of logs, and converts every run that can be converted.

    Args:
        config: the files, and how to convert them.
        tasks: maps ids to known tasks. A run gets the task whose id its log states; runs of other
            tasks are left out. If ``tasks`` is None, the tasks are taken from the files.

    Raises:
        UserError: a file cannot be read, or the format or the protocol is unknown.
    """
    if not any(config.files):
        raise UserError("give the files to read in config.traces.files")
    if config.format == RECORDS:
        return _read_records(config)
    get_protocol(config.protocol)
    made, names = Converted(), set[str]()
    for path in filter(None, config.files):
        traces, report = read_traces(path, config.format, config.options)
        made.reading.append({**report, "problems": len(report["problems"])})
        made.refusals.extend(report["problems"])
        for trace in traces:
            name, source_task = trace.log.episode, None
            if tasks is not None:
                # If the question of a task was corrected, there are two runs, and the name of one
                # differs from the id of the task.
                name, source_task = trace.task, tasks.get(trace.task)
                if source_task is None or source_task.question != trace.log.question:
                    why = "a run of another task than those that were asked"
                    made.refuse(path, trace.line, why)
                    continue
            # Another file may contain a run with the same name.
            name = unused(name, f"{Path(path).name}:{trace.line}:{name}", names)
            names.add(name)
            if source_task is not None:
                trace = dataclasses.replace(trace, gold=source_task.gold)
            try:
                log, _ = trajectory_of(trace, config.protocol, config.completion)
            except Unconvertible as error:
                made.refuse(path, trace.line, str(error))
                continue
            about = {"trace": {**trace.metadata, "file": Path(path).name, "line": trace.line}}
            task = Task(name, log.question, config.protocol, trace.gold, config.format)
            if source_task is None:
                about |= _grader(config.protocol, trace.gold)
            else:
                task = dataclasses.replace(source_task, id=name, protocol=config.protocol)
                about = {**source_task.metadata, **about}
            made.tasks.append(dataclasses.replace(task, metadata=about))
            made.logs.append(dataclasses.replace(log, episode=name))
            if trace.usage:
                made.tokens.append(sum(trace.usage.values()))
    return made


def _grader(protocol: str, gold: Sequence[str]) -> dict[str, Any]:
    """Returns the metadata that names the grader of a task; {} for the default grader."""
    if split_level(protocol)[0] != "code":
        return {}
    # The answers of the protocol ``code`` are programs, which tests grade, or boxed values.
    return {"grader": "code" if any(one.lstrip().startswith("{") for one in gold) else "math"}


def _read_records(config: TraceFilesConfig) -> Converted:
    """Reads trajectories like `convert_files`; changes nothing but ids that are not unique."""
    made, names, counts = Converted(), set[str](), Counts()
    for path in (path for source in filter(None, config.files) for path in find_files(source)):
        used = rows = 0
        for row in iterate_records(path, config.protocol):
            counts.add(row)
            rows, line = rows + 1, row.row.number
            if isinstance(row, LeftOut):
                made.refuse(str(path), line, row.reason)
                continue
            name = unused(row.record.id, f"{path.name}:{line}:{row.record.id}", names)
            names.add(name)
            record = dataclasses.replace(row.record, id=name)
            log = log_of(record)
            about = {"trace": {"file": path.name, "line": line}}
            about |= _grader(record.protocol, record.gold)
            task = Task(name, record.question, record.protocol, record.gold, RECORDS, about)
            made.tasks.append(task)
            made.logs.append(log)
            made.records.append(with_figures(record, log))
            used += 1
        read = {"records": rows, "used": used, "ignored": 0, "traces": used}
        made.reading.append({"path": str(path), **read, "problems": rows - used})
    for message in counts.lines()[: len(counts.told)]:  # skipped rows are counted in `refused`
        logging.warning("%s", message)
    return made


def distill_traces(
    config: TraceFilesConfig,
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
        count_tokens: function that counts the tokens of a text; needed if
            ``filters.selection.max_tokens`` is set.
        name: name of the data set and of its files.
        tasks: known tasks by id, see `convert_files`.

    Returns:
        The records of the data set, and statistics of reading, conversion and filters.
    """
    made = convert_files(config, tasks)
    runs = graded_runs(made.tasks, made.logs, filters.judges, made.records)
    records, report = write_split(name, runs, filters, workdir, count_tokens)
    invented = [invented_segments(record) for record in records]
    jsonl.write_lines(workdir / "refused" / f"{name}.jsonl", made.refusals)
    return records, {
        "reading": made.reading,
        "refused": dict(made.refused.most_common()),
        "filters": dataclasses.asdict(report),
        "teacher_tokens": sum(made.tokens) or None,
        "invented": {
            "records": sum(bool(numbers) for numbers in invented),
            "segments": sum(map(len, invented)),
        },
    }
