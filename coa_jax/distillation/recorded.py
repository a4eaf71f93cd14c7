"""Reconstructs runs from existing records, so that filters also work on published data sets.

The messages of a run are parsed from the tags of its record. The parts of the record stay
unchanged.
"""

from __future__ import annotations

import dataclasses

from coa_jax.data.trajectory import DistilledRecord
from coa_jax.distillation.convert import figures_of, invented_segments
from coa_jax.distillation.messages import Ending, Kind, Message, MessageLog, agent_of
from coa_jax.protocol import get_protocol, observation_body, parse

_ROLES = {
    "plan": (Kind.PLAN, "planner", "manager"),
    "reflection": (Kind.REFLECTION, "reflection", "manager"),
    "suggested_answer": (Kind.SUGGESTION, "manager", "verification"),
    "double_check": (Kind.VERDICT, "verification", "manager"),
    "answer": (Kind.ANSWER, "manager", "user"),
}
"""Maps a tag to the kind, the sender and the recipient of its message."""


def log_of(record: DistilledRecord) -> MessageLog:
    """Reconstructs the messages of a run from its record, as the inverse of `convert.convert`.

    Each action in the record, such as a plan or a tool call, becomes a message again. Thoughts, and
    text outside tags, become the field ``thought`` of the next message.
    """
    rules = get_protocol(record.protocol)
    messages = [Message(0, "user", "manager", Kind.QUESTION, record.question)]
    thoughts: list[str] = []
    tool = ""

    invented, number = invented_segments(record), -1

    def add(kind: Kind, sender: str, to: str, content: str) -> None:
        thought = " ".join(thoughts)
        thoughts.clear()
        made = Message(len(messages), sender, to, kind, content, thought)
        messages.append(dataclasses.replace(made, invented=number in invented))

    for author, text in record.parts:
        if author == "environment":
            body = observation_body(rules, text).strip("\n")
            observation = Message(
                len(messages), tool, agent_of(tool), Kind.OBSERVATION, body, outcome="ok"
            )
            messages.append(observation)
            continue
        for segment in parse(rules, text).segments:
            body = segment.body.strip()
            number += segment.role is not None
            if segment.role in rules.tools:
                tool = str(segment.role)
                add(Kind.CALL, agent_of(tool), tool, body)
            elif segment.role in _ROLES:
                add(*_ROLES[segment.role], body)
            elif body:
                thoughts.append(body)
    ending, error = Ending.ANSWER, ""
    if messages[-1].kind is not Kind.ANSWER:
        ending, error = Ending.LIMIT, "the record does not end with an answer"
    return MessageLog(record.id, record.question, record.protocol, tuple(messages), ending, error)


def with_figures(record: DistilledRecord, log: MessageLog) -> DistilledRecord:
    """Returns the record with the statistics of its run, such as the number of tool calls.

    The statistics are added to the record's metadata, where filters and summaries look for them.
    """
    metadata = record.metadata
    figures = figures_of(log, record.protocol)
    mistakes = metadata.get("mistakes")
    if isinstance(mistakes, list) and all(isinstance(mistake, str) for mistake in mistakes):
        figures["mistakes"] = mistakes
    return dataclasses.replace(record, metadata={"source": "records", **metadata, **figures})
