"""Samples of the pipeline benchmark, in which the policy only samples tokens.

The workload fixes everything else.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from coa_jax.data.trajectory import Author, SegmentSpan, StopReason, Trajectory
from coa_jax.perf.bench.forced_episodes import ForcedEpisode, ForcedEpisodes, Sleep
from coa_jax.perf.bench.pipeline_workload import PipelineWorkload, WorkloadSample
from coa_jax.rollout.episode import Episode, ToolRequest
from coa_jax.rollout.request import Request
from coa_jax.tools.base import Observation, ToolContext

PROTOCOL, RIGHT, WRONG = "generalist", "right", "wrong"


class _Episode(ForcedEpisode):
    """A sample with the turns and the answer that the workload prescribes."""

    def __init__(self, request: Request, sample: int, forced: WorkloadSample, watch: SampleWatch):
        super().__init__(request, sample, forced.script)
        self._forced, self._watch, self._slot = forced, watch, [time.perf_counter(), math.inf]
        watch.occupied.append(self._slot)

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """Adds a token, see `ForcedEpisode.feed`, and counts it."""
        self._watch.tokens += 1
        event = super().feed(token, logp)
        return StopReason.ANSWER if event is StopReason.EOS else event

    def finish(
        self, stop_reason: StopReason, gold: tuple[str, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        """Returns the trajectory, whose last policy segment becomes the workload's answer."""
        trajectory = super().finish(stop_reason, gold, metadata)
        self._slot[1] = time.perf_counter()
        if stop_reason != StopReason.ANSWER:
            return trajectory
        *before, last = trajectory.segments
        answer = f"<answer>{RIGHT if self._forced.right else WRONG}</answer>"
        spans = (*before, SegmentSpan("answer", Author.POLICY, answer, last.start, last.end))
        text = "".join(span.text for span in spans)
        return dataclasses.replace(trajectory, text=text, segments=spans)


@dataclasses.dataclass
class SampleWatch:
    """Measurements of the samples of a run: when they had a slot, and when they waited for tools.

    All times are readings of `time.perf_counter`, in seconds.

    Attributes:
        occupied: for each sample, the pair [start, end] of the time during which the sample
            occupied a slot; the end is infinity if the run ended before the sample.
        waited: for each call of a tool, the pair [start, end] of the time during which the tool
            slept.
        tokens: number of sampled tokens.
    """

    occupied: list[list[float]] = dataclasses.field(default_factory=list)
    waited: list[list[float]] = dataclasses.field(default_factory=list)
    tokens: int = 0


def within(spans: Iterable[Sequence[float]], start: float, end: float) -> float:
    """Returns the total length, in seconds, of the parts of spans that lie between two times.

    Args:
        spans: pair [start, end] of each span.
        start: earlier time.
        end: later time.
    """
    return sum(max(min(b, end) - max(a, start), 0.0) for a, b in spans)


@dataclasses.dataclass(frozen=True)
class Samples(ForcedEpisodes):
    """The samples of a workload, for the agent loop (see `coa_jax.rollout.episodes.Episodes`).

    Attributes:
        workload: the workload, which fixes the lengths and the tool calls of the samples.
        watch: collects the measurements.
    """

    workload: PipelineWorkload
    watch: SampleWatch

    def begin(self, request: Request, sample: int) -> Episode:
        """Starts a sample of a group; the group's index in the workload is the id of the task."""
        forced = self.workload.groups[int(request.task.id)][sample]
        return _Episode(request, sample, forced, self.watch)


class WatchedSleep(Sleep):
    """A tool that sleeps, and records when; the argument of a call is the number of seconds.

    The constructor gets ``share``, by which the number is multiplied, and ``watch``, the record.
    """

    def __init__(self, watch: SampleWatch, share: float):
        self._watch, self._share = watch, share

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Sleeps and returns an empty observation; see `Sleep`."""
        began = time.perf_counter()
        try:
            return await super().__call__(repr(self._share * float(arguments)), context)
        finally:
            self._watch.waited.append([began, time.perf_counter()])
