"""Reads the logs (traces) of other systems; each log format has a module.

``TraceFile("results.jsonl")`` yields the runs of a file as messages in a common form, and then has
a report that accounts for every record of the file. The docstring of each module lists what its
format lacks.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coa_jax.config.extensions import BoundFunction, ExtensionKind, bind, refuse_result
from coa_jax.data.atif import is_atif
from coa_jax.data.rows import JsonValues, add_items
from coa_jax.distillation.readers import atif, chat, mcp, message_logs, oagents, smolagents
from coa_jax.distillation.readers.base import (
    Conversation,
    Found,
    Line,
    Malformed,
    Trace,
    decode_line,
    each_line,
    unused,
)
from coa_jax.distillation.readers.tool_calls import with_tags
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.storage import local

__all__ = ["READERS", "Conversation", "Malformed", "Trace", "TraceFile"]

READERS = ExtensionKind(
    "trace format",
    "coa_jax.readers",
    {
        "messages": message_logs.read_log,
        "smolagents": smolagents.read_run,
        "oagents": oagents.read_result,
        "mcp": mcp.read,
        "atif": atif.read_document,
        "chat": chat.read,
    },
    offers=("record", "lines"),
    needs=("record", "lines"),
)
"""The kind of functions that read a log format.

A function with a parameter ``record`` converts a record, the JSON value of a line, to a `Trace`. It
returns None if the record is not a run, and raises `Malformed` (or ValueError) if the record is
damaged. A function with a parameter ``lines`` reads all lines of a file, see
`coa_jax.distillation.readers.base.TraceReader`.
"""

_SHAPES: Mapping[str, Callable[[Any], bool]] = {
    "messages": message_logs.is_log,
    "oagents": oagents.is_result,
    "smolagents": smolagents.is_record,
    "atif": is_atif,
    "mcp": mcp.is_record,
    "chat": chat.is_record,
}
"""Maps each format to a function that returns whether a record has the format.

The first format that matches is used.
"""

_GUESSED_FROM = 50
"""Maximum number of records or lines that are read to guess the format of a file."""


def guess_format(values: Iterable[Any]) -> str | None:
    """Returns the log format of a file, given the JSON values of its records; None if unknown.

    The first record with a known format decides.
    """
    forms = (name for value in values for name, has in _SHAPES.items() if has(value))
    return next(forms, None)


class TraceFile:
    """A file of logs of another system, which is read record by record.

    Iteration yields the runs (traces) in the order of the file, each with a unique name. Damaged
    records raise no error; they are listed in the report.

    Attributes:
        report: statistics of the file, complete after iteration:

            - ``path``, ``format``: path and log format of the file;
            - ``records``: number of records, which are nonblank lines;
            - ``used``, ``ignored``: number of records with and without content for a trace;
            - ``problems``: ``path``, ``line`` (from 1) and ``reason`` of each damaged record;
            - ``traces``: number of traces. A trace may consist of several records.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        form: str = "",
        options: Mapping[str, Any] | None = None,
        tools: Mapping[str, str] | None = None,
    ) -> None:
        """Opens the file, and finds the function that reads its format.

        Args:
            path: a file with one JSON value per line, which may be compressed with gzip. If its
                name ends in ``.json``, the file may also be a single JSON document: a run or a list
                of runs.
            form: name of the log format: a short name of `READERS`, or a path
                ``package.module:name``; "" to guess the format from the first records.
            options: options of the function that reads the format; None if no options are set.
            tools: maps names of tools to tags, see `tool_calls.with_tags`.

        Raises:
            UserError: the file cannot be read, the format is unknown, or it cannot be guessed.
        """
        self.path, self.tools = str(path), tools or {}
        if form:
            self.read = bind(READERS, form, options or {}, "traces.format")
        lines = _lines(local(self.path), form)
        if not form:
            head = list[Line]()
            for line in itertools.islice(lines, _GUESSED_FROM):
                head.append(line)
                if guess_format([line.value]):
                    break
            lines = itertools.chain(head, lines)
            form = self._guess([line.value for line in head])
            self.read = bind(READERS, form, options or {}, "traces.format")
        self.lines = lines
        self.report: dict[str, Any] = {"path": self.path, "format": form, "records": 0}

    def _guess(self, values: list[Any]) -> str:
        form = guess_format(values)
        objects = [value for value in values if not isinstance(value, Malformed)]
        if form is None and objects:
            raise UserError(
                f"{self.path}: has no known log format; its first record {_contents(objects[0])}; "
                "name the format in traces.format (docs/data.md#logs-of-other-systems), or write a "
                "reader (docs/extending.md#a-trace-format-and-a-filter)"
            )
        return form or "chat"

    def __iter__(self) -> Iterator[Trace]:
        """Reads the file, once, and completes the report."""
        problems, names, used, traces = list[dict[str, Any]](), set[str](), 0, 0
        for line, trace, counts in self._completed():
            if isinstance(trace, Trace):
                try:
                    trace = with_tags(trace, self.tools)
                except (Malformed, RecursionError) as error:
                    trace = Malformed(str(error))
            if isinstance(trace, Malformed):
                reason = {"path": self.path, "line": line.number, "reason": str(trace)}
                problems.append(reason)
                continue
            used += counts
            if trace is not None:
                traces += 1
                task = trace.log.episode
                name = task or f"{Path(self.path).name}:{line.number}"
                name = unused(name, f"{name}@{line.number}", names)
                log = dataclasses.replace(trace.log, episode=name)
                yield dataclasses.replace(trace, log=log, line=line.number, task=task)
        problems.sort(key=lambda problem: problem["line"])
        self.report |= {"used": used, "traces": traces, "problems": problems}
        self.report["ignored"] = self.report["records"] - used - len(problems)

    def _completed(self) -> Iterator[tuple[Line, Found, bool]]:
        lines = self._counted()
        if "lines" in self.read.asks:
            return self.read(lines=lines)
        return each_line(lambda value: _read_record(self.report["format"], self.read, value))(lines)

    def _counted(self) -> Iterator[Line]:
        for line in self.lines:
            self.report["records"] += 1
            yield line


def _contents(value: Any) -> str:
    """Describes a record of an unknown format, with the keys of its (first) object."""
    listed = isinstance(value, list) and bool(value)
    first = value[0] if listed else value
    if not isinstance(first, dict):
        return "is a list without objects" if isinstance(value, list) else "is no object"
    begin = "is a list, whose first item" if listed else ""
    return f"{begin} has the keys: {', '.join(list(first)[:8])}".lstrip()


def _lines(path: str, form: str) -> Iterator[Line]:
    """Yields the records of a file; the file is opened at once."""
    if path.endswith(".json") and (records := _documents(path, form)) is not None:
        return records
    untrusted.open_file(path).close()
    lines = ((number, line) for number, line in untrusted.lines(path) if line.strip())
    marked = ((n, line.removeprefix(b"\xef\xbb\xbf") if n == 1 else line) for n, line in lines)
    return (decode_line(line.rstrip(b"\n"), number) for number, line in marked if line.strip())


def _documents(path: str, form: str) -> Iterator[Line] | None:
    """Yields the records of a file that is a JSON document; returns None if it has JSON lines.

    The document is a run, or a list of runs of which only one is in memory at a time.
    """
    places = array.array("q")
    with untrusted.open_file(path) as file:
        values = JsonValues(file, untrusted.MAX_LINE)
        sign = values.sign()
        if sign not in ("[", "{"):
            return None
        try:
            if sign == "[":
                add_items(values, places)
            else:
                values.value()
            fault = "text follows the list" if values.sign() else ""
        except ValueError as error:
            fault = f"item {len(places) // 2 + 1} of the list: {error}"
    if fault and _has_lines(path):
        return None
    if sign == "[" and fault:
        return iter([Line(1, Malformed(fault))])
    if sign == "[" and not (places and _is_one_run(lambda: _items(path, places), form)):
        return _items(path, places)
    return iter([decode_line(untrusted.read_bytes(path))])


def _items(path: str, places: Iterable[int]) -> Iterator[Line]:
    """Yields the items of a list in a file, given the start and end of each in bytes, [2 n]."""
    ends = iter(places)
    with untrusted.open_file(path) as file:
        for number, (start, end) in enumerate(zip(ends, ends, strict=True), start=1):
            file.seek(start)
            yield decode_line(file.read(end - start), number)


def _is_one_run(items: Callable[[], Iterator[Line]], form: str) -> bool:
    """Returns whether a list is a single run, and not a list of runs; its first items decide."""

    def head() -> Iterator[Any]:  # a list of them would hold many runs in memory
        return (line.value for line in itertools.islice(items(), _GUESSED_FROM))

    if form == "smolagents":
        return smolagents.is_run(head())
    return form in ("", "chat") and (
        any(map(smolagents.is_step, head())) or chat.are_messages(head())
    )


def _has_lines(path: str) -> bool:
    """Returns whether most of the first lines of a file are each a JSON object or list."""
    lines = (decode_line(line) for _, line in untrusted.lines(path) if line.strip())
    head = [isinstance(line.value, dict | list) for line in itertools.islice(lines, _GUESSED_FROM)]
    return 2 * sum(head) >= len(head) > 1


def _read_record(form: str, read: BoundFunction, value: Any) -> Trace | None:
    """Calls the function that reads a single record, and checks its result."""
    try:
        trace = read(record=value)
    except Malformed:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise Malformed(f"{type(error).__name__}: {untrusted.reason(error)}") from error
    if trace is not None and not isinstance(trace, Trace):
        expected = "a coa_jax.distillation.readers.Trace, or None"
        raise refuse_result(READERS, form, trace, expected, "traces.format")
    return trace
