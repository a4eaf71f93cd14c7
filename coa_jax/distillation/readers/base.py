"""Defines what all readers of logs share: lines, checked fields and traces.

A reader converts the lines of one file to traces. The content of a file never makes a reader raise
an exception. Instead, a record that violates its format is reported with the number of its line and
the reason, and the rest of the file is used. The report of a file accounts for every line.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from coa_jax.distillation.messages import Ending, Kind, Message, MessageLog, agent_of, clean
from coa_jax.files import untrusted


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
class Trace:
    """A run of another system, converted to the messages of this project.

    Attributes:
        log: the messages. ``log.protocol`` is "" until the run is converted to a trajectory, and
            ``log.episode`` is a name that is unique in the file.
        gold: accepted answers; () if the file has none.
        metadata: further data from the file, as JSON values by name.
        line: number of the record's line, from 1.
        task: id of the task in the file; "" if the file has none.
        tagged: whether tool calls are already in the form of this project: a tag and the text
            inside it. If False, they have the other system's name of the tool and its arguments
            (text or JSON).
        usage: numbers of tokens of the run that the file states, with the keys ``prompt`` and
            ``completion``; {} if unknown.
        offered: functions that the file describes to the model, see `tool_calls.offered_functions`.
    """

    log: MessageLog
    gold: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    line: int = 1
    task: str = ""
    tagged: bool = False
    usage: Mapping[str, int] = dataclasses.field(default_factory=dict)
    offered: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


Found = Trace | Malformed | None
"""What a line completed: a trace; the reason why the trace is invalid; or None for nothing."""

TraceReader = Callable[[Iterable[Line]], Iterator[tuple[Line, Found, bool]]]
"""A function that reads the lines of a file, which it receives one by one.

It yields for each line (line, what the line completed, whether the line was used).
"""


def each_line(read: Callable[[Any], Trace | None]) -> TraceReader:
    """Returns a reader of a format in which each line is a run.

    Args:
        read: function that converts the JSON value of a line to a trace. It returns None for a line
            that is not a run, and raises `Malformed` for a damaged line.
    """

    def reader(lines: Iterable[Line]) -> Iterator[tuple[Line, Found, bool]]:
        for line in lines:
            try:
                trace = read(decoded(line))
            except (Malformed, RecursionError) as error:
                yield line, Malformed(str(error)), False
                continue
            yield line, trace, trace is not None

    return reader


# --- sessions ------------------------------------------------------------------------------


@dataclasses.dataclass
class Session(abc.ABC):
    """The state of a run that is spread over several lines, while these lines are read.

    Attributes:
        name: id of the session; "" if the lines name none.
        begin, end: numbers of the first and the last line with the id of the session.
        last: number of the last line that has content of the run. Lines without such content, for
            example with settings, may follow.
        fault: why the session is invalid; "" if it is valid.
    """

    name: str
    begin: int = 0
    end: int = 0
    last: int = 0
    fault: str = ""

    @abc.abstractmethod
    def add(self, record: Field) -> bool:
        """Reads one line of the session; returns whether the line has content of the run.

        Raises:
            Malformed: the line violates the format.
        """

    @abc.abstractmethod
    def trace(self) -> Trace:
        """Returns the trace of the session.

        Raises:
            Malformed: the session has no complete run.
        """


def read_sessions(
    lines: Iterable[Line],
    session_type: Callable[[str], Session],
    session_of: Callable[[Field], str | None],
    whole: Callable[[Field], Trace | None],
) -> Iterator[tuple[Line, Found, bool]]:
    """Reads the runs of a file; a run has one line, or several lines with the id of a session.

    If a line of a session is malformed, the whole session is refused, because the content of the
    line is unknown. A line that is not JSON does not name its session. Therefore every session that
    has lines before and after this line is refused. If the file names no sessions, all its lines
    belong to one session. Runs of one line are yielded at once, sessions at the end of the file.

    Args:
        lines: lines of the file.
        session_type: class of the sessions, which is called with the name of the session.
        session_of: function that returns the session of a line; None if the line is a whole run.
        whole: function that converts a line that is a whole run; None if the line has no run.

    Yields:
        For each line: the line; the trace that it completes, or the reason why it is refused (a
        `Malformed`), or None; and whether the line is used.
    """
    sessions: dict[str, Session] = {}
    numbers: list[tuple[int, str]] = []  # of the lines that belong to sessions
    broken: list[int] = []
    for line in lines:
        session = None
        if isinstance(line.value, Malformed):
            broken.append(line.number)
        try:
            record = Field(decoded(line))
            name = session_of(record)
            if name is None:
                trace = whole(record)
                yield line, trace, trace is not None
                continue
            session = sessions.setdefault(name, session_type(name))
            session.begin = session.begin or line.number
            session.end = line.number
            used = session.add(record)
        except untrusted.MALFORMED as error:
            if session is not None:
                session.fault = session.fault or f"line {line.number} of the session cannot be read"
            yield line, Malformed(untrusted.reason(error)), False
            continue
        if used:
            session.last = line.number
            numbers.append((line.number, name))
        else:
            yield line, None, False
    for number in broken:
        for session in sessions.values():
            if (len(sessions) == 1 and not session.name) or session.begin < number < session.end:
                session.fault = session.fault or f"line {number} may belong to the session"
    ends: dict[str, Trace | Malformed] = {}
    for name, session in sessions.items():
        try:
            ends[name] = Malformed(session.fault) if session.fault else session.trace()
        except untrusted.MALFORMED as error:
            ends[name] = Malformed(untrusted.reason(error))
    for number, name in numbers:
        end, line = ends[name], Line(number, None)
        if isinstance(end, Malformed):
            yield line, end, False
        else:
            yield line, end if sessions[name].last == number else None, True


# --- files ---------------------------------------------------------------------------------


def decode_line(data: bytes, number: int = 1) -> Line:
    """Decodes one line of a JSONL file; the value of an invalid line is a `Malformed`.

    Args:
        data: bytes of the line.
        number: line number, from 1.
    """
    try:
        return Line(number, parse_json(data))
    except (ValueError, RecursionError) as error:
        return Line(number, Malformed(untrusted.reason(error)))


def decoded(line: Line) -> Any:
    """Returns the JSON value of a decoded line.

    Raises:
        Malformed: the line is invalid.
    """
    if isinstance(line.value, Malformed):
        raise line.value
    return line.value


def parse_json(data: bytes | str) -> Any:
    """Parses a JSON value; replaces halves of surrogate pairs in its strings, see `clean`.

    Raises:
        ValueError, RecursionError: `untrusted.parse_json` cannot parse the text, or an object has
            the same key twice.
    """
    value = untrusted.parse_json(data, object_pairs_hook=_object)
    escape: Any = b"\\ud" if isinstance(data, bytes) else "\\ud"
    return _cleaned(value) if escape in data.lower() else value


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


def unused(name: str, other: str, names: set[str]) -> str:
    """Returns a name that is not in use, and adds the name to those in use.

    Args:
        name: preferred name.
        other: alternative name. If it is in use too, a number is appended.
        names: names in use.
    """
    numbered = (f"{other}#{number}" for number in itertools.count(2))
    chosen = next(text for text in itertools.chain([name, other], numbered) if text not in names)
    names.add(chosen)
    return chosen


# --- fields --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Field:
    """A value in a record of a log, with methods that check its type.

    Each method raises `Malformed` if the value has another type.

    Attributes:
        value: the JSON value; None if the value is null or missing.
        name: name of the value in error messages, such as ``'plan' of step 3``.
    """

    value: Any
    name: str = ""

    def __bool__(self) -> bool:
        """Returns whether the value is neither null nor missing."""
        return self.value is not None

    def __getitem__(self, key: str) -> Field:
        """Returns the value of a key that the object must have."""
        if key not in self.mapping():
            raise Malformed(f"{self.name or 'the record'} lacks {key!r}")
        return self.get(key)

    def get(self, key: str) -> Field:
        """Returns the field ``key`` of this object; the field may be missing."""
        return Field(self.mapping().get(key), f"{key!r} of {self.name}" if self.name else repr(key))

    def mapping(self) -> dict[str, Any]:
        """Returns the value as a dict; the value must be a JSON object."""
        return self._checked(dict, "an object")

    def items(self, item: str) -> list[Field]:
        """Returns the items of this value, which must be a list.

        Args:
            item: name of an item in error messages, to which its number is appended.
        """
        items = enumerate(self._checked(list, "a list"))
        return [Field(value, f"{item} {number}") for number, value in items]

    def text(self) -> str:
        """Returns the value, which must be a string."""
        return self._checked(str, "text")

    def optional_text(self) -> str:
        """Returns the value, which must be a string or null; "" for null."""
        return self.text() if self else ""

    def finite(self) -> float:
        """Returns the value, which must be a finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise Malformed(f"{self} is {self._kind}, not a number")
        if not math.isfinite(self.value):
            raise Malformed(f"{self} is not a finite number")
        return float(self.value)

    def scalar(self) -> str:
        """Returns the value, which must be a string, a finite number or a boolean, as a string."""
        if isinstance(self.value, bool | int):
            return str(self.value)
        return str(self.finite()) if isinstance(self.value, float) else self.text()

    def optional_scalar(self) -> str:
        """Returns the value as `scalar` does; "" for null."""
        return self.scalar() if self else ""

    def answers(self) -> tuple[str, ...]:
        """Returns accepted answers from a value that is null, a scalar or a list of scalars.

        Blank texts are no answers.
        """
        values = self.value if isinstance(self.value, list) else [self.value] if self else []
        answers = (Field(value, self.name).scalar() for value in values)
        return tuple(answer for answer in answers if answer.strip())

    def __str__(self) -> str:
        return self.name or "the record"

    @property
    def _kind(self) -> str:
        kinds = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
        return kinds.get(type(self.value), "a number") if self else "null"

    def _checked(self, kind: type, expected: str) -> Any:
        if not isinstance(self.value, kind):
            raise Malformed(f"{self} is {self._kind}, not {expected}")
        return self.value


# --- messages ------------------------------------------------------------------------------


class Conversation:
    """Builds the message log of a run that a reader converts, message by message.

    It numbers the messages. All methods except `add` also choose sender and recipient.
    """

    def __init__(self, question: str) -> None:
        self.messages = [Message(0, "user", "manager", Kind.QUESTION, question)]

    def add(
        self, kind: Kind, sender: str, to: str, content: str, thought: str = "", outcome: Any = None
    ) -> None:
        """Adds a message to the run.

        Args:
            kind, sender, content, thought, outcome: fields of `Message`.
            to: recipient of the message.
        """
        index = len(self.messages)
        self.messages.append(Message(index, sender, to, kind, content, thought, outcome))

    def add_thought(self, words: str) -> None:
        """Adds text of an agent that is neither a tool call nor a plan, a review or an answer.

        The message is a report of the search agent to the manager, and becomes a thought of the
        trajectory. Blank text is ignored.
        """
        if words.strip():
            self.add(Kind.REPORT, "search", "manager", words.strip())

    def ask(self, task: str, thought: str = "") -> None:
        """Adds a message in which the manager asks the search agent to solve a task."""
        self.add(Kind.REQUEST, "manager", "search", " ".join(task.split()), thought)

    def plan(self, plan: str, *thoughts: str) -> None:
        """Adds a message in which the planner sends a plan to the manager.

        Args:
            plan: text of the plan.
            thoughts: texts that the planner wrote before the plan, such as a survey of facts. They
                become the thought of the message.
        """
        self.add(Kind.PLAN, "planner", "manager", plan, "\n\n".join(filter(None, thoughts)))

    def call(
        self, tool: str, arguments: Any, returned: str, ok: bool = True, thought: str = ""
    ) -> None:
        """Adds a tool call and its result, as two messages.

        Args:
            tool: name of the tool in the other system, which `tool_calls.with_tags` replaces by a
                tag.
            arguments: arguments of the call, as text or as another JSON value.
            returned: text of the result.
            ok: whether the call succeeded.
            thought: reasoning before the call; "" for none.
        """
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=repr)
        agent = agent_of(tool)
        self.add(Kind.CALL, agent, tool, text, thought)
        self.add(Kind.OBSERVATION, tool, agent, returned, outcome="ok" if ok else "error")

    def answer(self, text: str) -> None:
        """Adds the final answer of the run; does nothing if the text is empty."""
        if text:
            self.add(Kind.ANSWER, "manager", "user", text)

    def finish(self, episode: str, error: str = "") -> MessageLog:
        """Returns the message log of the run.

        Args:
            episode: name of the run.
            error: why the run has no answer; used only if it has none.
        """
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
