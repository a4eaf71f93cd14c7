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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from coa_jax.distillation.readers.base import (
    Conversation,
    Field,
    Found,
    Line,
    Malformed,
    Session,
    Trace,
    read_sessions,
)
from coa_jax.tools.mcp_tool import result_text

_FACTS: Mapping[str, Callable[[Field], Any]] = {
    "question": Field.text,
    "answer": lambda field: field.scalar().strip(),
    "gold": Field.answers,
}
"""What a session is about, beside its messages: the name of each field -> how to read the field."""


@dataclasses.dataclass
class _Session(Session):
    """The messages of a session.

    `facts` holds the values of `_FACTS`. `others` maps the ids of requests that are not tool calls,
    from the client and from the server, to whether they are still unanswered.
    """

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: dict[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    returns: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    others: dict[str, bool] = dataclasses.field(default_factory=dict)

    def add(self, record: Field) -> bool:
        """Reads one line; returns whether it belongs to the run."""
        used = _facts(self, record)
        if "message" in record.mapping():
            used = _message(self, record["message"]) or used
        elif "jsonrpc" in record.mapping():
            used = _message(self, record) or used
        return used

    def trace(self) -> Trace:
        """Returns the trace of the session: its tool calls in order, each with its result."""
        if not self.facts.get("question"):
            raise Malformed(f"the session {self.name!r} has no question")
        talk = Conversation(self.facts["question"])
        for identity, (tool, arguments) in self.calls.items():
            if identity not in self.returns:
                raise Malformed(f"no result of the call {identity}")
            talk.call(tool, arguments, *self.returns[identity])
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
        arguments = params.get("arguments").value
        session.calls[identity] = params["name"].text(), arguments or {}
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


def is_record(value: Any) -> bool:
    """Returns whether a JSON value is a message of JSON-RPC, or holds such messages."""
    if not isinstance(value, dict):
        return False
    messages = value.get("messages")
    inner = messages[0] if isinstance(messages, list) and messages else value.get("message")
    return "jsonrpc" in value or (isinstance(inner, dict) and "jsonrpc" in inner)


def _session_of(record: Field) -> str | None:
    value = record.mapping()
    if "messages" in value:
        return None
    return record["session"].scalar() if "session" in value else ""


def read(lines: Iterable[Line]) -> Iterator[tuple[Line, Found, bool]]:
    """Converts the sessions in the lines of a file to traces, see `readers.base.read_sessions`."""
    return read_sessions(lines, _Session, _session_of, _session_trace)
