"""Settings of programs that solve tasks through the policy."""

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

``task`` is the object that a program reads on its standard input; the function returns what a
program may print last: see docs/agents.md.
"""


@dataclasses.dataclass(frozen=True)
class AgentConfig(Bounded):
    """A program in the place of the loop of tools; none by default.

    Attributes:
        command: command line of the program, which is started once for each sample, in the working
            directory and without a shell.
        function: an async function in its place, ``package.module:name``, see `AGENTS`.
        options: of the function.
        concurrency: programs that run at a time; 0 for as many as there are slots.
        seconds: wall time of a program (``deadline``); it holds with ``max_staleness=0`` too.
        max_requests: completions of a session; further ones are refused (``turns``).
        host, port: address of the endpoint; port 0 is any free port.  Every session has a key.
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
            raise UserError("options are those of a function, and function is empty")
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise UserError(f"command is no command line: {error}") from None

    def __bool__(self) -> bool:
        """Whether there is a program."""
        return bool(self.command or self.function)
