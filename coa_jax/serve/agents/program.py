"""Runs an agent program or an async function for one sample, and reads its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from coa_jax.config.extensions import bind
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.rollout.agent_config import AGENTS, AgentConfig

MODEL = "policy"
"""Name of the model at the endpoint; requests may contain any other name."""

_TAIL = 1 << 20  # maximum number of bytes that are kept of a program's output
_VARIABLE = 64 << 10  # maximum number of bytes of a question in an environment variable
_GRACE_S = 10.0  # seconds in which a supervisor (`leash`) must end the program's process tree


class ProgramError(Exception):
    """Raised if a program fails.

    The sample is then masked, because the policy did not cause the failure.
    """


@dataclasses.dataclass(frozen=True)
class ProgramOutcome:
    """The outcome that an agent program reports for its sample.

    Attributes:
        answer: final answer; None for no answer.
        reward: reward that the program gives; None to let the graders of the run grade the answer.
    """

    answer: str | None = None
    reward: float | None = None

    @classmethod
    def read(cls, value: Any) -> ProgramOutcome:
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
        if reward is not None:
            if not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
                raise ProgramError(f"its reward is {str(reward)[:200]!r}, not a finite number")
            reward = float(reward)
        return cls(None if answer is None else str(answer), reward)

    def over(self, other: ProgramOutcome) -> ProgramOutcome:
        """Returns this outcome, with the values of another outcome for the fields that are None.

        Args:
            other: the other outcome.
        """
        answer = other.answer if self.answer is None else self.answer
        return ProgramOutcome(answer, other.reward if self.reward is None else self.reward)


@dataclasses.dataclass(frozen=True)
class Access:
    """The address and key with which a program reaches its session.

    Attributes:
        url: address of the endpoint, without the suffix ``/v1``.
        key: key of the session.
    """

    url: str
    key: str


AgentFunction = Callable[[Mapping[str, Any], Access], Awaitable[ProgramOutcome]]
"""A function that solves a task, a JSON object, by calling the policy.

When a call is cancelled, the function must end the processes that it started.
"""


def make_agent(config: AgentConfig) -> AgentFunction:
    """Creates the async function that runs the agent of a run for one sample.

    The function takes the task, as a JSON object, and an `Access`, and returns a `ProgramOutcome`.
    It runs the program or calls the user's function that the settings name.

    Raises:
        UserError: the function does not exist, has wrong parameters, or is not async.
    """
    if config.command:
        command = shlex.split(config.command)
        return lambda task, access: run_command(command, task, access)
    call = bind(AGENTS, config.function, config.options, "agent.function")
    if not inspect.iscoroutinefunction(call.function):
        raise UserError(f"agent.function: {config.function} is not async; write 'async def'")

    async def run(task: Mapping[str, Any], access: Access) -> ProgramOutcome:
        try:
            result = await call(
                task=dict(task),
                question=task["question"],
                base_url=f"{access.url}/v1",
                api_key=access.key,
                model=MODEL,
            )
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # The function of a user may raise anything. Only the sampler can cancel the sample.
            caller = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and caller and caller.cancelling():
                raise
            raise ProgramError(f"{type(error).__name__}: {error}") from error
        return ProgramOutcome.read(result)

    return run


async def run_command(
    command: list[str], task: Mapping[str, Any], access: Access
) -> ProgramOutcome:
    """Runs an agent program for one task, and returns the outcome that it prints.

    The program can read the task from its standard input. The last line that the program prints
    must be its outcome: a JSON object that `ProgramOutcome.read` accepts, or the answer itself.

    When the program or this process ends, a supervisor (see `leash`) kills the program's processes.

    Args:
        command: the program and its arguments.
        task: the task, a JSON object.
        access: address and key of the program's session.

    Raises:
        ProgramError: the program cannot be started, its exit code is not 0, or its outcome is
            invalid.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coa_jax.serve.agents.supervisor", str(os.getpid()), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(task["question"], access),
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
    try:
        _, printed, errors = await asyncio.gather(
            _write(process.stdin, json.dumps(task)), _tail(process.stdout), _tail(process.stderr)
        )
        code = await process.wait()
    finally:
        if process.returncode is None:
            await asyncio.shield(_end(process))
    if code:
        reason = _last_line(errors) or "its standard error is empty"
        raise ProgramError(f"exit code {code}: {reason[:500]}")
    last = _last_line(printed)
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := untrusted.parse_json(last), dict):
            return ProgramOutcome.read(value)
    return ProgramOutcome.read(last or None)


def _last_line(text: str) -> str:
    """Returns the last line. Only "\\n" ends a line: JSON may contain e.g. U+2028 as it is."""
    return text.strip().rpartition("\n")[2].strip()


def _environment(question: str, access: Access) -> dict[str, str]:
    """Returns the environment variables of a program; OpenAI clients read ``OPENAI_...``."""
    asked = question.encode("utf-8", "replace")
    fits = len(asked) <= _VARIABLE and b"\0" not in asked
    return {
        **os.environ,
        "OPENAI_BASE_URL": f"{access.url}/v1",
        "OPENAI_API_KEY": access.key,
        "OPENAI_MODEL": MODEL,
        "COA_REWARD_URL": f"{access.url}/reward",
        **({"COA_QUESTION": asked.decode()} if fits else {}),
    }


async def _write(stream: asyncio.StreamWriter, text: str) -> None:
    with contextlib.suppress(OSError):  # the program may exit before it reads its input
        stream.write(text.encode())
        await stream.drain()
    stream.close()


async def _tail(stream: asyncio.StreamReader) -> str:
    """Reads a stream to its end, and returns the last `_TAIL` bytes as text."""
    tail = b""
    while piece := await stream.read(_TAIL):
        tail = (tail + piece)[-_TAIL:]
    return tail.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a supervisor, which then ends the program's process tree."""
    for end in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
            return
