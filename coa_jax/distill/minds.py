"""The interface of minds: the part of an agent that decides, given what the agent can see.

The team loop (`coa_jax.distill.team`) delivers messages; minds write them. A mind sees only an
`AgentView`, so a gold answer cannot reach it. `coa_jax.distill.llm` implements minds with a
language model; `coa_jax.distill.scripted` contains the deterministic minds of the default data set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from coa_jax.distill.messages import Kind, Message

MOVES: Mapping[str, tuple[tuple[str, Kind], ...]] = {
    "manager": (
        ("planner", Kind.REQUEST),
        ("search", Kind.REQUEST),
        ("code", Kind.REQUEST),
        ("reflection", Kind.REQUEST),
        ("verification", Kind.SUGGESTION),
        ("user", Kind.ANSWER),
    ),
    "planner": (("manager", Kind.PLAN),),
    "search": (("tool", Kind.CALL), ("manager", Kind.REPORT)),
    "code": (("tool", Kind.CALL), ("manager", Kind.REPORT)),
    "reflection": (("manager", Kind.REFLECTION),),
    "verification": (("manager", Kind.VERDICT),),
}
"""Allowed recipients and kinds of each agent's messages; ``tool`` stands for any tool of the
agent.
"""

DUTIES: Mapping[str, str] = {
    "manager": "You lead the team. Ask one agent at a time, then answer the user.",
    "planner": "You split the question into ordered steps.",
    "search": "You call the search tool and report what the documents say.",
    "code": "You write short programs, run them, and report what they print.",
    "reflection": "You grade the work so far (information_conflict, tool_effectiveness, "
    "trajectory_monitoring) as Good, Fair or Poor.",
    "verification": "You score a suggested answer from 1 (wrong) to 4 (nothing wrong).",
}


@dataclasses.dataclass(frozen=True)
class AgentView:
    """Everything that a mind may know when it acts.

    Attributes:
        role: the agent that acts.
        question: the user's question.
        protocol: name of the protocol that the manager follows.
        episode: identity of the run; opaque, used to seed choices.
        messages: the shared log so far, oldest first.
        tools: names of the tools that this agent may call.
    """

    role: str
    question: str
    protocol: str
    episode: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()

    @property
    def last(self) -> Message:
        """The message that activated this agent."""
        return self.messages[-1]

    def of_kind(self, kind: Kind) -> tuple[Message, ...]:
        """The messages of one kind, oldest first."""
        return tuple(m for m in self.messages if m.kind is kind)


@dataclasses.dataclass(frozen=True)
class Action:
    """The decision of a mind: the message to send next (see `Message` for the fields)."""

    recipient: str
    kind: Kind
    content: str
    thought: str = ""
    slip: str | None = None


@runtime_checkable
class Mind(Protocol):
    """Decides for one agent; stateless, so one mind serves many runs."""

    async def act(self, view: AgentView) -> Action:
        """Returns the next message of ``view.role``."""
        ...


Minds = Mapping[str, Mind]
"""A mind for every name in `coa_jax.distill.messages.AGENTS`."""
