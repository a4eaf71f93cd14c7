"""Samples trajectories by running external agent programs instead of the tool loop."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from absl import logging

from coa_jax.agents.app import MODEL, Sessions, make_app
from coa_jax.agents.config import AgentConfig
from coa_jax.agents.program import Access, Outcome, ProgramError, make_agent
from coa_jax.agents.session import Session
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.api import Model
from coa_jax.model.params import DecodeParams
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.serve.config import ServeConfig
from coa_jax.trajectory import StopReason, Trajectory
from coa_jax.web.refusals import RefusalLog
from coa_jax.web.server import Server, address_of, listen

_HOPELESS = 8
"""Number of failed programs after which the run stops if no program has succeeded before."""


class AgentSampler:
    """A `rollout.sampler.Sampler` that runs an agent program for each sample."""

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
        shapes = engines[0].config
        longest = min(rollout.max_tokens, shapes.max_length)
        slots = sum(engine.config.slots for engine in engines)
        self._room = config.concurrency or slots
        served = ServeConfig(
            model="", name=MODEL, host=config.host, port=config.port, api_key_env="", protocol="",
            max_waiting=64 * (slots + self._room), max_samples=64, max_body=1 << 24,
            shutdown_seconds=0.0, seed=0, rollout=rollout,
            engine=dataclasses.replace(shapes, max_length=longest),
        )  # fmt: skip
        self._service = Sessions(
            model, engines, served, version, config.max_requests, recompute=recompute
        )
        self._version = version
        self._listener = listen(config.host, config.port, "give another agent.port or agent.host")
        self._url = address_of(self._listener)
        self._waiting: deque[tuple[Request, int]] = deque()
        self._running: dict[asyncio.Task[Trajectory], Session] = {}
        self._refused: list[Trajectory] = []
        self._news = asyncio.Event()
        self._failures: int | None = 0  # number of failures; None once a program has succeeded
        self._warned = False

    def submit(self, request: Request) -> None:
        """Implements `Sampler`."""
        self._waiting.extend((request, sample) for sample in request.samples)
        self._news.set()

    def cancel(self, request: Request) -> None:
        """Implements `Sampler`."""
        for pair in [pair for pair in self._waiting if pair[0] is request]:
            self._waiting.remove(pair)
            session = self._session(*pair)
            self._refused.append(self._finished(session, StopReason.CANCELLED, Outcome(), 0.0))
        for task, session in self._running.items():
            if session.request is request:
                self._end(task, session)
        self._news.set()

    def _end(self, task: asyncio.Task[Trajectory], session: Session) -> None:
        """Cancels a program, but only once: a second cancellation would interrupt its cleanup."""
        if not session.cancelled:
            session.cancelled = True
            task.cancel()

    def publish(self, weights: Sequence[DecodeParams] | None, version: int) -> None:
        """Loads new weights into the engines, like `EngineSampler.publish`."""
        self._version = version
        self._service.sampler.publish(weights, version)

    def oldest(self, request: Request) -> int | None:
        """Implements `Sampler`."""
        sessions = [s for s in self._running.values() if s.request is request]
        found = [session.oldest for session in sessions]
        running = [visit for session in sessions for visit in self._service.running(session)]
        found += [self._service.sampler.oldest(visit) for visit in running]
        return min((version for version in found if version is not None), default=None)

    def figures(self) -> dict[str, float]:
        """Returns statistics of the engines, like `EngineSampler.figures`."""
        return self._service.sampler.figures()

    async def finished(self) -> AsyncGenerator[Trajectory, None]:
        """Yields finished trajectories, as `Sampler` demands.

        The endpoint and the programs run as long as this generator runs.
        """
        log = RefusalLog()
        service = self._service
        async with service:
            server = Server(make_app(service, log), service.config.limits, log)
            serving = asyncio.create_task(server.serve([self._listener]))
            try:
                while True:
                    for trajectory in self._begin():
                        yield trajectory
                    news = asyncio.create_task(self._news.wait())
                    ends = {*self._running, news, serving, service.loop}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    news.cancel()
                    self._news.clear()
                    for broken in (service.loop, serving):
                        if broken.done():
                            broken.result()
                            raise RuntimeError("the endpoint of the agent programs has stopped")
                    for task in [task for task in self._running if task.done()]:
                        session = self._running.pop(task)
                        if task.cancelled():  # the program was cancelled before it started
                            yield self._finished(session, StopReason.CANCELLED, Outcome(), 0.0)
                        else:
                            yield task.result()
            finally:
                for task, session in self._running.items():
                    self._end(task, session)
                await asyncio.gather(*self._running, return_exceptions=True)
                server.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)

    def _begin(self) -> list[Trajectory]:
        """Starts waiting programs up to the limit; returns samples that were cancelled before."""
        refused, self._refused = self._refused, []
        while self._waiting and len(self._running) < self._room:
            session = self._session(*self._waiting.popleft())
            self._running[asyncio.create_task(self._run(session))] = session
        return refused

    def _session(self, request: Request, sample: int) -> Session:
        key = secrets.token_urlsafe(24)
        return Session(self._service.model.tokenizer, request, sample, self._version, key)

    async def _run(self, session: Session) -> Trajectory:
        """Runs a program until it ends; returns a trajectory even if the program fails."""
        clock, task = asyncio.get_running_loop().time, session.request.task
        began, outcome, fault = clock(), Outcome(), ""
        self._service.by_key[session.key] = session
        given = {"id": task.id, "question": task.question, "metadata": dict(task.metadata)}
        access = Access(self._url, session.key, MODEL)
        try:
            async with asyncio.timeout(self._config.seconds):
                outcome = await self._agent({**given, "sample": session.sample}, access)
            reason = session.ended_by or StopReason.EOS
        except TimeoutError:
            reason = StopReason.DEADLINE
        except asyncio.CancelledError:
            reason = StopReason.CANCELLED
        except ProgramError as error:
            # Most programs fail if a request is refused because a budget is used up. The stop
            # reason is then this budget, and not a fault.
            reason, fault = session.ended_by or StopReason.FAULT, str(error)
        await self._leave(session)
        if session.ended_by is StopReason.FAULT:
            reason, fault = StopReason.FAULT, "the policy's log-probabilities are not finite"
        outcome = outcome.over(session.given)
        said = outcome.answer is not None or outcome.reward is not None
        if not session.turns and reason is StopReason.EOS:  # the outcome is not the policy's
            reason, fault = StopReason.FAULT, _unanswered(session)
        if reason is StopReason.EOS and said:
            reason = StopReason.ANSWER
        if reason is not StopReason.CANCELLED:
            self._count(session, reason, fault)
        about = {"fault": fault} if fault else {}
        return self._finished(session, reason, outcome, clock() - began, **about)

    async def _leave(self, session: Session) -> None:
        """Closes a session, and waits until the engines hold none of its requests.

        Without waiting, new weights could be loaded while a request is still running.
        """
        session.closed = True
        for visit in self._service.running(session):
            self._service.sampler.cancel(visit)
        while session.in_engine and self._service.healthy:
            await asyncio.sleep(0.005)
        del self._service.by_key[session.key]

    def _count(self, session: Session, reason: StopReason, fault: str) -> None:
        """Logs the first failure, and stops the run if the first programs all fail.

        A program without a completion of the policy does not count as a success.

        Raises:
            UserError: the first `_HOPELESS` programs have failed.
        """
        if reason is not StopReason.FAULT:
            self._warn_without_turns(session, reason)
            self._failures = None if session.turns else self._failures
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

    def _warn_without_turns(self, session: Session, reason: StopReason) -> None:
        if session.turns or self._warned:
            return
        self._warned = True
        logging.warning(
            "the agent's program ended on task %s (stop reason %s) without a completion of the "
            "policy, so no token of it can be trained: %s; further such samples get no warning",
            session.request.task.id, reason, _unanswered(session)
        )  # fmt: skip

    def _finished(
        self,
        session: Session,
        reason: StopReason,
        outcome: Outcome,
        seconds: float,
        **about: Any,
    ) -> Trajectory:
        request = session.request
        return session.trajectory(
            reason,
            outcome,
            {
                "source": request.task.source,
                "prompt_id": request.prompt_id,
                "seconds": round(seconds, 3),
                "sampling": {"seed": request.seed, **dataclasses.asdict(request.sampling)},
                "rollout": dataclasses.asdict(self._rollout),
                "agent_turns": len(session.turns),
                **about,
            },
        )


def _unanswered(session: Session) -> str:
    """Reason for which a program received no completion."""
    if session.refused:
        limits = session.ended_by is StopReason.LENGTH
        more = " (the smaller of rollout.max_tokens and engine.max_length)" if limits else ""
        return f"the endpoint refused its requests: {session.refused}{more}"
    if session.asked:
        return "it ended before its requests were answered"
    return "it sent no request to the policy (OPENAI_BASE_URL with OPENAI_API_KEY)"
