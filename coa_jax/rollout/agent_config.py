"""Defines the settings of agent programs, which solve tasks by calling the policy over HTTP."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from coa_jax.config.extensions import ExtensionKind, Named, find
from coa_jax.config.fields import Bounded, Natural, Place, Port, Seconds, Size
from coa_jax.config.preflight import Needs, code_needs
from coa_jax.errors import UserError

AGENTS = ExtensionKind(
    "agent",
    "coa_jax.agents",
    {},
    offers=("task", "question", "base_url", "api_key", "model"),
    needs=("base_url",),
)
"""The kind of async functions that solve a task through an OpenAI-compatible endpoint.

The parameter ``task`` receives the JSON object that a program would read from its standard input.
The function returns the value that a program would print as its last line, see docs/agents.md.
"""


@dataclasses.dataclass(frozen=True)
class AgentConfig(Bounded):
    """Settings of an agent program that takes the place of the tool loop.

    By default there is no agent program.

    Attributes:
        command: command line of the program; "" for no program. The program is started once per
            sample, in the working directory and without a shell.
        function: path ``package.module:name`` of an async function that takes the place of the
            program, see `AGENTS`; "" for no function.
        options: keyword arguments of the function.
        concurrency: maximum number of programs that run at the same time; 0 for the number of slots
            of the engines.
        seconds: time limit of a program in seconds of wall-clock time (stop reason ``deadline``).
            It also applies if ``max_staleness`` is 0, when RL ignores ``rollout.max_seconds`` to be
            reproducible.
        max_requests: maximum number of requests of a program; further requests are refused (stop
            reason ``turns``).
        host: address on which the endpoint for the programs listens. Each request must carry the
            key of its session.
        port: port of the endpoint; 0 for any free port.
    """

    command: Place = ""
    function: Annotated[str, Named(AGENTS, "")] = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    concurrency: Natural = 0
    seconds: Seconds = 600.0
    max_requests: Size = 100
    host: Place = "127.0.0.1"
    port: Port = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command and self.function:
            raise UserError("command and function are both set; give one of the two")
        if self.options and not self.function:
            raise UserError("options are set, and function is empty; options belong to a function")
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise UserError(f"command cannot be parsed as a command line: {error}") from None

    def __bool__(self) -> bool:
        """Whether a program or a function is set."""
        return bool(self.command or self.function)

    def needs(self) -> Needs:
        """Returns what agent programs need before a run can start, see `config.preflight.Needs`.

        This is the extra ``serve`` with the packages of the HTTP server, and what the attribute
        ``needs`` of ``function`` names, such as further packages. Without a program, it is nothing.
        """
        function = code_needs(AGENTS, self.function, self.options)
        return Needs(("serve",)) + function if self else Needs()


RUNNERS = ExtensionKind("runner of agent programs", "coa_jax.agent_programs", {})
"""Classes that let agent programs call the policy, see `serve.agents.AgentPrograms`."""


def agent_programs() -> Any:
    """Returns a `serve.agents.AgentPrograms`, which lets agent programs call the policy by HTTP.

    The class is imported only by this call, because other runs need no HTTP server.
    """
    return find(RUNNERS, "http", "agent")()
