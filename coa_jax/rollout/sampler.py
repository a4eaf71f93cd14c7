"""Defines how training and evaluation sample trajectories, and chooses the implementation.

There are three samplers: `EngineSampler` decodes with the engines of this package and runs the
loop of tools, `serve.agents.sampler.AgentSampler` runs external agent programs, and
`endpoint.EndpointSampler` asks a policy behind an OpenAI-compatible endpoint.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import install_copies
from coa_jax.model.params import DecodeParams
from coa_jax.model.policy import Model
from coa_jax.rollout.agent_config import AgentConfig, agent_programs
from coa_jax.rollout.endpoint import EndpointSampler, PolicyEndpoint
from coa_jax.rollout.episodes import Episodes
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Arrival, Request, RolloutConfig
from coa_jax.rollout.request_queue import RequestQueue
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.tools.base import Tool


class Sampler(Protocol):
    """An interface for sampling trajectories while the policy changes.

    Call all methods from one event loop. `finished` yields every sample of a submitted request
    exactly once. A cancelled sample has the stop reason ``cancelled``. The metadata of each
    trajectory contain:

    * ``prompt_id``: the prompt id of the request.
    * ``policy_versions``: a list of pairs ``[position, version]``. Each version sampled the tokens
      from its position up to the position of the next pair. The first position is 0. Samplers
      without a policy version, see `make_sampler`, leave this key out.

    Attributes:
        tokenizer: tokenizer with which the prompts of requests are encoded, see `Request.encoded`;
            None if a server encodes them.
    """

    tokenizer: Any

    def submit(self, request: Request) -> None:
        """Adds a request for samples, which `finished` yields when they have ended."""

    def cancel(self, request: Request) -> None:
        """Ends all samples of a request that have not finished."""

    def publish(self, weights: Any, version: int) -> None:
        """Loads new weights. Running samples continue with the new weights.

        Args:
            weights: the trainer's weights, converted to the layout that the sampler uses.
            version: policy version of the weights.
        """

    def finished(self) -> AsyncGenerator[Trajectory, None]:
        """Yields each trajectory as soon as it ends, without a reward."""

    def oldest(self, request: Request) -> int | None:
        """Returns the oldest policy version that sampled tokens of the request's running samples.

        The result is None if no sample of the request is running.
        """

    def figures(self) -> dict[str, float]:
        """Returns times and counts since the start, by name; see `EngineSampler.figures`."""


class EngineSampler:
    """A `Sampler` that decodes with the engines of this package; all engines share the requests."""

    def __init__(
        self,
        engines: Sequence[Engine],
        tokenizer: Any,
        tools: Sequence[Tool],
        config: RolloutConfig,
        version: int | None = None,
        *,
        recompute: bool = False,
        episodes: Episodes | None = None,
        on_text: Callable[[Arrival], None] | None = None,
    ):
        """Creates a sampler.

        Args:
            engines: the engines. All slots must be free.
            tokenizer: tokenizer of the policy.
            tools: tools that the policy can call.
            config: budgets of the trajectories.
            version: policy version of the engines' weights; None if trajectories do not record
                policy versions.
            recompute: whether the KV caches of running samples are recomputed when new weights are
                loaded. If False, the caches keep the values that earlier weights computed.
            episodes: says how samples begin, and how the results of tools become tokens; None for
                `TextEpisodes`.
            on_text: function that is called with each new piece of text, see `rollout`.
        """
        self.tokenizer, self._engines, self._recompute = tokenizer, engines, recompute
        self._queue = RequestQueue(version=version)
        self._schedulers: list[Scheduler] = []
        start = self._schedulers.append
        self._stream = rollout(
            engines, tokenizer, self._queue, tools, config, on_text, start, episodes
        )

    def submit(self, request: Request) -> None:
        """Adds a request, see `Sampler.submit`."""
        self._queue.put(request)

    def cancel(self, request: Request) -> None:
        """Ends all samples of a request that have not finished, see `Sampler.cancel`."""
        self._queue.cancel(request)

    def close(self) -> None:
        """Declares that no request will be added, so that `finished` ends after the last sample."""
        self._queue.close()

    def publish(self, weights: Sequence[DecodeParams] | None, version: int) -> None:
        """Loads new weights, see `Sampler.publish`.

        Args:
            weights: one copy of the weights per group of devices, see `engine.layout.publish`. None
                means that the engines have the new weights already. In this case, no sample may be
                running.
            version: policy version of the weights.
        """
        if weights is None:
            self._queue.version = version
            for scheduler in self._schedulers:
                scheduler.restart(version)
        elif not self._schedulers:  # the rollout loops have not started yet
            self._queue.version = version
            install_copies(self._engines, weights)
        else:
            self._queue.publish(weights, version, self._recompute)

    def finished(self) -> AsyncGenerator[Trajectory, None]:
        """Yields trajectories as they end, see `Sampler.finished`."""
        return self._stream

    def oldest(self, request: Request) -> int | None:
        """Returns the oldest policy version that sampled tokens of a request's running samples.

        The result is None if no sample of the request is running.
        """
        runs = (run for scheduler in self._schedulers for run in scheduler.all_begun)
        versions = [run.episode.versions[0][1] for run in runs if run.request is request]
        return min(versions, default=None)

    def settled(self, samples: int) -> bool:
        """Returns whether all unfinished samples wait for a policy version to be published.

        The result is False if a sample has not begun, or if published weights are not loaded yet.

        Args:
            samples: number of unfinished samples, which the caller counts: those submitted, less
                those that `finished` has yielded.
        """
        waiting = [scheduler.waiting_for_weights for scheduler in self._schedulers]
        return sum(waiting) == samples

    def figures(self) -> dict[str, float]:
        """Returns times and counts of all engines since the start.

        Returns:
            A mapping with these keys:

            * ``decode_s``, ``extend_s`` and ``idle_s``: seconds of decoding, of prefilling prompts
              and observations, and without work. Each is the mean over the engines.
            * ``occupied_s``: time that samples spent in slots, in seconds, summed over the slots.
            * ``waiting_s``: the part of ``occupied_s`` in which samples waited for a tool.
            * ``slots``: number of slots.
            * ``decoded_tokens``: number of tokens that the policy sampled.
            * ``row_steps``: number of rows of each decode step, summed over the decode steps.
        """
        meters = [engine.meter for engine in self._engines]
        seconds = {
            name: sum(getattr(meter, name) for meter in meters) / len(meters)
            for name in ("decode_s", "extend_s", "idle_s")
        }
        return {
            **seconds,
            "occupied_s": sum(scheduler.occupied_s for scheduler in self._schedulers),
            "waiting_s": sum(scheduler.waiting_s for scheduler in self._schedulers),
            "slots": sum(engine.config.slots for engine in self._engines),
            "decoded_tokens": sum(meter.decoded_tokens for meter in meters),
            "row_steps": sum(meter.row_steps for meter in meters),
        }


def make_sampler(
    policy: Model | PolicyEndpoint,
    engines: Sequence[Engine],
    tools: Sequence[Tool],
    config: RolloutConfig,
    agent: AgentConfig | None = None,
    version: int | None = None,
    *,
    recompute: bool = False,
) -> Sampler:
    """Makes the sampler that the settings of a run name.

    Args:
        policy: the model whose parameters the engines hold, or the endpoint of the policy.
        engines: engines with free slots; () for a policy behind an endpoint.
        tools: tools that the policy can call. An agent program has its own tools.
        config: budgets of the trajectories.
        agent: agent program that solves the tasks; None, or settings without a program, for the
            loop of tools.
        version: policy version of the engines' weights; None if trajectories do not record policy
            versions.
        recompute: whether the KV caches of running samples are recomputed when new weights are
            loaded.

    Raises:
        UserError: the endpoint (see `EndpointSampler`) or the agent program cannot be used.
    """
    if isinstance(policy, PolicyEndpoint):
        return EndpointSampler(policy, tools, config)
    if agent:
        runner: Sampler = agent_programs().sampler(
            policy, engines, agent, config, version or 0, recompute=recompute
        )
        return runner
    return EngineSampler(engines, policy.tokenizer, tools, config, version, recompute=recompute)
