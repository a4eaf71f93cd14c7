"""What a mind is: the part of an agent that decides, given what the agent can see.

The team loop (`coa_jax.distill.team`) moves messages; minds write them.  A mind sees an
`AgentView` and nothing else, so a gold answer cannot reach it.  `coa_jax.distill.llm` puts a
language model behind this interface; `coa_jax.distill.scripted` holds the deterministic minds that
the default data set is made with.
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
"""What each agent may send to whom; ``tool`` stands for any tool that the agent holds."""

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
    """All that a mind may know when it acts.

    Attributes:
        role: the agent that acts.
        question: the user's question.
        protocol: name of the protocol the manager works under.
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
        """The message that woke this agent."""
        return self.messages[-1]

    def of_kind(self, kind: Kind) -> tuple[Message, ...]:
        """The messages of one kind, oldest first."""
        return tuple(m for m in self.messages if m.kind is kind)


@dataclasses.dataclass(frozen=True)
class Action:
    """What a mind decides: the message to send next (see `Message` for the fields)."""

    recipient: str
    kind: Kind
    content: str
    thought: str = ""
    slip: str | None = None


@runtime_checkable
class Mind(Protocol):
    """Decides for one agent; holds no state of a run, so one mind serves many runs."""

    async def act(self, view: AgentView) -> Action:
        """Returns the next message of ``view.role``."""
        ...


Minds = Mapping[str, Mind]
"""A mind for every name in `coa_jax.distill.messages.AGENTS`."""
