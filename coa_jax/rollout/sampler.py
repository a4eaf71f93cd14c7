"""What a trainer asks of whatever samples its trajectories, and our engines as its implementation.

The interface is small on purpose: an inference server that can load new weights between two tokens
and returns token ids with log-probabilities could stand behind it in place of our engines.
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

    Every sample of a submitted request comes out of `finished` exactly once, those that were
    cancelled with the stop reason ``cancelled``.  The metadata of a trajectory hold

    - ``prompt_id``: that of its request;
    - ``policy_versions``: ``[[position, version], ...]``, the policy version that computed and
      sampled the tokens from each position on; the first position is 0.
    """

    def submit(self, request: Request) -> None:
        """Asks for the samples of a request."""

    def cancel(self, request: Request) -> None:
        """Takes a request back."""

    def publish(self, weights: Any, version: int) -> None:
        """Goes on with new weights, samples in flight included.

        Args:
            weights: in the form that the sampler takes; the trainer makes it with a function that
                comes with the sampler.
            version: policy version of the weights.
        """

    def finished(self) -> AsyncGenerator[Trajectory, None]:
        """Trajectories, ungraded, as they end."""

    def oldest(self, request: Request) -> int | None:
        """Oldest policy version of a request's samples that are running; None if none is."""

    def figures(self) -> dict[str, float]:
        """Seconds and counts since the beginning, by name; see `EngineSampler.figures`."""


class EngineSampler:
    """Our engines as a `Sampler`; they share the requests."""

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
        """Takes the engines over.

        Args:
            engines: with free slots; each has the parameters of ``version``.
            tokenizer, tools, config: see `rollout`.
            version: policy version of the engines; None where trajectories do not say by which
                version they were sampled.
            recompute: whether new weights compute the caches of samples in flight again; else
                these keep what the weights before have computed.
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
        """Says that no request will come any more: `finished` ends with what is in progress."""
        self._inbox.close()

    def publish(self, weights: Sequence[DecodeParams] | None, version: int) -> None:
        """See `Sampler`.

        Args:
            weights: what `engine.layout.publish` made; None if the engines, none of whose slots
                is in use, have them already.
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
        """Whether as many samples as are in flight wait for a later version, by their plans."""
        waiting = [scheduler.waiting_for_weights for scheduler in self._schedulers]
        return sum(waiting) == samples

    def figures(self) -> dict[str, float]:
        """Figures of all engines together since the beginning; each is a `MeteredEngine`.

        Returns:
            ``decode_s``, ``extend_s``, ``idle_s``: seconds in programs and without work, means over
            the engines.  ``occupied_s``, ``waiting_s``: slot-seconds with a sample, and of those
            with a sample that waits for its tool.  ``slots``: how many there are.
            ``decoded_tokens``, ``row_steps``: tokens, and rows times steps of the decoding.
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
