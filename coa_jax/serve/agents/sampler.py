"""Samples trajectories by running external agent programs instead of the tool loop."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from absl import logging

from coa_jax.data.trajectory import StopReason, Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.api import Model
from coa_jax.model.params import DecodeParams
from coa_jax.protocol import Prompt
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.request import Request, RolloutConfig, described
from coa_jax.serve.agents.app import Sessions, make_app
from coa_jax.serve.agents.program import MODEL, Access, ProgramError, ProgramOutcome, make_agent
from coa_jax.serve.agents.session import AgentSession
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.serve.http.server import Server, address_of, listen
from coa_jax.tasks.question_rows import without_answers

_NOTHING = ProgramOutcome()
_HOPELESS = 8
"""Number of failed programs after which the run stops if no program has succeeded before."""


class AgentSampler:
    """A `rollout.sampler.Sampler` that produces each sample by running an agent program.

    The sampler serves the policy to the programs over HTTP. The trajectory of a sample contains the
    tokens that the policy sampled for the requests of the sample's program.
    """

    def __init__(
        self,
        model: Model,
        engines: Sequence[Engine],
        config: AgentConfig,
        rollout: RolloutConfig,
        version: int,
        *,
        recompute: bool = False,
    ):
        """Loads the agent, and opens the port of the endpoint.

        Args:
            model: the policy; only its tokenizer and its architecture are used.
            engines: decoding engines with free slots and the weights of ``version``.
            config: settings of the agent program.
            rollout: budgets. ``max_tokens`` limits each conversation of a sample. The other budgets
                belong to the tool loop and are ignored.
            version: policy version of the engines' weights.
            recompute: whether running requests recompute their KV cache when weights change.

        Raises:
            UserError: the agent function does not exist, or the address cannot be used.
        """
        self._agent, self._config, self._rollout = make_agent(config), config, rollout
        self.tokenizer = model.tokenizer
        shapes = engines[0].config
        longest = min(rollout.max_tokens, shapes.max_length)
        slots = sum(engine.config.slots for engine in engines)
        self._room = config.concurrency or slots
        self._places = asyncio.Semaphore(0)  # limits the number of running programs
        served = ServeConfig(
            model="", name=MODEL, host=config.host, port=config.port, api_key_env="", protocol="",
            max_waiting=64 * (slots + self._room), max_samples=64, max_body=1 << 24,
            shutdown_seconds=0.0, seed=0, rollout=rollout,
            engine=dataclasses.replace(shapes, max_length=longest),
        )  # fmt: skip
        self._service = Sessions(
            model, engines, (), served, Prompt("brief"), version=version, recompute=recompute
        )
        self._by_key: dict[str, AgentSession] = {}  # open sessions
        self._version = version
        self._listener = listen(config.host, config.port, "give another agent.port or agent.host")
        self._url = address_of(self._listener)
        self._running: dict[asyncio.Task[Any], AgentSession] = {}  # and waiting for a place
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self._failures: int | None = 0  # number of failures; None once a program has succeeded
        self._warned = False

    def submit(self, request: Request) -> None:
        """Adds a request; starts an agent program for each of its samples, see `Sampler.submit`."""
        for sample in request.samples:
            most = self._config.max_requests
            session = AgentSession(self.tokenizer, request, sample, self._version, most)
            task = asyncio.create_task(self._run(session))
            task.add_done_callback(self._ended.put_nowait)
            self._running[task] = session

    def cancel(self, request: Request | None = None) -> None:
        """Cancels the unfinished samples of a request, see `Sampler.cancel`; None for all requests.

        Programs that are ending are left alone, because the cancellation would interrupt their
        cleanup.
        """
        for task, session in self._running.items():
            concerned = request is None or session.request is request
            if concerned and not (session.closed or task.cancelling()):
                task.cancel()

    def publish(self, weights: Sequence[DecodeParams] | None, version: int) -> None:
        """Loads new weights into the engines, see `EngineSampler.publish`."""
        self._version = version
        self._service.sampler.publish(weights, version)

    def oldest(self, request: Request) -> int | None:
        """Returns the oldest policy version that sampled tokens of a request's running samples.

        The result is None if no sample of the request is running.
        """
        versions: list[int | None] = []
        for session in self._running.values():
            if session.request is request:
                versions += [
                    turn.answer.metadata["policy_versions"][0][1] for turn in session.turns
                ]
                served_requests = self._service.running(session)
                versions += [self._service.sampler.oldest(served) for served in served_requests]
        return min((version for version in versions if version is not None), default=None)

    def figures(self) -> dict[str, float]:
        """Returns times and counts of the engines by name, see `EngineSampler.figures`."""
        return self._service.sampler.figures()

    async def finished(self) -> AsyncGenerator[Trajectory, None]:
        """Yields each trajectory when its agent program has ended, see `Sampler.finished`.

        The HTTP endpoint and the programs run only as long as this generator runs.
        """
        log = RefusalLog()
        service = self._service
        async with service:
            app = make_app(service, self._by_key, log)
            server = Server(app, service.config.limits, log)
            serving = asyncio.create_task(server.serve([self._listener]))
            for task in (serving, service.loop):
                task.add_done_callback(self._ended.put_nowait)
            for _ in range(self._room):
                self._places.release()
            try:
                while True:
                    ended = await self._ended.get()
                    if ended not in self._running:
                        ended.result()
                        raise RuntimeError("the endpoint of the agent programs has stopped")
                    session = self._running.pop(ended)
                    if ended.cancelled():  # before the program started
                        yield self._finished(session, StopReason.CANCELLED)
                    else:
                        yield ended.result()
            finally:
                self.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)
                server.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)

    async def _run(self, session: AgentSession) -> Trajectory:
        """Runs a program until it ends; returns a trajectory even if the program fails."""
        clock = asyncio.get_running_loop().time
        async with self._places:
            began = clock()
            reason, outcome, fault = await self._ended_program(session)
        if session.ended_by is StopReason.FAULT:
            reason, fault = StopReason.FAULT, "the policy's log-probabilities are not finite"
        outcome = outcome.over(session.given)
        if not session.turns and reason is StopReason.EOS:  # the outcome is not the policy's
            reason, fault = StopReason.FAULT, _unanswered(session)
        if reason is StopReason.EOS and outcome != _NOTHING:
            reason = StopReason.ANSWER
        if reason is not StopReason.CANCELLED:
            self._count_failure(session, reason, fault)
        return self._finished(session, reason, outcome, clock() - began, fault)

    async def _ended_program(self, session: AgentSession) -> tuple[StopReason, ProgramOutcome, str]:
        """Runs a program, and closes its session; returns the stop reason, outcome and fault."""
        task, outcome, fault = session.request.task, _NOTHING, ""
        session.version = self._version
        key = secrets.token_urlsafe(24)
        self._by_key[key] = session
        shown = {"id": task.id, "question": task.question, "metadata": without_answers(task)}
        access = Access(self._url, key)
        try:
            async with asyncio.timeout(self._config.seconds):
                outcome = await self._agent({**shown, "sample": session.sample}, access)
            reason = session.ended_by or StopReason.EOS
        except TimeoutError:
            reason = StopReason.DEADLINE
        except asyncio.CancelledError:
            reason = StopReason.CANCELLED
        except ProgramError as error:
            # Most programs fail if a request is refused because a budget is used up. The stop
            # reason is then this budget, and not a fault.
            reason, fault = session.ended_by or StopReason.FAULT, str(error)
        session.closed = True
        for served in self._service.running(session):
            self._service.sampler.cancel(served)
        # Without waiting, new weights could be loaded while a request is still running.
        while session.in_engine and self._service.healthy:
            await asyncio.sleep(0.005)
        del self._by_key[key]
        return reason, outcome, fault

    def _count_failure(self, session: AgentSession, reason: StopReason, fault: str) -> None:
        """Logs the first failure, and stops the run if the first programs all fail.

        A program without a completion of the policy does not count as a success.

        Raises:
            UserError: the first `_HOPELESS` programs have failed.
        """
        if reason is not StopReason.FAULT:
            if session.turns:
                self._failures = None
            elif not self._warned:
                self._warned = True
                logging.warning(
                    "the agent's program ended on task %s (stop reason %s) without a completion of "
                    "the policy, so no token of it can be trained: %s; further such samples get no "
                    "warning", session.request.task.id, reason, _unanswered(session)
                )  # fmt: skip
        elif self._failures is not None:
            self._failures += 1
            if self._failures == 1:
                logging.warning(
                    "the agent's program failed on task %s (%s): the sample is masked; further "
                    "failures are masked without a warning", session.request.task.id, fault
                )  # fmt: skip
            if self._failures == _HOPELESS:
                raise UserError(
                    f"the agent's program failed {_HOPELESS} times and never succeeded: {fault}"
                )

    def _finished(
        self,
        session: AgentSession,
        reason: StopReason,
        outcome: ProgramOutcome = _NOTHING,
        seconds: float = 0.0,
        fault: str = "",
    ) -> Trajectory:
        about = described(session.request, self._rollout, seconds)
        about |= {"agent_turns": len(session.turns), **({"fault": fault} if fault else {})}
        return session.trajectory(reason, outcome, about)


def _unanswered(session: AgentSession) -> str:
    """Reason for which a program received no completion."""
    if session.refused:
        limits = session.ended_by is StopReason.LENGTH
        more = " (the smaller of rollout.max_tokens and engine.max_length)" if limits else ""
        return f"the endpoint refused its requests: {session.refused}{more}"
    if session.asked:
        return "it ended before its requests were answered"
    return "it sent no request to the policy (OPENAI_BASE_URL with OPENAI_API_KEY)"
