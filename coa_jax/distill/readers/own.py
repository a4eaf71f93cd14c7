"""Reads message logs of this project, such as a journal of ``coa_jax.distill``.

The lines are in the common message form (`messages.to_json`), so nothing is lost. A journal
contains no accepted answers, because the team sees none. The filters drop a run as
``no_accepted_answer`` unless a field ``gold`` (a string or a list of strings) is added to its line.
docs/data.md shows a line.
"""

from __future__ import annotations

from typing import Any

from coa_jax.distill.messages import Kind, from_json
from coa_jax.distill.readers.base import (
    Malformed,
    Reader,
    Trace,
    accepted,
    each_line,
    mapping,
    text,
)


def read_log(value: Any) -> Trace | None:
    """Converts the JSON object of one line to a trace.

    The result is None for the first line of a journal, which holds settings instead of a run.
    """
    if mapping(value, "the record").keys() == {"journal"}:
        return None
    try:
        log = from_json(value)
    except KeyError as error:
        raise Malformed(f"the field {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise Malformed(" ".join(str(error).split())) from error
    for name in ("episode", "question", "protocol", "error"):
        text(getattr(log, name), f"{name!r}")
    for message in log.messages:
        for name in ("sender", "recipient", "content", "thought"):
            text(getattr(message, name), f"{name!r} of message {message.index}")
        for name in ("outcome", "slip"):
            if getattr(message, name) is not None:
                text(getattr(message, name), f"{name!r} of message {message.index}")
    if log.messages[0].kind is not Kind.QUESTION:
        raise Malformed("the first message is not the question")
    return Trace(log, accepted(value.get("gold"), "'gold'"))


read: Reader = each_line(read_log)
