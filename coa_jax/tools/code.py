"""Implements the tool ``code``, which runs programs in a sandbox (paper §1, App A)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import time
from typing import Any

from coa_jax.config.fields import Address, Bounded, MiB, Seconds
from coa_jax.config.preflight import Needs, declares
from coa_jax.protocol import parse_code
from coa_jax.sandbox.limits import PRIVATE_TMP, PROGRAM, Limits
from coa_jax.sandbox.run import GRACE_S, Captured, ProgramResult, SandboxError, run
from coa_jax.tools.base import (
    Observation,
    Outcome,
    Tool,
    ToolContext,
    observe,
    server_answers,
    time_for,
)
from coa_jax.tools.code_libraries import Library, find_libraries, isolation_here, try_imports
from coa_jax.tools.code_session import FORGOTTEN, Continued, continued, longest_s
from coa_jax.tools.concurrency import ConcurrencyLimit
from coa_jax.tools.net.chat import post_json, trusting
from coa_jax.tools.net.errors import FaultDetector, FetchError
from coa_jax.tools.net.http import RequestLimits

BAD_CALL = (
    "[FAILED] The call could not be read. Write one block that starts with ```py and ends with"
    " ```, and after it, if the program reads input, one ```sh block with that input."
)
_NO_OUTPUT = "(no output; print what you want to see)"
_MARGIN_S = 0.5
"""Seconds before the deadline of a call that are reserved for killing the program."""


@dataclasses.dataclass(frozen=True)
class CodeConfig(Bounded):
    """The settings of ``code``.

    Attributes:
        timeout_s: time limit of a program, in wall seconds. Each process may use the limit divided
            by 1.4 as processor time: by default 5 seconds, as in the Chain-of-Agents paper.
        memory_mb: memory limit of a program, in MiB.
        session: whether a program can use the variables of earlier programs in the same trajectory.
            If False, each program runs by itself, as in the paper.
        libraries: packages that programs may import: names (``numpy``), requirements, or
            directories with installed packages, see `coa_jax.tools.code_libraries`. Prompts name
            these packages. With ``url``, list the packages that the server has installed.
        url: URL of a server's endpoint ``/run_code``, which runs programs; "" runs them here.
    """

    timeout_s: Seconds = 7.0
    memory_mb: MiB = 5120
    session: bool = False
    libraries: tuple[Library, ...] = ()
    url: Address = ""

    @property
    def cpu_s(self) -> float:
        """Limit on the processor time of each process of a program, in seconds."""
        return self.timeout_s / 1.4


class CodeTool:
    """The tool ``code``, which runs Python programs of the policy in a sandbox.

    Each call starts a new process, which can access only the interpreter, its input and an empty
    directory. The observation is the output of the program. It contains no times and no temporary
    names, so that a deterministic program has a deterministic observation.

    Attributes:
        name: "code".
        deadline: time limit of a call in seconds. It is longer than the limits on waiting, running
            and cleaning up together, so that one of them passes first and names the cause.
        isolation: isolation in which programs run.
        libraries: packages that programs may import in addition to the standard library.
        settings: settings on which the result of a program depends; part of the key of stored
            results.
        remembers: whether the result of a program depends on earlier calls of the trajectory.
    """

    name = "code"

    def __init__(
        self,
        timeout_s: float = 7.0,
        cpu_s: float = 5.0,
        memory_mb: int = 5120,
        max_output_chars: int = 1536,
        concurrency: int | None = None,
        queue_s: float = 30.0,
        libraries: tuple[str, ...] = (),
        backend: str = "auto",
        unsafe: bool = False,
        session: bool = False,
    ) -> None:
        """Creates the tool, and tests the isolation of this machine.

        Args:
            timeout_s: time limit of a program in wall seconds. The paper's release uses 7. On a
                busy machine, the time for which the program waits for a processor is added, up to
                another ``timeout_s`` seconds.
            cpu_s: limit on the processor time of each process of a program, in seconds. All
                processes together may use one second more. The Chain-of-Agents paper uses 5
                (App A).
            memory_mb: memory limit of a program in MiB. The paper uses 5 GB (App A).
            max_output_chars: maximum number of characters of output in an observation. The release
                uses 1,536.
            concurrency: maximum number of programs that run concurrently; None for two per
                processor.
            queue_s: maximum time in seconds that a call waits before its program starts.
            libraries: packages that programs may import, see `find_libraries`.
            backend: kind of isolation: "bubblewrap", "landlock", or "auto" for the best that works.
            unsafe: whether programs run without isolation. The environment variable
                ``COA_JAX_ALLOW_UNSAFE_CODE=1`` must be set too.
            session: whether a program can use the variables of earlier programs in the same
                trajectory, see ``coa_jax.tools.code_session``.

        Raises:
            UserError: no isolation works on this machine, or a package cannot be installed.
        """
        self.isolation = isolation_here(backend, unsafe)
        if unsafe:
            logging.warning("programs of the model run WITHOUT isolation on this machine")
        self.timeout_s, self.max_output_chars = timeout_s, max_output_chars
        self.queue_s = queue_s
        self.remembers = session
        longest = longest_s(timeout_s) if session else timeout_s
        self.deadline = queue_s + longest + timeout_s + GRACE_S + 1.0
        self._limit = ConcurrencyLimit(concurrency or 2 * (os.cpu_count() or 1))
        confined = Limits(timeout_s, cpu_s, memory_mb, starved_s=timeout_s)
        python = self.isolation.interpreter
        self.libraries = find_libraries(libraries, python)
        self._job = self.isolation.job(confined, self.libraries.directories)
        limits = (dataclasses.asdict(confined), max_output_chars, str(self.libraries))
        machine = (self.isolation.backend, python.path, python.version)
        self.settings = json.dumps([*limits, *machine])

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Runs the program that the policy wrote between the tags."""
        start = time.monotonic()
        parsed = parse_code(arguments)
        if parsed is None:
            return observe(start, BAD_CALL, "bad_call")
        source, stdin = parsed
        patience, hurried = self.queue_s, False
        if context.deadline is not None and context.deadline - _MARGIN_S < patience:
            patience, hurried = max(0.0, context.deadline - _MARGIN_S), True
        semaphore = self._limit.semaphore()
        try:
            await asyncio.wait_for(semaphore.acquire(), patience)
        except TimeoutError:
            if (
                hurried and not semaphore.locked()
            ):  # the time of the trajectory is over; not a fault
                return observe(start, "[FAILED] No time was left to run the program.", "timeout")
            return self._fault(f"no free sandbox within {patience:g} s", start)
        try:
            limits = self._job.limits
            session = Continued(source, limits, 0)
            if self.remembers:
                session = continued(source, self.name, context, limits)
            wall, starved = session.limits.wall_s, session.limits.starved_s
            if context.deadline is not None:
                remaining_s = context.deadline - _MARGIN_S - (time.monotonic() - start)
                wall = max(0.01, min(wall, remaining_s))
                starved = max(0.0, min(starved, remaining_s - wall))
            within = dataclasses.replace(session.limits, wall_s=wall, starved_s=starved)
            job = dataclasses.replace(self._job, limits=within)
            result = await run(job, session.source, stdin or "", keep=self.max_output_chars)
        except SandboxError as error:
            return self._fault(str(error), start)
        finally:
            semaphore.release()
        outcome, text, result = describe(result, limits, self.max_output_chars, self.remembers)
        detail: dict[str, Any] = {"remembered": session.remembered} if self.remembers else {}
        detail |= {
            "isolation": self.isolation.backend,
            "reason": result.reason,
            "exit_code": result.code,
            "cpu_seconds": round(result.cpu_s, 3),
            "output_chars": result.stdout.length + result.stderr.length,
        }
        return observe(start, text, outcome, detail)

    def _fault(self, why: str, start: float) -> Observation:
        text = f"The {self.name} tool is not available at the moment."
        detail = {"isolation": self.isolation.backend, "exception": why}
        return observe(start, text, "fault", detail)


def describe(
    result: ProgramResult, limits: Limits, max_output_chars: int, session: bool = False
) -> tuple[Outcome, str, ProgramResult]:
    """Converts the result of a program to an outcome and the text of an observation.

    The text begins with ``[EXECUTED]``, or with ``[FAILED]`` and the reason. The output of the
    program follows, with the labels STDOUT and STDERR. If the program succeeded and wrote nothing
    to stderr, there are no labels.

    Args:
        result: result of the program.
        limits: limits of the program.
        max_output_chars: maximum number of characters of output in the text.
        session: whether the program belongs to a session, whose calls run the earlier programs
            again. If a program was stopped at a limit or ended by a signal (for example after a
            stack overflow), later calls do not run it again, and the text says so.

    Returns:
        (outcome of the call, text of the observation, result). The third item is ``result``, but
        its reason becomes "wall" (time limit) if SIGALRM ended a program of a session: a session
        sends this signal when the time of the new program is over.
    """
    if session and result.code == 128 + signal.SIGALRM:  # the timer of the last program
        result = dataclasses.replace(result, reason="wall", code=None)
    outcome, verdict = _verdict(result, limits)
    out_room, error_room = _share(result.stdout.length, result.stderr.length, max_output_chars)
    out = result.stdout.clip(out_room).rstrip("\n")
    error = result.stderr.clip(error_room).rstrip("\n")
    error = error.replace(f'"{PRIVATE_TMP}/{PROGRAM}"', f'"{PROGRAM}"')
    parts = [verdict]
    if outcome == "ok" and not error:
        parts.append(out or _NO_OUTPUT)
    else:
        parts += [f"STDOUT:\n{out}"] if out else []
        parts += [f"STDERR:\n{error}"] if error else []
    if session and outcome == "error" and _signal_of(result.code):
        outcome = "limit"
    if session and outcome in ("timeout", "limit"):
        parts.append(FORGOTTEN)
    return outcome, "\n".join(parts), result


def _verdict(result: ProgramResult, limits: Limits) -> tuple[Outcome, str]:
    code = result.code
    budget = {
        "memory": f"{limits.memory_mb} MiB of memory",
        "disk": f"{limits.disk_mb} MiB of files",
        "processes": f"{limits.processes} processes",
        "output": f"{limits.output_bytes} bytes of output",
    }
    if result.reason in budget:
        return "limit", f"[FAILED] stopped: more than {budget[result.reason]}"
    if result.reason == "wall":
        return "timeout", (
            "[FAILED] stopped at the time limit (an endless loop, or a wait for input that"
            " was not given?)"
        )
    if code == 0:
        return "ok", "[EXECUTED]"
    killed = code == 128 + signal.SIGKILL and result.cpu_s >= limits.cpu_s
    if code == 128 + signal.SIGXCPU or killed:
        return "timeout", (
            f"[FAILED] stopped after {limits.cpu_s:g} seconds of processor time (an endless"
            " loop, or too slow a method?)"
        )
    name = _signal_of(code)
    return "error", f"[FAILED] exit code {code}" + (f" ({name})" if name else "")


def _signal_of(code: int | None) -> str:
    """Returns the name of the signal that ended a program; "" if none did."""
    number = (code or 0) - 128
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def _share(out: int, error: int, room: int) -> tuple[int, int]:
    """Divides the maximum number of output characters between stdout and stderr.

    Each stream may use the characters that the other stream does not need.

    Args:
        out: number of characters of stdout.
        error: number of characters of stderr.
        room: maximum number of characters of both together.

    Returns:
        (number of characters of stdout, number of characters of stderr) to show.
    """
    error_room = min(error, max(room // 2, room - out))
    return min(out, room - error_room), error_room


class RemoteCode:
    """The tool ``code`` on a server with the endpoint ``/run_code`` of Sandbox Fusion.

    Attributes:
        name: "code".
        deadline: time limit of a call in seconds.
        settings: settings on which the result of a program depends.
        remembers: whether the result of a program depends on earlier calls of the trajectory.
    """

    name = "code"

    def __init__(
        self,
        url: str,
        timeout_s: float = 7.0,
        memory_mb: int = 5120,
        max_output_chars: int = 1536,
        queue_s: float = 30.0,
        key_env: str = "",
        session: bool = False,
    ):
        """Creates the tool.

        Args:
            url: URL of ``/run_code``.
            timeout_s: time limit of a program, in wall seconds.
            memory_mb: memory limit of a program, in MiB.
            max_output_chars: maximum number of characters of output in an observation.
            queue_s: maximum time in seconds that a call waits at the server before it runs.
            key_env: environment variable with a bearer token; "" for no token.
            session: whether a program can use the variables of earlier programs in the same
                trajectory, see ``coa_jax.tools.code_session``.

        Raises:
            UserError: the URL is invalid.
        """
        trusting(url)
        self._url, self._key_env, self.remembers = url, key_env, session
        self._program = Limits(wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_mb)
        self._room, self._blame = max_output_chars, FaultDetector()
        total = (longest_s(timeout_s) if session else timeout_s) + queue_s
        self.settings = json.dumps([url, timeout_s, memory_mb, max_output_chars])
        self._limits = RequestLimits(total_s=total, read_s=total, redirects=0, attempts=2)
        self.deadline = total + 1.0

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Runs the program that the policy wrote between the tags."""
        start = time.monotonic()
        parsed = parse_code(arguments)
        if parsed is None:
            return observe(start, BAD_CALL, "bad_call")
        limits = self._program
        session = Continued(parsed[0], limits, 0)
        if self.remembers:
            session = continued(parsed[0], self.name, context, limits)
        body = {
            "language": "python",
            "code": session.source,
            "stdin": parsed[1] or "",
            "run_timeout": session.limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
        }
        try:
            answer = await post_json(
                self._url,
                body,
                self._limits.within(time_for(self._limits.total_s, context)),
                self._key_env,
            )
            result = _remote_result(answer)
        except FetchError as error:
            text = f"The {self.name} tool is not available at the moment: {error.message}."
            detail = {"exception": f"{error.kind}: {error.message}"}
            return observe(start, text, self._blame.outcome(error), detail)
        self._blame.answered()
        outcome, text, result = describe(result, limits, self._room, self.remembers)
        ran = {"isolation": "remote", "exit_code": result.code}
        return observe(start, text, outcome, ran)


def _remote_result(answer: Any) -> ProgramResult:
    try:
        if answer["status"] == "SandboxError":
            raise FetchError("malformed", "the remote sandbox does not work")
        ran = answer["run_result"]
        late = ran["status"] == "TimeLimitExceeded"
        texts = (ran["stdout"] or "", ran["stderr"] or "")
        streams = [Captured(text, text, len(text)) for text in texts]
        code = None if late else int(ran["return_code"])
        reason = "wall" if late else "exit"
    except (KeyError, TypeError, ValueError) as error:
        raise FetchError("malformed", "the answer of the sandbox has the wrong form") from error
    return ProgramResult(streams[0], streams[1], reason, code, 0.0, 0)


def needs(config: Any) -> Needs:
    """Returns the server that runs programs and its key, if there is one."""
    return Needs.of_server("code.url", config.code.url, config.remote_key_env)


async def probe(config: Any, seconds: float) -> tuple[bool, str]:
    """Checks whether the tool can be called, see `config.preflight`."""
    code: CodeConfig = config.code
    if code.url:
        key, program = config.remote_key_env, "```py\nprint(1)\n```"
        remote = RemoteCode(code.url, seconds, key_env=key)
        return await server_answers(remote, code.url, program, key, seconds)
    here = isolation_here(unsafe=config.unsafe)
    how = "WITHOUT isolation" if config.unsafe else f"isolated by {here.backend}"
    text = f"programs run here, {how}"
    libraries = find_libraries(code.libraries, here.interpreter)
    limits = Limits(code.timeout_s, code.cpu_s, code.memory_mb)
    tried = await try_imports(here, limits, libraries)
    return all(ok for ok, _ in tried), "; ".join([text, *(each for _, each in tried)])


@declares(needs, probe)
def make_tool(config: Any) -> Tool:
    """Creates the tool ``code``: a client of a server if ``url`` is set, else a local sandbox."""
    code: CodeConfig = config.code
    limits: dict[str, Any] = {
        "timeout_s": code.timeout_s,
        "memory_mb": code.memory_mb,
        "session": code.session,
    }
    if code.url:
        return RemoteCode(code.url, key_env=config.remote_key_env, **limits)
    return CodeTool(cpu_s=code.cpu_s, unsafe=config.unsafe, libraries=code.libraries, **limits)
