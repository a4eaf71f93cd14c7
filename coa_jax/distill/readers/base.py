"""What all readers of traces share: lines, checked fields, traces, and the report of a file.

A reader turns the lines of one file into traces.  It never raises over what stands in the file: a
record that is not what the format says becomes a `Problem` with its line and reason, and the rest
of the file is used.  Every line is accounted for in the `ReadReport`.
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
    """A record is not what its format says; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a file, decoded.

    Attributes:
        number: from 1.
        value: the JSON value; a `Malformed` where the line is none.
    """

    number: int
    value: Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """A record that could not be used: where, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run of somebody's agents in the common message form.

    Attributes:
        log: the messages; its protocol is "" until a trajectory is made of it, and its episode is a
            name that no other trace of the file has.
        gold: accepted answers, where the file has them.
        metadata: what the file says besides (JSON values).
        line: line of the record, from 1.
        task: id of the task, as the file says it; "" where it says none.
        usage: tokens that the file says the run cost, as ``prompt`` and ``completion``; empty where
            it does not say.
    """

    log: MessageLog
    gold: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    line: int = 1
    task: str = ""
    usage: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReadReport:
    """What became of the lines of a file.

    Attributes:
        path: the file.
        records: records found: lines that are not blank.  Each is used, ignored or a problem.
        used: records that are part of a trace.
        ignored: records that carry nothing for a trace (heads of journals, notifications).
        problems: the others, in the order of their lines.
        traces: traces made of them.
    """

    path: str
    records: int
    used: int
    ignored: int
    problems: tuple[Problem, ...]
    traces: int


Found = Trace | Malformed | None
"""What a reader makes of a line: a trace, a reason why not, or nothing of its own."""

Reader = Callable[[Sequence[Line]], Iterator[tuple[Line, Found, bool]]]
"""Lines in; for each of them (line, what it completed, whether it was used)."""


def each_line(read: Callable[[Any], Trace | None]) -> Reader:
    """A reader of a format with one run a line.

    Args:
        read: makes a trace of a value; raises `Malformed`, or returns None for a line that is no
            record of a run.
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
    """Yields the JSON value of every line that is not blank, or why it has none."""
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            yield _decode(raw, number)


def decode_document(data: bytes) -> Iterator[Line]:
    """Yields the one value of a file that is a single JSON document, or why it has none."""
    if data.strip():
        yield _decode(data, 1)


def decoded(line: Line) -> Any:
    """The JSON value of a line; raises `Malformed` where it has none."""
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        return Line(number, Malformed(f"not JSON that can be read: {str(error)[:80]}"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of a key that stands twice nobody knows which value counts."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {clean(twice)[:40]!r} stands twice in an object")
    return value


def _cleaned(value: Any) -> Any:
    """A JSON value with every text in it as `clean` leaves it."""
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return clean(value) if isinstance(value, str) else value


def unused(name: str, other: str, names: Collection[str]) -> str:
    """A name, or else another one, or else that one with a number, that is not among `names`."""
    if name not in names:
        return name
    numbered = (f"{other}#{number}" for number in itertools.count(2))
    return next(text for text in itertools.chain([other], numbered) if text not in names)


# --- fields --------------------------------------------------------------------------------


def mapping(value: Any, what: str) -> dict[str, Any]:
    """The value if it is an object, else `Malformed`."""
    if not isinstance(value, dict):
        raise Malformed(f"{what} is {_kind(value)}, not an object")
    return value


def items(value: Any, what: str) -> list[Any]:
    """The value if it is a list, else `Malformed`."""
    if not isinstance(value, list):
        raise Malformed(f"{what} is {_kind(value)}, not a list")
    return value


def text(value: Any, what: str) -> str:
    """The value if it is text, else `Malformed`."""
    if not isinstance(value, str):
        raise Malformed(f"{what} is {_kind(value)}, not text")
    return value


def optional_text(value: Any, what: str) -> str:
    """The value if it is text, "" for null, else `Malformed`."""
    return "" if value is None else text(value, what)


def finite(value: Any, what: str) -> float:
    """The value if it is a finite number, else `Malformed`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{what} is {_kind(value)}, not a number")
    try:
        if math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond every float
        pass
    raise Malformed(f"{what} is not a finite number")


def scalar(value: Any, what: str) -> str:
    """Text, or a finite number or truth value as text; else `Malformed`."""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return str(finite(value, what))
    return text(value, what)


def need(record: Mapping[str, Any], key: str, where: str = "the record") -> Any:
    """The value under a key, else `Malformed`."""
    if key not in record:
        raise Malformed(f"{where} lacks {key!r}")
    return record[key]


def json_text(value: str, what: str) -> Any:
    """The JSON value that a text holds, else `Malformed`."""
    try:
        return _cleaned(json.loads(value, object_pairs_hook=_object))
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        reason = str(error)[:80]
    raise Malformed(f"{what} is not JSON: {reason}")


def accepted(value: Any, what: str) -> tuple[str, ...]:
    """Accepted answers: null, a scalar, or a list of scalars."""
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
    """Collects the messages of a run; numbers them and knows who talks to whom."""

    def __init__(self, question: str) -> None:
        self.messages = [Message(0, "user", "manager", Kind.QUESTION, question)]

    def add(
        self, kind: Kind, sender: str, to: str, content: str, thought: str = "", outcome: Any = None
    ) -> None:
        """Adds one message."""
        index = len(self.messages)
        self.messages.append(Message(index, sender, to, kind, content, thought, outcome))

    def say(self, words: str) -> None:
        """Adds what somebody wrote that is neither call nor role of its own; blank is nothing."""
        if words.strip():
            self.add(Kind.REPORT, "search", "manager", words.strip())

    def call(self, tag: str, body: str, returned: str, ok: bool = True, thought: str = "") -> None:
        """Adds a call and what the tool returned."""
        agent = "code" if tag == "code" else "search"
        self.add(Kind.CALL, agent, tag, body, thought)
        self.add(Kind.OBSERVATION, tag, agent, returned, outcome="ok" if ok else "error")

    def finish(self, episode: str, error: str = "") -> MessageLog:
        """The run, as far as it came."""
        answered = self.messages[-1].kind is Kind.ANSWER
        ending = Ending.ANSWER if answered else Ending.LIMIT
        reason = "" if answered else error or "the file holds no final answer"
        question = self.messages[0].content
        return MessageLog(episode, question, "", tuple(self.messages), ending, reason)


def total_usage(counts: Iterable[Any], prompt: str, completion: str) -> dict[str, int]:
    """Adds token counts up; values that are no counts are passed over."""
    total = {"prompt": 0, "completion": 0}
    for count in counts:
        if isinstance(count, dict):
            for name, key in (("prompt", prompt), ("completion", completion)):
                value = count.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    total[name] += value
    return total if any(total.values()) else {}
