"""What a mind is: the part of an agent that decides, given what the agent can see.

The team loop (`coa_jax.distill.team`) moves messages; minds write them.  A mind sees an
`AgentView` and nothing else, so a gold answer cannot reach it.  `TextMind` puts any
text-in, text-out model behind the same interface; `coa_jax.distill.scripted` holds the
deterministic minds that the default data set is made with.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping
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

    def render(self) -> str:
        """The view as a prompt for a language model."""
        moves = [
            f"{to} {kind}"
            for name, kind in MOVES[self.role]
            for to in (self.tools if name == "tool" else (name,))
        ]
        log = "\n".join(
            f"[{m.index}] {m.sender} -> {m.recipient} ({m.kind}): "
            + (f"{m.thought} // " if m.thought else "")
            + m.content
            for m in self.messages
        )
        return (
            f"You are the {self.role} agent of a team. {DUTIES[self.role]}\n"
            f"Reply in this form, with To and Kind from: {'; '.join(moves)}.\n"
            "Thought: <one or two sentences>\nTo: <recipient>\nKind: <kind>\nContent: <text>\n\n"
            f"Question: {self.question}\n\nMessages so far:\n{log}\n"
        )


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

_REPLY = re.compile(
    r"\s*(?:Thought:[ \t]*(?P<thought>.*?)\s*\n\s*)?To:[ \t]*(?P<to>\w+)\s*\n"
    r"\s*Kind:[ \t]*(?P<kind>\w+)\s*\n\s*Content:[ \t]*(?P<content>.*?)\s*\Z",
    re.DOTALL,
)


def parse_action(reply: str) -> Action:
    """Reads a model's reply in the form that `AgentView.render` asks for.

    Raises:
        ValueError: the reply has another form or names an unknown kind.
    """
    match = _REPLY.match(reply)
    if match is None:
        raise ValueError("the reply lacks the lines To, Kind and Content")
    kind = Kind(match["kind"].lower())
    return Action(match["to"], kind, match["content"], match["thought"] or "")


@dataclasses.dataclass(frozen=True)
class TextMind:
    """A mind made of a language model.

    Attributes:
        complete: prompt in, reply out; any client of a served model.
        attempts: how often a reply that cannot be parsed is asked for again.
    """

    complete: Callable[[str], Awaitable[str]]
    attempts: int = 2

    async def act(self, view: AgentView) -> Action:
        """Asks the model; raises ValueError when no attempt gave a readable reply."""
        prompt = view.render()
        problem = ""
        for _ in range(self.attempts):
            try:
                return parse_action(await self.complete(prompt + problem))
            except ValueError as error:
                problem = f"\nYour last reply could not be read: {error}.\n"
        raise ValueError(f"the mind of {view.role} gave no readable reply: {problem.strip()}")
