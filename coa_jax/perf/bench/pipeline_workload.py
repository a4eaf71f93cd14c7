"""Draws workloads of the pipeline benchmark, with long-tailed tool latencies and sample lengths.

Latencies and lengths are drawn by stratified sampling: one value from each of n equally probable
parts of the distribution. The median, mean and 99th percentile of a workload are therefore close
to the median, mean and 99th percentile of the distribution.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np

from coa_jax.perf.bench.workload import FIRST_ID, Call, Script

GROUPS, SIZE, CALLS, SIGNAL = 240, 4, 2, 0.5
TOOL_MEDIAN_S, TOKENS, TAIL = 0.5, 48, 8
_OBSERVATION = (8, 24)
_Z99 = statistics.NormalDist().inv_cdf(0.99)


@dataclasses.dataclass(frozen=True)
class WorkloadSample:
    """A sample of a workload.

    Attributes:
        script: lengths of the turns, and tool calls.
        right: whether the answer of the sample is right.
    """

    script: Script
    right: bool


@dataclasses.dataclass(frozen=True)
class PipelineWorkload:
    """A workload of the pipeline benchmark, which consists of groups of samples.

    Attributes:
        name: name of the workload, used in the results.
        groups: samples of each group; all groups have the same size.
    """

    name: str
    groups: tuple[tuple[WorkloadSample, ...], ...]

    @property
    def signal(self) -> float:
        """Share of the groups that have a signal, which means that their rewards differ."""
        mixed = sum(len({sample.right for sample in group}) > 1 for group in self.groups)
        return mixed / len(self.groups)

    @property
    def scripts(self) -> list[Script]:
        """The lengths and tool calls (script) of each sample, group after group."""
        return [sample.script for group in self.groups for sample in group]

    @property
    def tokens_per_group(self) -> float:
        """Mean number of sampled tokens of a group."""
        return sum(script.generated for script in self.scripts) / len(self.groups)

    @property
    def seconds_per_group(self) -> float:
        """Mean total time, in seconds, that the tools of a group's samples sleep."""
        return sum(call.seconds for s in self.scripts for call in s.calls) / len(self.groups)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sample, not including its prompt."""
        return max(script.generated + script.observed for script in self.scripts)


def draw(p99: int) -> PipelineWorkload:
    """Draws a workload at random; the same ``p99`` always gives the same workload.

    Args:
        p99: 99th percentile of the tool latency, in seconds; also the seed of all random numbers.
    """
    random = np.random.default_rng(p99)

    def log_normal(median: float, p99: float, size: int) -> np.ndarray:
        places = (random.permutation(size) + random.uniform(size=size)) / size
        quantiles = [statistics.NormalDist().inv_cdf(quantile) for quantile in places]
        return median * np.exp(np.array(quantiles) * math.log(p99 / median) / _Z99)

    samples = GROUPS * SIZE
    seconds = log_normal(TOOL_MEDIAN_S, p99, samples * CALLS).reshape(samples, CALLS)
    tokens = np.clip(log_normal(TOKENS, TAIL * TOKENS, samples), CALLS + 1, TAIL * TOKENS)
    shares = random.dirichlet([4.0] * (CALLS + 1), samples)
    lengths = np.maximum(np.round(tokens[:, None] * shares), 1).astype(int)
    observations = random.integers(*_OBSERVATION, (samples, CALLS), endpoint=True)
    # A group with a signal has one to three right answers out of four; in the other groups all
    # answers are right, or all are wrong.
    mixed = random.permutation(GROUPS) < SIGNAL * GROUPS
    right = np.where(mixed, random.integers(1, SIZE, GROUPS), random.choice([0, SIZE], GROUPS))
    order = random.permuted(np.tile(np.arange(SIZE), (GROUPS, 1)), axis=1)

    def sample(i: int) -> WorkloadSample:
        calls = tuple(
            Call(round(float(s), 3), tuple(range(FIRST_ID, FIRST_ID + size)))
            for s, size in zip(seconds[i], observations[i].tolist(), strict=True)
        )
        script = Script(i // SIZE, tuple(lengths[i].tolist()), calls)
        return WorkloadSample(script, bool(order[i // SIZE, i % SIZE] < right[i // SIZE]))

    groups = [tuple(map(sample, range(i, i + SIZE))) for i in range(0, samples, SIZE)]
    return PipelineWorkload(f"pipeline_{p99}", tuple(groups))
