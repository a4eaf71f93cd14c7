"""The message log of the teacher: all messages between agents, and the answers of tools.

Agents communicate only through messages, so the log is the whole run. Views of agents and
trajectories are derived from it, and storing it stores the run. This module does not depend on
tasks or gold answers.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

from coa_jax import jsonl

AGENTS = ("manager", "planner", "search", "code", "reflection", "verification")
"""The agents of the teacher system; ``user`` and the tools are the other senders and recipients."""

_SURROGATES = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """Replaces surrogate halves, which files and tokenizers cannot encode, by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


class Kind(enum.StrEnum):
    """The purpose of a message."""

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
    """Why a run of the teacher stopped."""

    ANSWER = "answer"
    LIMIT = "limit"  # too many messages
    ILLEGAL = "illegal"  # an agent sent what its role may not send
    MIND_ERROR = "mind_error"  # a mind raised an exception


@dataclasses.dataclass(frozen=True)
class Message:
    """One message between two participants.

    Attributes:
        index: position in the log, from 0.
        sender: ``user``, an agent's name, or a tool's name.
        recipient: likewise.
        kind: purpose of the message.
        content: query or program of a call, text of an observation, steps of a plan, grades of a
            reflection, score of a verdict, or the answer.
        thought: reasoning of the sender before it acted.
        outcome: how the call ended, for observations (``coa_jax.tools.base.Outcome``).
        slip: name of the deliberate mistake of a scripted mind, if any.
    """

    index: int
    sender: str
    recipient: str
    kind: Kind
    content: str
    thought: str = ""
    outcome: str | None = None
    slip: str | None = None


@dataclasses.dataclass(frozen=True)
class MessageLog:
    """A finished run of the teacher on one question.

    Attributes:
        episode: identity of the run, the id of its task.
        question: the question.
        protocol: name of the protocol that the manager follows.
        messages: all messages in order.
        ending: why the run stopped.
        error: one line of explanation if the ending is not ``answer``.
    """

    episode: str
    question: str
    protocol: str
    messages: tuple[Message, ...]
    ending: Ending
    error: str = ""

    @property
    def answer(self) -> str | None:
        """The final answer, or None if the run ended without one."""
        last = self.messages[-1]
        return last.content if last.kind is Kind.ANSWER else None

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """(tool, arguments) of every tool call, oldest first."""
        return tuple((m.recipient, m.content) for m in self.messages if m.kind is Kind.CALL)

    @property
    def slips(self) -> tuple[str, ...]:
        """Names of the deliberate mistakes, oldest first."""
        return tuple(m.slip for m in self.messages if m.slip)

    def count(self, kind: Kind) -> int:
        """Number of messages of a kind."""
        return sum(m.kind is kind for m in self.messages)


def to_json(log: MessageLog) -> dict[str, Any]:
    """Returns a log as JSON values; fields with default values are left out."""
    messages = [
        {
            field.name: getattr(message, field.name)
            for field in dataclasses.fields(message)
            if getattr(message, field.name) != field.default
        }
        for message in log.messages
    ]
    return {
        "episode": log.episode,
        "question": log.question,
        "protocol": log.protocol,
        "messages": messages,
        "ending": str(log.ending),
        "error": log.error,
    }


def from_json(row: Any) -> MessageLog:
    """Reads a log from JSON values, the inverse of `to_json`.

    Raises:
        KeyError, TypeError or ValueError: the value is not a message log.
    """
    messages = tuple(
        Message(**{**jsonl.fields(Message, m), "kind": Kind(m["kind"])}) for m in row["messages"]
    )
    if not messages or any(m.index != i for i, m in enumerate(messages)):
        raise ValueError("messages are missing or not numbered from 0")
    found = {**jsonl.fields(MessageLog, row), "messages": messages}
    return MessageLog(**{**found, "ending": Ending(row["ending"])})
