"""Defines agent functions, each of which decides which message its agent sends next.

Agent functions write messages, and the team loop (`distillation.team`) delivers them. An agent
function sees only an `AgentView`, so it never sees a gold answer. `distillation.llm` implements
agent functions by a language model. `demo.scripted` implements them by deterministic rules, which
create the default data set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping

from coa_jax.config.extensions import ExtensionKind, bind
from coa_jax.distillation.messages import Kind, Message

ALLOWED_MESSAGES: Mapping[str, tuple[tuple[str, Kind], ...]] = {
    "manager": (
        *((agent, Kind.REQUEST) for agent in ("planner", "search", "code", "reflection")),
        ("verification", Kind.SUGGESTION),
        ("user", Kind.ANSWER),
    ),
    "planner": (("manager", Kind.PLAN),),
    "search": (("tool", Kind.CALL), ("manager", Kind.REPORT)),
    "code": (("tool", Kind.CALL), ("manager", Kind.REPORT)),
    "reflection": (("manager", Kind.REFLECTION),),
    "verification": (("manager", Kind.VERDICT),),
}
"""Maps each agent to the pairs (recipient, kind) of the messages that it may send.

The recipient ``tool`` stands for any tool of the agent.
"""

ROLE_DESCRIPTIONS: Mapping[str, str] = {
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
    """Everything that an agent function knows when it decides what its agent does next.

    Attributes:
        role: name of the agent for which the agent function decides.
        question: the question of the user.
        protocol: name of the protocol that the manager, the agent which leads the team, follows.
        episode: id of the run, from which scripted agents derive their random choices.
        messages: all messages of the run so far, oldest first.
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
        """The newest message of the run, to which this agent responds."""
        return self.messages[-1]

    def of_kind(self, kind: Kind) -> tuple[Message, ...]:
        """Returns the messages of the run that are of a given kind, oldest first."""
        return tuple(m for m in self.messages if m.kind is kind)


@dataclasses.dataclass(frozen=True)
class Action:
    """The message that an agent function decides to send; for the fields see `Message`."""

    recipient: str
    kind: Kind
    content: str
    thought: str = ""
    slip: str | None = None


AgentFunction = Callable[[AgentView], Awaitable[Action]]
"""A function that returns the next message of the agent ``view.role``.

An agent function has no state, so many runs can share an agent function.
"""

AgentFunctions = Mapping[str, AgentFunction]
"""Maps every name in `coa_jax.distillation.messages.AGENTS` to an agent function."""

TEACHERS = ExtensionKind(
    "teacher", "coa_jax.teachers", {}, offers=("mistake_rate", "unrecovered_rate", "seed")
)
"""Functions that return the agent functions of a whole team, by name of the agent.

A teacher without a language model may make deliberate mistakes, so that runs contain corrections:
``mistake_rate`` is the probability that a decision is a mistake, ``unrecovered_rate`` the
probability that a wrong answer passes the double check, and ``seed`` decides which ones.
"""


def load_agents(
    team: str = "scripted",
    mistake_rate: float = 0.0,
    unrecovered_rate: float = 0.0,
    seed: int = 0,
) -> AgentFunctions:
    """Returns the agent functions of a team that needs no language model.

    An agent function decides the next message of its agent.

    Args:
        team: name of the function that creates the agent functions, see `TEACHERS`; or its path
            ``package.module:name``.
        mistake_rate, unrecovered_rate, seed: probabilities and seed of deliberate mistakes, see
            `TEACHERS`.

    Raises:
        UserError: there is no function of this name.
    """
    teacher = bind(TEACHERS, team, {}, "config.teacher.team")
    agents: AgentFunctions = teacher(
        mistake_rate=mistake_rate, unrecovered_rate=unrecovered_rate, seed=seed
    )
    return agents
