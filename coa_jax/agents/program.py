"""Runs an agent program or an async function for one sample, and reads its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import math
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from coa_jax.agents.config import AGENTS, AgentConfig
from coa_jax.errors import UserError
from coa_jax.extensions import bind

_TAIL = 64 << 10  # maximum number of bytes that are kept of a program's output
_GRACE_S = 10.0  # seconds in which a supervisor (`leash`) must end the program's process tree


class ProgramError(Exception):
    """Raised if a program fails.

    The sample is then masked, because the policy did not cause the failure.
    """


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome that an agent program reports for its sample.

    Attributes:
        answer: final answer; None for no answer.
        reward: reward that the program gives; None to let the graders of the run grade the answer.
    """

    answer: str | None = None
    reward: float | None = None

    @classmethod
    def read(cls, value: Any) -> Outcome:
        """Reads an outcome from the value that a program printed or a function returned.

        Args:
            value: a mapping with ``answer``, ``reward`` or ``error``; a string, which is the
                answer; or None for an empty outcome.

        Raises:
            ProgramError: the value is of another kind, or has an ``error``.
        """
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping) or not value.keys() & {"answer", "reward", "error"}:
            raise ProgramError(f"it returned {str(value)[:200]!r}, not an answer or a reward")
        if value.get("error"):
            raise ProgramError(str(value["error"]))
        answer, reward = value.get("answer"), value.get("reward")
        number = isinstance(reward, int | float) and math.isfinite(reward)
        if reward is not None and not number:
            raise ProgramError(f"its reward is {str(reward)[:200]!r}, not a finite number")
        return cls(
            None if answer is None else str(answer), None if reward is None else float(reward)
        )

    def over(self, other: Outcome) -> Outcome:
        """Returns this outcome; fields that are None get the values of the other outcome."""
        answer = other.answer if self.answer is None else self.answer
        return Outcome(answer, other.reward if self.reward is None else self.reward)


@dataclasses.dataclass(frozen=True)
class Access:
    """The address and key with which a program reaches its session.

    Attributes:
        url: address of the endpoint, without the suffix ``/v1``.
        key: key of the session.
        model: name of the model, for the field ``model`` of requests.
    """

    url: str
    key: str
    model: str

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients, with ``/v1``."""
        return f"{self.url}/v1"


Agent = Callable[[Mapping[str, Any], Access], Awaitable[Outcome]]
"""A function that solves a task, a JSON object, by calling the policy.

If it is cancelled, it ends its processes.
"""


def make_agent(config: AgentConfig) -> Agent:
    """Creates the agent that the settings name.

    Raises:
        UserError: the function does not exist, has wrong parameters, or is not async.
    """
    if config.command:
        command = shlex.split(config.command)
        return lambda task, access: run_command(command, task, access)
    call = bind(AGENTS, config.function, config.options, "agent.function")
    if not inspect.iscoroutinefunction(call.found):
        raise UserError(f"agent.function: {config.function} is not async; write 'async def'")

    async def run(task: Mapping[str, Any], access: Access) -> Outcome:
        try:
            found = await call(
                task=dict(task),
                question=task["question"],
                base_url=access.base_url,
                api_key=access.key,
                model=access.model,
            )
        except Exception as error:  # the function of a user may raise anything
            raise ProgramError(f"{type(error).__name__}: {error}") from error
        return Outcome.read(found)

    return run


async def run_command(command: list[str], task: Mapping[str, Any], access: Access) -> Outcome:
    """Runs a program, supervised by `leash`, and returns the outcome that it prints.

    The program can read the task from its standard input. The last line that the program prints
    must be its outcome: a JSON object that `Outcome.read` accepts, or the answer itself.

    Args:
        command: the program and its arguments.
        task: the task, a JSON object.
        access: address and key of the program's session.

    Raises:
        ProgramError: the program cannot be started, its exit code is not 0, or its outcome is
            invalid.
    """
    text = json.dumps(task)
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coa_jax.agents.leash", str(os.getpid()), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(task["question"], access),
            start_new_session=True,  # Ctrl-C reaches only this process, which ends its programs
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:  # a program can only be ended through a started supervisor
        await _end(await starting)
        raise
    except OSError as error:  # for example, too many processes or open files
        raise ProgramError(f"no process can be started: {error.strerror}") from error
    assert process.stdin and process.stdout and process.stderr
    reading = [asyncio.ensure_future(_tail(s)) for s in (process.stdout, process.stderr)]
    try:
        with contextlib.suppress(OSError):  # the program may exit before it reads its input
            process.stdin.write(text.encode())
            await process.stdin.drain()
        process.stdin.close()
        printed, errors = await asyncio.gather(*reading)
        code = await process.wait()
    finally:
        if process.returncode is None:
            await asyncio.shield(_end(process))
        for task_ in reading:
            task_.cancel()
    if code:
        last = errors.strip().splitlines()[-1:] or ["its standard error is empty"]
        raise ProgramError(f"exit code {code}: {last[0][:500]}")
    lines = printed.strip().splitlines()
    return _said(lines[-1].strip()) if lines else Outcome()


def _said(line: str) -> Outcome:
    """Reads the outcome from the last line that a program printed."""
    try:
        value = json.loads(line)
    except ValueError:
        return Outcome(line)
    return Outcome.read(value) if isinstance(value, dict) else Outcome(line)


def environment(question: str, access: Access) -> dict[str, str]:
    """Returns the environment variables of a program; OpenAI clients read ``OPENAI_...``."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.key,
        "OPENAI_MODEL": access.model,
        "COA_REWARD_URL": f"{access.url}/reward",
        **({} if "\0" in question or len(question) > _TAIL else {"COA_QUESTION": question}),
    }


async def _tail(stream: asyncio.StreamReader) -> str:
    """Reads a stream to its end, and returns the last `_TAIL` bytes as text."""
    kept = b""
    while piece := await stream.read(_TAIL):
        kept = (kept + piece)[-_TAIL:]
    return kept.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a supervisor, which then ends the program's process tree."""
    for end in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
            return
