"""Reads logs of the Model Context Protocol: JSON-RPC messages of ``tools/call`` and their results.

A file contains one session per line, or one message per line (docs/data.md). The field ``session``
names the session of a message. Messages without this field belong to the only session of the file.

The format lacks:

- the question, the answer and every thought, unless additional lines give them, because the text of
  the model is not part of the messages between a client and its tools;
- results other than text, and structured content besides text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from coa_jax.distill.messages import Kind
from coa_jax.distill.readers.base import (
    Conversation,
    Found,
    Line,
    Malformed,
    Trace,
    accepted,
    decoded,
    items,
    mapping,
    need,
    scalar,
    text,
)
from coa_jax.distill.readers.calls import body_of, tag_of
from coa_jax.tools.mcp_tool import result_text

T = TypeVar("T")


@dataclasses.dataclass
class _Session:
    """The state of a session while its lines are read.

    `others` maps the ids of requests that are not tool calls, from the client and from the server,
    to whether they are still unanswered. `begin` and `end_line` are the numbers of the first and
    the last line of the session, and `last` is the number of the last line that belongs to the run.
    """

    name: str
    question: str = ""
    answer: str | None = None
    gold: tuple[str, ...] = ()
    calls: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    returns: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    others: dict[str, bool] = dataclasses.field(default_factory=dict)
    begin: int = 0
    end_line: int = 0
    last: int = 0
    fault: str = ""

    def end(self) -> Trace | Malformed:
        """Returns the trace of the session, or the reason why the session is invalid."""
        try:
            return Malformed(self.fault) if self.fault else self.trace()
        except Malformed as error:
            return error

    def trace(self) -> Trace:
        """Returns the trace of the session: its tool calls in order, each with its result."""
        if not self.question:
            raise Malformed(f"the session {self.name!r} has no question")
        talk = Conversation(self.question)
        for identity, (tag, body) in self.calls.items():
            if identity not in self.returns:
                raise Malformed(f"no result of the call {identity}")
            returned, ok = self.returns[identity]
            talk.call(tag, body, returned, ok)
        if self.answer:
            talk.add(Kind.ANSWER, "manager", "user", self.answer)
        return Trace(talk.finish(self.name), self.gold)


def _facts(session: _Session, record: dict[str, Any]) -> bool:
    """Reads question, answer and accepted answers from a record; returns whether it has any."""
    if record.get("question") is not None:
        question = text(record["question"], "'question'")
        session.question = _same(session.question or question, question, "question")
    if record.get("answer") is not None:
        answer = scalar(record["answer"], "'answer'").strip()
        session.answer = _same(
            answer if session.answer is None else session.answer, answer, "answer"
        )
    if record.get("gold") is not None:
        gold = accepted(record["gold"], "'gold'")
        session.gold = _same(session.gold or gold, gold, "gold")
    return any(record.get(key) is not None for key in ("question", "answer", "gold"))


def _same(known: T, new: T, what: str) -> T:
    """Returns the value if it equals the known one; another value means that two runs are mixed."""
    if known != new:
        raise Malformed(f"a second {what} in the session: give each run a 'session' of its own")
    return new


def _message(session: _Session, value: Any) -> bool:
    """Reads one JSON-RPC message; returns whether it belongs to a tool call."""
    message = mapping(value, "a message")
    if need(message, "jsonrpc", "a message") != "2.0":
        raise Malformed("a message is not of JSON-RPC 2.0")
    identity = str(message.get("id"))
    if message.get("method") == "tools/call":
        params = mapping(need(message, "params", "a call"), "'params'")
        name = text(need(params, "name", "a call"), "the name of a tool")
        if identity in session.calls:
            raise Malformed(f"two calls with the id {identity}")
        tag = tag_of(name)
        session.calls[identity] = (tag, body_of(tag, params.get("arguments") or {}))
        return True
    if "method" in message:
        session.others[identity] = True
        return False  # a handshake, a notification, or a request of the server
    if _answers_another(session, identity, message):
        session.others[identity] = False
        return False
    if identity not in session.calls:
        raise Malformed(f"a result of the request {identity}, which is not there")
    if identity in session.returns:
        raise Malformed(f"two results of the call {identity}")
    if "error" in message:
        error = mapping(message["error"], "'error'")
        session.returns[identity] = scalar(error.get("message", ""), "an error"), False
        return True
    result = mapping(need(message, "result", "a message"), "'result'")
    structured = result.get("structuredContent")
    parts = []
    content = (
        result.get("content") if structured is not None else need(result, "content", "a result")
    )
    for part in items([] if content is None else content, "'content'"):
        if mapping(part, "a part of a result").get("type") != "text":
            raise Malformed("a result holds something besides text")
        parts.append(("text", text(part.get("text"), "a part of a result")))
    session.returns[identity] = result_text(parts, structured), not result.get("isError", False)
    return True


def _answers_another(session: _Session, identity: str, message: dict[str, Any]) -> bool:
    """Returns whether a response belongs to a request that is not a tool call.

    Client and server number their requests independently, so a request of the server may have the
    same id as a tool call. In this case the form of the result decides which request it answers.
    """
    if identity not in session.calls:
        return identity in session.others
    if not session.others.get(identity):
        return False
    if identity in session.returns:
        return True
    if "error" in message:
        raise Malformed(f"an error of {identity}, which is both a call and a request of the server")
    result = mapping(need(message, "result", "a message"), "'result'")
    returned = isinstance(result.get("content"), list) or "structuredContent" in result
    return not returned or "role" in result or "action" in result


def _whole(record: dict[str, Any]) -> Trace:
    identity = record.get("id")
    session = _Session("" if identity is None else scalar(identity, "'id'"))
    _facts(session, record)
    for message in items(record["messages"], "'messages'"):
        _message(session, message)
    return session.trace()


def read(lines: Sequence[Line]) -> Iterator[tuple[Line, Found, bool]]:
    """Reads the lines of a file, see `coa_jax.distill.readers.base.Reader`.

    The reader refuses all of a session that has a malformed line, because the content of the line
    is unknown. A line that is not JSON does not name its session, so the reader refuses every
    session that has lines before and after this line. If the file names no sessions, all its lines
    belong to one session.
    """
    sessions: dict[str, _Session] = {}
    taken = [(line, *_take(sessions, line)) for line in lines]
    for line in lines:
        if isinstance(line.value, Malformed):
            for session in sessions.values():
                alone = len(sessions) == 1 and not session.name
                if alone or session.begin < line.number < session.end_line:
                    session.fault = session.fault or f"line {line.number} may belong to the session"
    ends = {name: session.end() for name, session in sessions.items()}
    for line, name, found, used in taken:
        if name is None or found is not None or not used:
            yield line, found, used
            continue
        end = ends[name]
        if isinstance(end, Malformed):
            yield line, end, False
        else:
            yield line, end if sessions[name].last == line.number else None, True


def _take(sessions: dict[str, _Session], line: Line) -> tuple[str | None, Found, bool]:
    """Reads one line; returns (name of its session, what it completed, whether it was used)."""
    session = None
    try:
        record = mapping(decoded(line), "the record")
        if "messages" in record:
            return None, _whole(record), True
        name = scalar(record.get("session", ""), "'session'")
        session = sessions.setdefault(name, _Session(name, begin=line.number))
        session.end_line = line.number
        used = _facts(session, record)
        if "message" in record or "jsonrpc" in record:
            used = _message(session, record.get("message", record)) or used
    except (Malformed, RecursionError) as error:
        if session is not None:
            session.fault = session.fault or f"line {line.number} of the session is malformed"
        return None, Malformed(str(error)), False
    session.last = line.number if used else session.last
    return name, None, used
