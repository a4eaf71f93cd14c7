"""The interface between a trainer and a sampler of trajectories, and its implementation by engines.

The interface is deliberately small. An inference server could implement it too, if it can load new
weights between two tokens and returns token ids with log-probabilities.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from coa_jax.engine.engine import Engine
from coa_jax.engine.group import take_copies
from coa_jax.engine.meter import MeteredEngine
from coa_jax.model.params import DecodeParams
from coa_jax.rollout.episodes import Episodes
from coa_jax.rollout.inbox import Inbox
from coa_jax.rollout.loop import rollout, run_episodes
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory


class Sampler(Protocol):
    """Samples trajectories while the policy changes; all calls come from one event loop.

    `finished` yields every sample of a submitted request exactly once; cancelled samples have the
    stop reason ``cancelled``. The metadata of a trajectory hold

    - ``prompt_id``: the prompt id of its request;
    - ``policy_versions``: ``[[position, version], ...]``, the policy version that computed and
      sampled the tokens from each position on; the first position is 0.
    """

    def submit(self, request: Request) -> None:
        """Requests the samples of a request."""

    def cancel(self, request: Request) -> None:
        """Cancels a request."""

    def publish(self, weights: Any, version: int) -> None:
        """Loads new weights; samples in flight continue with them.

        Args:
            weights: weights in the form of the sampler; the trainer makes them with a function that
                comes with the sampler.
            version: policy version of the weights.
        """

    def finished(self) -> AsyncGenerator[Trajectory, None]:
        """Yields trajectories, ungraded, as they end."""

    def oldest(self, request: Request) -> int | None:
        """Returns the oldest policy version of a request's running samples; None if none runs."""

    def figures(self) -> dict[str, float]:
        """Returns seconds and counts since the start, by name; see `EngineSampler.figures`."""


class EngineSampler:
    """A `Sampler` made of our engines, which share the requests."""

    def __init__(
        self,
        engines: Sequence[Engine],
        tokenizer: Any,
        tools: Sequence[Tool],
        config: RolloutConfig,
        version: int | None,
        *,
        recompute: bool = False,
        episodes: Episodes | None = None,
    ):
        """Takes over the engines.

        Args:
            engines: engines with free slots and the parameters of ``version``.
            tokenizer, tools, config: see `rollout`.
            version: policy version of the engines; None if trajectories do not record a version.
            recompute: whether new weights recompute the caches of samples in flight. Otherwise
                these keep the values computed with earlier weights.
            episodes: see `run_episodes`; None for those of `rollout`.
        """
        self._engines, self._recompute = engines, recompute
        self._inbox = Inbox(version=version)
        self._schedulers: list[Scheduler] = []
        start = self._schedulers.append
        if episodes is None:
            self._stream = rollout(engines, tokenizer, self._inbox, tools, config, on_start=start)
        else:
            self._stream = run_episodes(
                engines, episodes, self._inbox, tools, config, on_start=start
            )

    def submit(self, request: Request) -> None:
        """See `Sampler`."""
        self._inbox.put(request)

    def cancel(self, request: Request) -> None:
        """See `Sampler`."""
        self._inbox.cancel(request)

    def close(self) -> None:
        """Declares that no more requests will come; `finished` ends after running samples."""
        self._inbox.close()

    def publish(self, weights: Sequence[DecodeParams] | None, version: int) -> None:
        """See `Sampler`.

        Args:
            weights: copies from `engine.layout.publish`; None if the engines, whose slots are all
                free, have them already.
            version: policy version of the weights.
        """
        if weights is None:
            self._inbox.version = version
            for scheduler in self._schedulers:
                scheduler.restart(version)
        elif not self._schedulers:  # nothing runs yet
            self._inbox.version = version
            take_copies(self._engines, weights)
        else:
            self._inbox.publish(weights, version, self._recompute)

    def finished(self) -> AsyncGenerator[Trajectory, None]:
        """See `Sampler`."""
        return self._stream

    def oldest(self, request: Request) -> int | None:
        """See `Sampler`."""
        runs = (run for scheduler in self._schedulers for run in scheduler.running.values())
        versions = [run.episode.versions[0][1] for run in runs if run.request is request]
        return min(versions, default=None)

    def settled(self, samples: int) -> bool:
        """Returns whether all of this many samples in flight wait for a later version."""
        waiting = [scheduler.waiting_for_weights for scheduler in self._schedulers]
        return sum(waiting) == samples

    def figures(self) -> dict[str, float]:
        """Returns figures of all engines together since the start.

        Each engine is a `MeteredEngine`.

        Returns:
            ``decode_s``, ``extend_s``, ``idle_s``: seconds in programs and without work, means over
                the engines. ``occupied_s``: slot-seconds with a sample. ``waiting_s``: slot-seconds
                with a sample that waits for its tool. ``slots``: number of slots.
                ``decoded_tokens``: number of tokens. ``row_steps``: sum over decode steps of their
                rows.
        """
        metered = [engine for engine in self._engines if isinstance(engine, MeteredEngine)]
        meters = [engine.meter for engine in metered]
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
            "row_steps": sum(engine.row_steps for engine in self._engines),
        }
