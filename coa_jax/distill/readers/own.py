"""Reads our message log: a journal of ``coa_jax.distill`` or a file of ``messages.to_json`` lines.

This is the common form, so nothing is lost. A journal contains no accepted answers, because the
team does not see any. Without ``gold`` (a string or a list of strings) next to the log, the filters
drop a run as ``no_accepted_answer``. docs/data.md shows a line.
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
    """Reads one line; the head of a journal is not a run."""
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
