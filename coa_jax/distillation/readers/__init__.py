"""Reads the logs (traces) of other systems; each log format has a module.

``read_traces("results.jsonl", "oagents")`` returns the runs of a file as messages in a common form,
and a report that accounts for every record of the file. The docstring of each module lists what its
format lacks.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa_jax.config.extensions import BoundFunction, ExtensionKind, bind, refuse_result
from coa_jax.distillation.readers import mcp, oagents, openai_chat, own, smolagents
from coa_jax.distillation.readers.base import (
    Line,
    Malformed,
    Trace,
    decode_line,
    decode_lines,
    each_line,
    unused,
)
from coa_jax.distillation.readers.smolagents import is_run
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.storage import local

__all__ = ["READERS", "Malformed", "Trace", "read_traces"]

READERS = ExtensionKind(
    "trace format",
    "coa_jax.readers",
    {
        "messages": own.read_log,
        "smolagents": smolagents.read_run,
        "oagents": oagents.read_result,
        "openai": openai_chat.read_chat,
        "mcp": mcp.read,
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


def read_traces(
    path: str | os.PathLike[str], form: str, options: Mapping[str, Any] | None = None
) -> tuple[list[Trace], dict[str, Any]]:
    """Reads a file of logs of another system.

    Damaged records raise no error; they are listed in the report.

    Args:
        path: a file with one JSON value per line. If its name ends in ``.json``, the file may also
            be a single JSON document: a record or a list of records.
        form: name of the log format: a short name of `READERS`, or a path ``package.module:name``.
        options: options of the function that reads the format; None if no options are set.

    Returns:
        The traces in the order of the file, each with a unique name, and a report on the records of
        the file. Each record, that is, each nonblank line, is used for a trace, ignored because it
        has no content for a trace, or a problem. The report has the key ``path``, the number of
        ``records``, of ``used`` and ``ignored`` records and of ``traces``, and under ``problems``
        the ``path``, ``line`` (from 1) and ``reason`` of each problem in the order of the lines.

    Raises:
        UserError: the file cannot be read or is compressed, or the format is unknown.
    """
    read = bind(READERS, form, options or {}, "traces.format")
    single = each_line(lambda value: _read_record(form, read, value))
    data = untrusted.read_bytes(local(str(path)))
    if data.startswith(b"\x1f\x8b"):
        raise UserError(f"{path}: is compressed; unpack it with gunzip first")
    lines = _lines(str(path), data.removeprefix(codecs.BOM_UTF8), form)
    problems, traces, names = list[dict[str, Any]](), list[Trace](), set[str]()
    used = 0
    for line, trace, counts in read(lines=lines) if "lines" in read.asks else single(lines):
        if isinstance(trace, Malformed):
            problems.append({"path": str(path), "line": line.number, "reason": str(trace)})
            continue
        used += counts
        if trace is not None:
            task = trace.log.episode
            name = task or f"{Path(path).name}:{line.number}"
            name = unused(name, f"{name}@{line.number}", names)
            names.add(name)
            log = dataclasses.replace(trace.log, episode=name)
            traces.append(dataclasses.replace(trace, log=log, line=line.number, task=task))
    problems.sort(key=lambda problem: problem["line"])
    numbers = {"used": used, "ignored": len(lines) - used - len(problems), "traces": len(traces)}
    return traces, {"path": str(path), "records": len(lines), **numbers, "problems": problems}


def _lines(path: str, data: bytes, form: str) -> list[Line]:
    """Returns the records of a file."""
    if not path.endswith(".json") or not data.strip():
        return decode_lines(data)
    document = decode_line(data)
    if isinstance(document.value, Malformed):
        single = decode_lines(data)
        records = sum(isinstance(line.value, dict | list) for line in single)
        return single if 2 * records >= len(single) > 1 else [document]
    if isinstance(document.value, list) and not (form == "smolagents" and is_run(document.value)):
        return [Line(number, item) for number, item in enumerate(document.value, start=1)]
    return [document]


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
