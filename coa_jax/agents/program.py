"""Runs a program or an async function for one sample, and reads what it says at its end."""

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

_TAIL = 64 << 10  # bytes of a program's output that are kept
_GRACE_S = 10.0  # that a leash has to end what is below it


class ProgramError(Exception):
    """A program failed: that is no verdict on the policy."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program says of its sample.

    Attributes:
        answer: its final answer; None without one.
        reward: its own grade; None leaves grading to the run's graders.
    """

    answer: str | None = None
    reward: float | None = None

    @classmethod
    def read(cls, value: Any) -> Outcome:
        """Reads an object with ``answer``, ``reward`` or ``error``, a text (the answer), or None.

        Raises:
            ProgramError: it is something else, or tells of an error.
        """
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping) or not value.keys() & {"answer", "reward", "error"}:
            raise ProgramError(f"it gave {str(value)[:200]!r}, not an answer or a reward")
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
        """This one, and what the other says where this one says nothing."""
        answer = other.answer if self.answer is None else self.answer
        return Outcome(answer, other.reward if self.reward is None else self.reward)


@dataclasses.dataclass(frozen=True)
class Access:
    """How a program reaches its session.

    Attributes:
        url: address of the endpoint; clients of OpenAI want ``URL/v1``.
        key: of the session.
        model: a name for the policy.
    """

    url: str
    key: str
    model: str

    @property
    def base_url(self) -> str:
        """Base URL for clients of OpenAI."""
        return f"{self.url}/v1"


Agent = Callable[[Mapping[str, Any], Access], Awaitable[Outcome]]
"""Solves a task, a JSON object, through the policy.  Cancelled, it ends what it has started."""


def make_agent(config: AgentConfig) -> Agent:
    """The program of a config.

    Raises:
        UserError: the function is not there, does not fit, or is not async.
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
        except Exception as error:  # whatever the code of others raises
            raise ProgramError(f"{type(error).__name__}: {error}") from error
        return Outcome.read(found)

    return run


async def run_command(command: list[str], task: Mapping[str, Any], access: Access) -> Outcome:
    """Runs a program with a task on its standard input, below a `leash`.

    Its outcome is in the last line that it prints: an object as `Outcome.read` takes it, or else
    the answer itself.

    Raises:
        ProgramError: it cannot be started, or its exit code is not 0.
    """
    text = json.dumps(task)
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coa_jax.agents.leash", str(os.getpid()), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(task["question"], access),
            start_new_session=True,  # Ctrl-C is for this process, which ends its programs
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:  # a leash that is killed while it starts could not end it
        await _end(await starting)
        raise
    except OSError as error:  # no process or no file is left
        raise ProgramError(f"no process can be started: {error.strerror}") from error
    assert process.stdin and process.stdout and process.stderr
    reading = [asyncio.ensure_future(_tail(s)) for s in (process.stdout, process.stderr)]
    try:
        with contextlib.suppress(OSError):  # it need not read
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
        last = errors.strip().splitlines()[-1:] or ["without a word on its standard error"]
        raise ProgramError(f"exit code {code}: {last[0][:500]}")
    lines = printed.strip().splitlines()
    return _said(lines[-1].strip()) if lines else Outcome()


def _said(line: str) -> Outcome:
    """What the last line of a program says."""
    try:
        value = json.loads(line)
    except ValueError:
        return Outcome(line)
    return Outcome.read(value) if isinstance(value, dict) else Outcome(line)


def environment(question: str, access: Access) -> dict[str, str]:
    """The variables of a program: ours, and those that clients of OpenAI read by themselves."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.key,
        "OPENAI_MODEL": access.model,
        "COA_REWARD_URL": f"{access.url}/reward",
        **({} if "\0" in question or len(question) > _TAIL else {"COA_QUESTION": question}),
    }


async def _tail(stream: asyncio.StreamReader) -> str:
    """The end of what a stream says until its end."""
    kept = b""
    while piece := await stream.read(_TAIL):
        kept = (kept + piece)[-_TAIL:]
    return kept.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a leash, which ends what is below it."""
    for end in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
            return
