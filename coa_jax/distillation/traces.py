"""Creates a data set from logs of another system, or from published records."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any

from absl import logging

from coa_jax.config.extensions import Named
from coa_jax.config.fields import Bounded, Place, Text
from coa_jax.data.records import Counts, ProtocolName, SkippedRow, iterate_records
from coa_jax.data.rows import find_files
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.distillation.convert import invented_segments
from coa_jax.distillation.dataset import write_split
from coa_jax.distillation.message_order import SEARCHES, Completion, Unconvertible, trajectory_of
from coa_jax.distillation.messages import MessageLog
from coa_jax.distillation.pipeline import DistillConfig, graded_runs
from coa_jax.distillation.readers import READERS, Trace, TraceFile
from coa_jax.distillation.readers.base import unused
from coa_jax.distillation.readers.tool_calls import REQUEST
from coa_jax.distillation.recorded import log_of, with_figures
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.files.spool import Spool, held
from coa_jax.protocol import (
    TOOL_FORMS,
    add_protocol,
    get_protocol,
    protocol_with_tools,
    split_level,
)
from coa_jax.protocol.arguments import arguments_hint
from coa_jax.tasks.base import Task

RECORDS = "records"
_TAG = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ROLES = frozenset({*get_protocol("web").roles} - {*TOOL_FORMS})


ToolPair = Annotated[str, Text(200, r"[^\x00-\x1f\x7f]*")]
"""A pair ``name=tag`` of a tool in a log and a tag of this project."""


@dataclasses.dataclass(frozen=True)
class TraceFilesConfig(Bounded):
    """Settings that say which log files to read, and how to convert them.

    Attributes:
        files: paths of the files, or folders of files. For the format ``records``, glob patterns
            are allowed, too.
        format: name of a log format, see `distillation.readers.READERS`; "" to guess the format of
            each file from its beginning. With ``records``, the files contain trajectories in any
            format that `data.records` reads, which are filtered but not converted.
        protocol: protocol of the trajectories. With "", logs get a protocol that has the tools that
            they call and requires nothing else (see `protocol.protocol_with_tools`). Records keep
            the protocol that they name, or that fits their tags.
        tools: pairs ``name=tag``, which map names of tools in the logs to tags of this project, to
            new tags, or to ``request`` if the tool asks another agent.
        completion: settings that say which tags may be added to a run that lacks them.
        options: options of a custom reader.
    """

    files: tuple[Place, ...]
    format: Annotated[str, Named(READERS, "", RECORDS)] = ""
    protocol: ProtocolName = ""
    completion: Completion = dataclasses.field(default_factory=Completion)
    tools: tuple[ToolPair, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for pair in self.tools:
            name, _, tag = (part.strip() for part in pair.rpartition("="))
            if not name or not _TAG.fullmatch(tag) or tag in _ROLES:
                raise UserError(
                    f"tools has {pair!r}; give NAME=TAG, where TAG is one of "
                    f"{', '.join(TOOL_FORMS)}, {REQUEST}, or a name of your own in small letters"
                )

    def tags(self) -> dict[str, str]:
        """Returns ``tools`` as a mapping from names of tools to tags."""
        pairs = (pair.rpartition("=") for pair in self.tools)
        return {name.strip(): tag.strip() for name, _, tag in pairs}


@dataclasses.dataclass(frozen=True)
class Converted:
    """The runs that were read from files and converted.

    Attributes:
        tasks: task of each run that could be converted.
        logs: messages of each of these runs, reordered if the protocol requires it.
        records: trajectory of each run if the files contain trajectories; empty if they contain
            logs.
        tokens: number of tokens of each run for which the files state this number.
        reading: statistics of the records of each file.
        refusals: file, line and reason of each record that could not be read or converted.
        refused: maps each reason, without details such as numbers, to the number of these records.
        examples: maps each reason to the file, the line and the full reason of its first record.
        unknown: maps the name of each tool without a tag in the protocol to its number of calls.
    """

    tasks: list[Task] = dataclasses.field(default_factory=list)
    logs: list[MessageLog] | Spool[MessageLog] = dataclasses.field(default_factory=list)
    records: list[DistilledRecord] | Spool[DistilledRecord] = dataclasses.field(
        default_factory=list
    )
    tokens: list[int] = dataclasses.field(default_factory=list)
    reading: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refusals: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: Counter[str] = dataclasses.field(default_factory=Counter)

    def refuse(self, path: str, line: int, reason: str) -> None:
        """Counts a record of a file as refused, because it could not be read or converted.

        Args:
            path: path of the file.
            line: line number of the record.
            reason: why the record cannot be used.
        """
        self.refusals.append({"path": path, "line": line, "reason": reason})
        # Parts that are specific to one run are removed, to count equal reasons.
        general = re.sub(r"'[^']*'|\d+", "*", reason.partition("; ")[0])[:100]
        self.refused[general] += 1
        self.examples.setdefault(general, f"{path}:{line}: {reason}")

    def add(self, task: Task, log: MessageLog, usage: Mapping[str, int]) -> None:
        """Adds a converted run, with the numbers of tokens that its log states."""
        self.tasks.append(task)
        self.logs.append(log)
        if usage:
            self.tokens.append(sum(usage.values()))


def convert_files(
    config: TraceFilesConfig,
    tasks: Mapping[str, Task] | None = None,
    folder: Path | None = None,
) -> Converted:
    """Reads files of logs, and converts every run that can be converted.

    Args:
        config: the files, and how to convert them.
        tasks: maps ids to known tasks. A run gets the task whose id its log states; runs of other
            tasks are left out. If ``tasks`` is None, the tasks are taken from the files.
        folder: folder of temporary files that hold logs and records; None to hold them in memory.

    Raises:
        UserError: a file cannot be read, or the format or the protocol is unknown.
    """
    if not any(config.files):
        raise UserError("give the files to read in config.traces.files")
    if config.format == RECORDS:
        return _read_records(config, folder)
    made, names, tools = _nothing(folder), set[str](), config.tags()
    if config.protocol:
        tags = {*get_protocol(config.protocol).tools}
        tags |= {*SEARCHES} if tags & {*SEARCHES} else set()
    else:
        tags = {*TOOL_FORMS, *tools.values()}
    runs, called = held(list[tuple[str, str, Trace, list[str]]](), folder), set[str]()
    offered = dict[str, Mapping[str, Any]]()
    for path in _paths(config.files):
        file = TraceFile(path, config.format, config.options, tools)
        for trace in file:
            missing = [tool for tool, _ in trace.log.calls if tool not in tags]
            called.update(() if missing else (tool for tool, _ in trace.log.calls))
            for tool, function in trace.offered.items():
                offered.setdefault(tools.get(tool, tool), function)
            trace = dataclasses.replace(trace, offered={})
            runs.append((path, file.report["format"], trace, missing))
        for problem in file.report["problems"]:
            made.refuse(**problem)
        made.reading.append({**file.report, "problems": len(file.report["problems"])})
    protocol = config.protocol or _free_protocol(called, offered)
    for path, form, trace, missing in runs:
        made.unknown.update(missing)
        name, task = trace.log.episode, None
        if tasks is not None:
            # If the question of a task was corrected, there are two runs, and the name of one
            # differs from the id of the task.
            name, task = trace.task, tasks.get(trace.task)
            if task is None or task.question != trace.log.question:
                why = "a run of another task than those that were asked"
                made.refuse(path, trace.line, why)
                continue
        # Another file may contain a run with the same name.
        name = unused(name, f"{Path(path).name}:{trace.line}:{name}", names)
        trace = dataclasses.replace(trace, gold=task.gold) if task else trace
        try:
            if missing:
                has_no_tag = f"for which the protocol {protocol} has no tag (traces.tools)"
                raise Unconvertible(f"calls {missing[0]}, {has_no_tag}")
            log, _ = trajectory_of(trace, protocol, config.completion)
        except Unconvertible as error:
            made.refuse(path, trace.line, str(error))
            continue
        log = dataclasses.replace(log, episode=name)
        made.add(_task_of(trace, path, form, name, protocol, task), log, trace.usage)
    return made


def _paths(sources: Iterable[str]) -> Iterator[str]:
    """Yields the paths of files; a folder stands for its files."""
    for source in filter(None, sources):
        yield from map(str, find_files(source)) if Path(source).is_dir() else (source,)


def _task_of(
    trace: Trace, path: str, form: str, name: str, protocol: str, task: Task | None
) -> Task:
    """Returns the task of a run under a new name; `task` is the task of the run if it is known."""
    about = {"trace": {**trace.metadata, "file": Path(path).name, "line": trace.line}}
    if task is not None:
        about = {**task.metadata, **about}
        return dataclasses.replace(task, id=name, protocol=protocol, metadata=about)
    about |= _grader(protocol, trace.gold)
    return Task(name, trace.log.question, protocol, trace.gold, form, about)


def _free_protocol(called: Set[str], offered: Mapping[str, Mapping[str, Any]]) -> str:
    """Registers the protocol with the tools that traces call, as they describe them.

    Returns:
        The name of the protocol.
    """
    tools = (*(t for t in TOOL_FORMS if t in called), *sorted(called - {*TOOL_FORMS}))
    described, schemas = dict[str, str](), dict[str, Mapping[str, object]]()
    for tool in tools:
        if tool in offered and tool not in TOOL_FORMS:
            schemas[tool] = offered[tool]["parameters"]
            described[tool] = f"{offered[tool]['description']} {arguments_hint(schemas[tool])}"
        elif tool not in TOOL_FORMS:
            described[tool] = "A tool of the system. The body is a JSON object with its arguments."
    name = "_".join(("free", *tools))[:100]
    add_protocol(protocol_with_tools(name, tools, described, schemas, free=True))
    return name


def _grader(protocol: str, gold: Sequence[str]) -> dict[str, Any]:
    """Returns the metadata that names the grader of a task; {} for the default grader."""
    if split_level(protocol)[0] != "code":
        return {}
    # The answers of the protocol ``code`` are programs, which tests grade, or boxed values.
    return {"grader": "code" if any(one.lstrip().startswith("{") for one in gold) else "math"}


def _nothing(folder: Path | None) -> Converted:
    return Converted(logs=held((), folder), records=held((), folder))


def _read_records(config: TraceFilesConfig, folder: Path | None) -> Converted:
    """Reads trajectories like `convert_files`; changes nothing but ids that are not unique."""
    made, names, counts = _nothing(folder), set[str](), Counts()
    for path in (path for source in filter(None, config.files) for path in find_files(source)):
        used = rows = 0
        for row in iterate_records(path, config.protocol):
            counts.add(row)
            rows, line = rows + 1, row.row.number
            if isinstance(row, SkippedRow):
                made.refuse(str(path), line, row.reason)
                continue
            name = unused(row.record.id, f"{path.name}:{line}:{row.record.id}", names)
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
    for message in counts.lines()[: len(counts.inferred)]:  # skipped rows are counted in `refused`
        logging.warning("%s", message)
    return made


def distill_traces(
    config: TraceFilesConfig,
    filters: DistillConfig,
    workdir: Path,
    count_tokens: Callable[[str], int] | None = None,
    name: str = "train",
    tasks: Mapping[str, Task] | None = None,
) -> tuple[Sequence[DistilledRecord], dict[str, Any]]:
    """Creates a data set from logs of another system.

    The function writes ``NAME.jsonl`` (the data set), ``dropped/NAME.jsonl`` (runs that filters
    dropped) and ``refused/NAME.jsonl`` (records that could not be read or converted).

    Args:
        config: the files, and how to convert them.
        filters: settings of the filters; settings of the team are not used.
        workdir: directory to which the files are written.
        count_tokens: function that counts the tokens of a text; needed if
            ``filters.selection.max_tokens`` is set.
        name: name of the data set and of its files.
        tasks: known tasks by id, see `convert_files`.

    Returns:
        The records of the data set, and statistics of reading, conversion and filters.
    """
    folder = workdir if tasks is None else None  # a known task may hold functions
    made = convert_files(config, tasks, folder)
    runs = graded_runs(made.tasks, made.logs, filters.judges, made.records, folder)
    records, report = write_split(name, runs, filters, workdir, count_tokens)
    invented = [len(invented_segments(record)) for record in records]
    jsonl.write_lines(workdir / "refused" / f"{name}.jsonl", made.refusals)
    return records, {
        "reading": made.reading,
        "refused": dict(made.refused.most_common()),
        "examples": made.examples,
        "unknown_tools": dict(made.unknown.most_common()),
        "filters": dataclasses.asdict(report),
        "teacher_tokens": sum(made.tokens) or None,
        "invented": {
            "records": sum(map(bool, invented)),
            "segments": sum(invented),
        },
    }
