"""Defines what all readers of logs share: lines, checks of fields, traces, and reports.

A reader converts the lines of one file to traces. The content of a file never makes a reader raise
an exception. Instead, a record that violates its format becomes a `Problem` with the number of its
line and the reason, and the rest of the file is used. The `ReadReport` accounts for every line.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from coa_jax.distill.messages import Ending, Kind, Message, MessageLog, clean


class Malformed(ValueError):
    """Raised if a record violates its format; the message says how."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A decoded line of a file.

    Attributes:
        number: line number, from 1.
        value: JSON value of the line, or a `Malformed` if the line is not JSON.
    """

    number: int
    value: Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """A record that could not be used, with its file, its line and the reason."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run of another system, converted to the messages of this project.

    Attributes:
        log: the messages. ``log.protocol`` is "" until the run is converted to a trajectory, and
            ``log.episode`` is a name that is unique in the file.
        gold: accepted answers; () if the file has none.
        metadata: further data from the file, as JSON values by name.
        line: number of the record's line, from 1.
        task: id of the task in the file; "" if the file has none.
        usage: numbers of tokens of the run that the file states, with the keys ``prompt`` and
            ``completion``; {} if unknown.
    """

    log: MessageLog
    gold: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    line: int = 1
    task: str = ""
    usage: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReadReport:
    """Counts of what a reader did with the records of a file.

    Attributes:
        path: the file.
        records: number of records, that is, of nonblank lines. Each record is used, ignored, or a
            problem.
        used: number of records that became part of a trace.
        ignored: number of valid records without content for a trace, such as notifications.
        problems: the records that could not be used, in the order of their lines.
        traces: number of traces that were made of the used records.
    """

    path: str
    records: int
    used: int
    ignored: int
    problems: tuple[Problem, ...]
    traces: int


Found = Trace | Malformed | None
"""What a line completed: a trace; the reason why the trace is invalid; or None for nothing."""

Reader = Callable[[Sequence[Line]], Iterator[tuple[Line, Found, bool]]]
"""A function that reads the lines of a file.

It yields for each line (line, what the line completed, whether the line was used).
"""


def each_line(read: Callable[[Any], Trace | None]) -> Reader:
    """Returns a reader of a format in which each line is a run.

    Args:
        read: function that converts the JSON value of a line to a trace. It returns None for a line
            that is not a run, and raises `Malformed` for a damaged line.
    """

    def reader(lines: Sequence[Line]) -> Iterator[tuple[Line, Found, bool]]:
        for line in lines:
            try:
                trace = read(decoded(line))
            except (Malformed, RecursionError) as error:
                yield line, Malformed(str(error)), False
                continue
            yield line, trace, trace is not None

    return reader


# --- files ---------------------------------------------------------------------------------


def decode_lines(data: bytes) -> Iterator[Line]:
    """Yields every nonblank line with its JSON value, or with the reason why it is invalid."""
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            yield _decode(raw, number)


def decode_document(data: bytes) -> Iterator[Line]:
    """Yields a single line, which holds a whole JSON document or the reason why it is invalid."""
    if data.strip():
        yield _decode(data, 1)


def decoded(line: Line) -> Any:
    """Returns the JSON value of a line; raises `Malformed` if the line is invalid."""
    if isinstance(line.value, Malformed):
        raise line.value
    return line.value


def _decode(raw: bytes, number: int) -> Line:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
        return Line(number, _cleaned(value) if b"\\ud" in raw.lower() else value)
    except UnicodeDecodeError as error:
        at = number + raw.count(b"\n", 0, error.start)
        return Line(at, Malformed(f"not UTF-8: byte {error.start}"))
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at column {error.colno}"
        return Line(number + error.lineno - 1, Malformed(problem))
    except (
        ValueError,
        RecursionError,
    ) as error:  # e.g. because of very long numbers or deep nesting
        return Line(number, Malformed(f"not JSON that can be read: {str(error)[:80]}"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object; refuses duplicate keys, whose value would be ambiguous."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {clean(twice)[:40]!r} occurs twice in an object")
    return value


def _cleaned(value: Any) -> Any:
    """Applies `clean` to every string in a JSON value."""
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return clean(value) if isinstance(value, str) else value


def unused(name: str, other: str, names: Collection[str]) -> str:
    """Returns a name that is not in use.

    Args:
        name: preferred name.
        other: alternative name. If it is in use too, a number is appended.
        names: names in use.
    """
    if name not in names:
        return name
    numbered = (f"{other}#{number}" for number in itertools.count(2))
    return next(text for text in itertools.chain([other], numbered) if text not in names)


# --- fields --------------------------------------------------------------------------------


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Returns the value if it is an object, else raises `Malformed`."""
    if not isinstance(value, dict):
        raise Malformed(f"{what} is {_kind(value)}, not an object")
    return value


def items(value: Any, what: str) -> list[Any]:
    """Returns the value if it is a list, else raises `Malformed`."""
    if not isinstance(value, list):
        raise Malformed(f"{what} is {_kind(value)}, not a list")
    return value


def text(value: Any, what: str) -> str:
    """Returns the value if it is a string, else raises `Malformed`."""
    if not isinstance(value, str):
        raise Malformed(f"{what} is {_kind(value)}, not text")
    return value


def optional_text(value: Any, what: str) -> str:
    """Returns the value if it is a string, "" for null, else raises `Malformed`."""
    return "" if value is None else text(value, what)


def error_of(step: Mapping[str, Any], where: str) -> str:
    """Returns the message of a step's ``error``; "" for a step without an error."""
    error = step.get("error")
    if error is None:
        return ""
    message = mapping(error, f"'error' of {where}").get("message")
    return optional_text(message, f"the error of {where}")


def finite(value: Any, what: str) -> float:
    """Returns the value if it is a finite number, else raises `Malformed`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{what} is {_kind(value)}, not a number")
    try:
        if math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer too large for a float
        pass
    raise Malformed(f"{what} is not a finite number")


def scalar(value: Any, what: str) -> str:
    """Returns a string, finite number or boolean as a string; raises `Malformed` otherwise."""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return str(finite(value, what))
    return text(value, what)


def need(record: Mapping[str, Any], key: str, where: str = "the record") -> Any:
    """Returns the value of a key that a JSON object must have.

    Args:
        record: the JSON object.
        key: the key.
        where: name of the object, used in the error message.

    Raises:
        Malformed: the key is missing.
    """
    if key not in record:
        raise Malformed(f"{where} lacks {key!r}")
    return record[key]


def json_text(value: str, what: str) -> Any:
    """Parses JSON inside a string; raises `Malformed` if it is invalid."""
    try:
        return _cleaned(json.loads(value, object_pairs_hook=_object))
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        reason = str(error)[:80]
    raise Malformed(f"{what} is not JSON: {reason}")


def accepted(value: Any, what: str) -> tuple[str, ...]:
    """Converts the accepted answers in a file, which may be null, a scalar or a list of scalars."""
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(scalar(item, what) for item in value)
    return (scalar(value, what),)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


# --- messages ------------------------------------------------------------------------------


class Conversation:
    """Collects and numbers the messages of a run, and adds senders and recipients."""

    def __init__(self, question: str) -> None:
        self.messages = [Message(0, "user", "manager", Kind.QUESTION, question)]

    def add(
        self, kind: Kind, sender: str, to: str, content: str, thought: str = "", outcome: Any = None
    ) -> None:
        """Adds a message.

        Args:
            kind: purpose of the message.
            sender, to: names of the sender and of the recipient.
            content: text of the message.
            thought: reasoning of the sender before the message; "" for none.
            outcome: how the tool call ended if the message is an observation; None for other
                messages.
        """
        index = len(self.messages)
        self.messages.append(Message(index, sender, to, kind, content, thought, outcome))

    def say(self, words: str) -> None:
        """Adds text that belongs to no tag as a report to the manager; ignores blank text."""
        if words.strip():
            self.add(Kind.REPORT, "search", "manager", words.strip())

    def call(self, tag: str, body: str, returned: str, ok: bool = True, thought: str = "") -> None:
        """Adds a tool call and its result, as two messages.

        Args:
            tag: tag of the tool.
            body: text between the tags of the call.
            returned: text of the result.
            ok: whether the call succeeded.
            thought: reasoning before the call; "" for none.
        """
        agent = "code" if tag == "code" else "search"
        self.add(Kind.CALL, agent, tag, body, thought)
        self.add(Kind.OBSERVATION, tag, agent, returned, outcome="ok" if ok else "error")

    def finish(self, episode: str, error: str = "") -> MessageLog:
        """Returns the log of the run so far."""
        answered = self.messages[-1].kind is Kind.ANSWER
        ending = Ending.ANSWER if answered else Ending.LIMIT
        reason = "" if answered else error or "the file contains no final answer"
        question = self.messages[0].content
        return MessageLog(episode, question, "", tuple(self.messages), ending, reason)


def total_usage(counts: Iterable[Any], prompt: str, completion: str) -> dict[str, int]:
    """Returns the total token counts of a run; {} if the file has no token counts.

    Args:
        counts: JSON objects with token counts, one per call of a model. Values that are not counts
            are skipped.
        prompt, completion: keys of prompt tokens and of completion tokens in these objects.
    """
    total = {"prompt": 0, "completion": 0}
    for count in counts:
        if isinstance(count, dict):
            for name, key in (("prompt", prompt), ("completion", completion)):
                value = count.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    total[name] += value
    return total if any(total.values()) else {}
