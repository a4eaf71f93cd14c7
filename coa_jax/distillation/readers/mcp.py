"""Reads logs of the Model Context Protocol: JSON-RPC messages of ``tools/call`` and their results.

A file contains one session per line, or one message per line (docs/data.md). The field ``session``
names the session of a message. Messages without this field belong to the only session of the file.

The format lacks:

- the question, the answer and every thought, because the text of the model is not part of the
  messages between a client and its tools. Additional lines give the question, which is required,
  and the answer;
- results other than text (the session is rejected);
- structured content of a result that also has text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coa_jax.distillation.readers.base import (
    Conversation,
    Field,
    Found,
    Line,
    Malformed,
    Trace,
    decoded,
)
from coa_jax.distillation.readers.calls import body_of, tag_of
from coa_jax.tools.mcp_tool import result_text

_FACTS: Mapping[str, Callable[[Field], Any]] = {
    "question": Field.text,
    "answer": lambda field: field.scalar().strip(),
    "gold": Field.answers,
}
"""What a session is about, beside its messages: the name of each field -> how to read the field."""


@dataclasses.dataclass
class _Session:
    """The state of a session while its lines are read.

    `facts` holds the values of `_FACTS`. `others` maps the ids of requests that are not tool calls,
    from the client and from the server, to whether they are still unanswered. `begin` and
    `end_line` are the numbers of the first and the last line of the session, and `last` is the
    number of the last line that belongs to the run. `fault` says why the session is invalid.
    """

    name: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    returns: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    others: dict[str, bool] = dataclasses.field(default_factory=dict)
    begin: int = 0
    end_line: int = 0
    last: int = 0
    fault: str = ""

    def trace(self) -> Trace:
        """Returns the trace of the session: its tool calls in order, each with its result."""
        if self.fault:
            raise Malformed(self.fault)
        if not self.facts.get("question"):
            raise Malformed(f"the session {self.name!r} has no question")
        talk = Conversation(self.facts["question"])
        for identity, (tag, body) in self.calls.items():
            if identity not in self.returns:
                raise Malformed(f"no result of the call {identity}")
            talk.call(tag, body, *self.returns[identity])
        talk.answer(self.facts.get("answer", ""))
        return Trace(talk.finish(self.name), self.facts.get("gold", ()))


def _facts(session: _Session, record: Field) -> bool:
    """Reads the facts in a record; returns whether the record has any.

    Raises:
        Malformed: a fact differs from the one that is known, because two runs are mixed.
    """
    names = [name for name in _FACTS if record.get(name)]
    for name in names:
        value = _FACTS[name](record[name])
        if (session.facts.get(name) or value) != value:
            raise Malformed(f"a second {name} in the session: give each run a 'session' of its own")
        session.facts[name] = value
    return bool(names)


def _message(session: _Session, message: Field) -> bool:
    """Reads one JSON-RPC message; returns whether it belongs to a tool call."""
    if message["jsonrpc"].value != "2.0":
        raise Malformed("a message is not of JSON-RPC 2.0")
    identity = str(message.get("id").value)
    if message.get("method").value == "tools/call":
        params = message["params"]
        if identity in session.calls:
            raise Malformed(f"two calls with the id {identity}")
        tag = tag_of(params["name"].text())
        session.calls[identity] = tag, body_of(tag, params.get("arguments").value or {})
        return True
    if "method" in message.mapping():
        session.others[identity] = True
        return False  # a handshake, a notification, or a request of the server
    if _answers_another(session, identity, message):
        session.others[identity] = False
        return False
    if identity not in session.calls:
        raise Malformed(f"a result of the request {identity}, which is not there")
    if identity in session.returns:
        raise Malformed(f"two results of the call {identity}")
    if "error" in message.mapping():
        session.returns[identity] = message["error"].get("message").optional_scalar(), False
        return True
    result = message["result"]
    structured = result.get("structuredContent")
    content = result.get("content") if structured else result["content"]
    parts = content.items("part of a result") if content else []
    if any(part.get("type").value != "text" for part in parts):
        raise Malformed("a result holds something besides text")
    shown = result_text([("text", part["text"].text()) for part in parts], structured.value)
    session.returns[identity] = shown, not result.get("isError").value
    return True


def _answers_another(session: _Session, identity: str, message: Field) -> bool:
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
    if "error" in message.mapping():
        raise Malformed(f"an error of {identity}, which is both a call and a request of the server")
    result = message["result"].mapping()
    returned = isinstance(result.get("content"), list) or "structuredContent" in result
    return not returned or "role" in result or "action" in result


def _session_trace(record: Field) -> Trace:
    session = _Session(record.get("id").optional_scalar())
    _facts(session, record)
    for message in record["messages"].items("message"):
        _message(session, message)
    return session.trace()


def read(lines: Sequence[Line]) -> Iterator[tuple[Line, Found, bool]]:
    """Converts the sessions in the lines of a file to traces, see `readers.base.TraceReader`.

    If a line of a session is malformed, the reader refuses the whole session, because the content
    of the line is unknown. A line that is not JSON does not name its session. Therefore the reader
    refuses every session that has lines before and after this line. If the file names no sessions,
    all its lines belong to one session.
    """
    sessions: dict[str, _Session] = {}
    entries = [(line, *_read_line(sessions, line)) for line in lines]
    for line in lines:
        if isinstance(line.value, Malformed):
            for session in sessions.values():
                alone = len(sessions) == 1 and not session.name
                if alone or session.begin < line.number < session.end_line:
                    session.fault = session.fault or f"line {line.number} may belong to the session"
    ends: dict[str, Trace | Malformed] = {}
    for name, session in sessions.items():
        try:
            ends[name] = session.trace()
        except Malformed as error:
            ends[name] = error
    for line, session_name, trace, used in entries:
        if session_name is None or not used:
            yield line, trace, used
        elif isinstance(end := ends[session_name], Malformed):
            yield line, end, False
        else:
            yield line, end if sessions[session_name].last == line.number else None, True


def _read_line(sessions: dict[str, _Session], line: Line) -> tuple[str | None, Found, bool]:
    """Reads one line; returns (name of its session, what it completed, whether it was used)."""
    session = None
    try:
        record = Field(decoded(line))
        if "messages" in record.mapping():
            return None, _session_trace(record), True
        name = record.get("session").scalar() if "session" in record.mapping() else ""
        session = sessions.setdefault(name, _Session(name, begin=line.number))
        session.end_line = line.number
        used = _facts(session, record)
        if "message" in record.mapping():
            used = _message(session, record["message"]) or used
        elif "jsonrpc" in record.mapping():
            used = _message(session, record) or used
    except (Malformed, RecursionError) as error:
        if session is not None:
            session.fault = session.fault or f"line {line.number} of the session is malformed"
        return None, Malformed(str(error)), False
    session.last = line.number if used else session.last
    return name, None, used
