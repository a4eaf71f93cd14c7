"""Builds message logs by hand, as a multi-agent system could have written them."""

from __future__ import annotations

import asyncio

from coa_jax.distillation.message_order import Completion
from coa_jax.distillation.messages import Ending, Kind, Message, MessageLog
from coa_jax.distillation.pipeline import graded_runs, run_teacher, select

INVENTING = Completion(thoughts=True, verification=True)
"""Settings that invent thoughts and a verification where a protocol demands them."""

SENDERS = {
    Kind.QUESTION: ("user", "manager"),
    Kind.REQUEST: ("manager", "search"),
    Kind.PLAN: ("planner", "manager"),
    Kind.REPORT: ("search", "manager"),
    Kind.REFLECTION: ("reflection", "manager"),
    Kind.SUGGESTION: ("manager", "verification"),
    Kind.VERDICT: ("verification", "manager"),
    Kind.ANSWER: ("manager", "user"),
}


def message(kind, content, thought="", tool="wiki_search", outcome="ok", index=0):
    """One message; calls and observations name their tool."""
    kind = Kind(kind)
    if kind is Kind.CALL:
        return Message(index, "search", tool, kind, content, thought)
    if kind is Kind.OBSERVATION:
        return Message(index, tool, "search", kind, content, thought, outcome)
    sender, recipient = SENDERS[kind]
    return Message(index, sender, recipient, kind, content, thought)


def log_of(*rows, protocol="generalist", episode="e", question="Q?"):
    """A log from rows of arguments of `message`; the question is put in front."""
    rows = [("question", question), *rows]
    messages = tuple(message(*row, index=i) for i, row in enumerate(rows))
    ending = Ending.ANSWER if messages[-1].kind is Kind.ANSWER else Ending.LIMIT
    return MessageLog(episode, question, protocol, messages, ending)


def distill_tasks(tasks, tools, config, agents=None):
    """The records of the runs that pass the filters, and the report of the filters."""
    logs = asyncio.run(run_teacher(tasks, tools, config, agents))
    return select(graded_runs(tasks, logs, config.judges), config)
