"""Settings of agent programs, which solve tasks by calling the policy over HTTP."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from coa_jax.bounds import Bounded, Natural, Place, Port, Seconds, Size
from coa_jax.errors import UserError
from coa_jax.extensions import Kind, Named

AGENTS = Kind(
    "agent",
    "coa_jax.agents",
    {},
    offers=("task", "question", "base_url", "api_key", "model"),
    needs=("base_url",),
)
"""An async function that solves a task through an OpenAI-compatible endpoint.

Its parameter ``task`` is the JSON object that a program reads from its standard input.  It returns
the value that a program would print as its last line; see docs/agents.md.
"""


@dataclasses.dataclass(frozen=True)
class AgentConfig(Bounded):
    """An agent program that replaces the tool loop; by default there is none.

    Attributes:
        command: command line of the program.  It is started once per sample, in the working
            directory and without a shell.
        function: an async function instead of a program, ``package.module:name``, see `AGENTS`.
        options: keyword arguments of the function.
        concurrency: programs that run at a time; 0 for the number of the engines' slots.
        seconds: time limit of a program in wall-clock seconds (stop reason ``deadline``); it
            applies with ``max_staleness=0`` too.
        max_requests: maximum number of completions per session; further requests are refused (stop
            reason ``turns``).
        host: address on which the endpoint listens; each session needs its own key.
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
        """Whether there is a program or a function."""
        return bool(self.command or self.function)
