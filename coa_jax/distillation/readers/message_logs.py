"""Reads message logs of this project, such as a journal of ``coa-jax distill``.

The lines are in the common message form (`messages.to_json`), so nothing is lost. A journal
contains no accepted answers, because the team sees none. The filters drop a run as
``no_accepted_answer`` unless a field ``gold`` (a string or a list of strings) is added to its line.
docs/data.md shows a line.
"""

from __future__ import annotations

from typing import Any

from coa_jax.distillation.messages import Kind, from_json
from coa_jax.distillation.readers.base import Field, Malformed, Trace
from coa_jax.files import untrusted


def is_log(value: Any) -> bool:
    """Returns whether a JSON value is a message log, or the first line of a journal of messages."""
    keys = value.keys() if isinstance(value, dict) else set()
    return keys == {"journal"} or {"episode", "ending", "messages"} <= keys


def read_log(record: Any) -> Trace | None:
    """Converts a message log of this project (the JSON object of one line) to a trace.

    The result is None for the first line of a journal, which holds settings instead of a run.
    """
    fields = Field(record)
    if fields.mapping().keys() == {"journal"}:
        return None
    try:
        log = from_json(record)
    except untrusted.MALFORMED as error:
        raise Malformed(untrusted.reason(error)) from error
    if log.messages[0].kind is not Kind.QUESTION:
        raise Malformed("the first message is not the question")
    return Trace(log, fields.get("gold").answers(), tagged=True)
