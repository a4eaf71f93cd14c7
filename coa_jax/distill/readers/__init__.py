"""Reads the logs (traces) of other systems; each log format has a module.

``read_traces("results.jsonl", "oagents")`` returns the runs of a file as messages in a common form,
and a report that accounts for every record of the file. The docstring of each module lists what its
format lacks.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coa_jax.distill.readers import mcp, oagents, openai_chat, own, smolagents
from coa_jax.distill.readers.base import (
    Line,
    Malformed,
    Problem,
    ReadReport,
    Trace,
    decode_document,
    decode_lines,
    each_line,
    unused,
)
from coa_jax.errors import UserError
from coa_jax.extensions import Bound, Kind, bind, refuse_result
from coa_jax.reading import reason
from coa_jax.storage import local

__all__ = ["READERS", "Malformed", "Problem", "ReadReport", "Trace", "read_traces"]

READERS = Kind(
    "trace format",
    "coa_jax.readers",
    {
        "messages": own.read,
        "smolagents": smolagents.read,
        "oagents": oagents.read,
        "openai": openai_chat.read,
        "mcp": mcp.read,
    },
    offers=("record", "lines"),
    needs=("record", "lines"),
)
"""The kind of functions that read a log format.

A function with a parameter ``record`` converts a record, the JSON value of a line, to a `Trace`. It
returns None if the record is not a run, and raises `Malformed` (or ValueError) if the record is
damaged. A function with a parameter ``lines`` reads all lines of a file, see
`coa_jax.distill.readers.base.Reader`.
"""

_IS_RECORD: Mapping[str, Callable[[Any], bool]] = {"smolagents": smolagents.is_run}
"""Maps a format to a function that says whether a JSON list is one record or a list of records."""

_GZIP = b"\x1f\x8b"


def read_traces(
    path: str | os.PathLike[str], form: str, options: Mapping[str, Any] | None = None
) -> tuple[list[Trace], ReadReport]:
    """Reads a file of logs of another system.

    Damaged records raise no error; they are listed in the report.

    Args:
        path: a file with one JSON value per line. If its name ends in ``.json``, the file may also
            be a single JSON document: a record or a list of records.
        form: name of the log format: a short name of `READERS`, or a path ``package.module:name``.
        options: options of the function that reads the format; None if no options are set.

    Returns:
        The traces in the order of the file, each with a unique name, and a report on all records of
        the file.

    Raises:
        UserError: the file cannot be read or is compressed, or the format is unknown.
    """
    read = bind(READERS, form, options or {}, "traces.format")
    single = each_line(lambda value: _one(form, read, value))
    try:
        data = Path(local(str(path))).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if data.startswith(_GZIP):
        raise UserError(f"{path}: is compressed; unpack it with gunzip first")
    data = data.removeprefix(codecs.BOM_UTF8)
    lines, bad, traces = _lines(str(path), data, form), [], []
    records, used, ignored = len(lines), 0, 0
    names: set[str] = set()
    for line, found, counts in read(lines=lines) if "lines" in read.asks else single(lines):
        if isinstance(found, Malformed):
            bad.append(Problem(str(path), line.number, str(found)))
            continue
        used, ignored = used + counts, ignored + (not counts)
        if found is not None:
            traces.append(_named(found, line.number, Path(path).name, names))
    problems = tuple(sorted(bad, key=lambda problem: problem.line))
    return traces, ReadReport(str(path), records, used, ignored, problems, len(traces))


def _lines(path: str, data: bytes, form: str) -> list[Line]:
    """Returns the records of a file."""
    if not path.endswith(".json"):
        return list(decode_lines(data))
    lines = list(decode_document(data))
    value = lines[0].value if lines else None
    if isinstance(value, Malformed):
        single = list(decode_lines(data))
        records = sum(isinstance(line.value, dict | list) for line in single)
        return single if 2 * records >= len(single) > 1 else lines
    if isinstance(value, list) and not (form in _IS_RECORD and _IS_RECORD[form](value)):
        return [Line(number, item) for number, item in enumerate(value, start=1)]
    return lines


def _one(form: str, read: Bound, value: Any) -> Trace | None:
    """Calls the function that reads a single record, and checks its result."""
    try:
        trace = read(record=value)
    except Malformed:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise Malformed(f"{type(error).__name__}: {reason(error)}") from error
    if trace is not None and not isinstance(trace, Trace):
        wanted = "a coa_jax.distill.readers.Trace, or None"
        raise refuse_result(READERS, form, trace, wanted, "traces.format")
    return trace


def _named(trace: Trace, line: int, file: str, names: set[str]) -> Trace:
    """Returns the trace with its line number and a name that is unique in the file."""
    task = trace.log.episode
    name = task or f"{file}:{line}"
    name = unused(name, f"{name}@{line}", names)
    names.add(name)
    log = dataclasses.replace(trace.log, episode=name)
    return dataclasses.replace(trace, log=log, line=line, task=task)
