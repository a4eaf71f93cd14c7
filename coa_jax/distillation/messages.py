"""Defines the message log of the teacher: the messages between agents, and results of tools.

Agents communicate only through messages, so the log contains the whole run. Trajectories, and what
each agent sees, are derived from the log. This module does not depend on tasks or gold answers.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

from coa_jax.files import jsonl

AGENTS = ("manager", "planner", "search", "code", "reflection", "verification")
"""Names of the agents of the teacher; other senders and recipients are ``user`` and the tools."""


def agent_of(tool: str) -> str:
    """Returns the agent that may call a tool: ``code`` for the tool ``code``, else ``search``."""
    return "code" if tool == "code" else "search"


_SURROGATES = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


class Kind(enum.StrEnum):
    """The purpose of a message between agents of the teacher, such as a request or a plan."""

    QUESTION = "question"  # user -> manager
    REQUEST = "request"  # manager -> another agent
    PLAN = "plan"  # planner -> manager
    CALL = "call"  # search or code -> tool
    OBSERVATION = "observation"  # tool -> search or code
    REPORT = "report"  # search or code -> manager
    REFLECTION = "reflection"  # reflection -> manager
    SUGGESTION = "suggestion"  # manager -> verification
    VERDICT = "verdict"  # verification -> manager
    ANSWER = "answer"  # manager -> user


class Ending(enum.StrEnum):
    """Why a run of the teacher stopped: with an answer, or for another reason."""

    ANSWER = "answer"
    LIMIT = "limit"  # too many messages
    ILLEGAL = "illegal"  # an agent sent what its role may not send
    MIND_ERROR = "mind_error"  # an agent function raised an exception or gave no valid reply


@dataclasses.dataclass(frozen=True)
class Message:
    """A message between two participants of a run: the user, an agent or a tool.

    Attributes:
        index: position of the message in the log, from 0.
        sender: ``user``, the name of an agent, or the name of a tool.
        recipient: ``user``, the name of an agent, or the name of a tool.
        kind: purpose of the message.
        content: text of the message: query or program of a call, text of an observation, steps of a
            plan, grades of the work so far (kind ``reflection``), score of a suggested answer (kind
            ``verdict``), or the answer.
        thought: reasoning of the sender before the message.
        outcome: how the tool call ended (``coa_jax.tools.base.Outcome``) if the message is an
            observation; None for other messages.
        slip: name of the deliberate mistake that a scripted agent made with the message; None for
            no mistake.
        invented: whether the conversion of another system's log added the message.
    """

    index: int
    sender: str
    recipient: str
    kind: Kind
    content: str
    thought: str = ""
    outcome: str | None = None
    slip: str | None = None
    invented: bool = False


@dataclasses.dataclass(frozen=True)
class MessageLog:
    """The messages of a finished run of the teacher on one question.

    Attributes:
        episode: id of the run, which is the id of its task.
        question: the question that the user asked.
        protocol: name of the protocol that the manager, the agent which leads the team, follows.
        messages: all messages in order.
        ending: why the run stopped.
        error: explanation in one line if the ending is not ``answer``; otherwise "".
    """

    episode: str
    question: str
    protocol: str
    messages: tuple[Message, ...]
    ending: Ending
    error: str = ""

    @property
    def answer(self) -> str | None:
        """The final answer of the run; None if the run ended without an answer."""
        last = self.messages[-1]
        return last.content if last.kind is Kind.ANSWER else None

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The tool calls of the run as pairs (tool, arguments), oldest first."""
        return tuple((m.recipient, m.content) for m in self.messages if m.kind is Kind.CALL)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Names of the deliberate mistakes that scripted agents made in the run, oldest first."""
        return tuple(m.slip for m in self.messages if m.slip)

    def count(self, kind: Kind) -> int:
        """Returns how many messages of a kind the run has, not counting invented messages."""
        return sum(m.kind is kind and not m.invented for m in self.messages)


def to_json(log: MessageLog) -> dict[str, Any]:
    """Returns a log as a JSON object; message fields with default values are left out."""
    messages = [
        {
            field.name: getattr(message, field.name)
            for field in dataclasses.fields(message)
            if getattr(message, field.name) != field.default
        }
        for message in log.messages
    ]
    return {**vars(log), "messages": messages}


def from_json(row: Any) -> MessageLog:
    """Restores a log from the JSON object that `to_json` returned.

    Raises:
        KeyError, TypeError or ValueError: the value is not a message log.
    """
    messages = tuple(
        Message(**{**jsonl.fields(Message, m), "kind": Kind(m["kind"])}) for m in row["messages"]
    )
    if not messages or any(m.index != i for i, m in enumerate(messages)):
        raise ValueError("messages are missing or not numbered from 0")
    fields = {**jsonl.fields(MessageLog, row), "messages": messages}
    return MessageLog(**{**fields, "ending": Ending(row["ending"])})
