"""Workloads of the pipeline benchmark, with long-tailed tool latencies and trajectory lengths.

    python -m coa_jax.bench.pipeline_workload --p99=20 --seed=20 --out=pipeline_20.json

The command draws a workload at random. Tool latencies and sample lengths are drawn by stratified
sampling: one value from each of n equally probable parts of the distribution. Median, mean and 99th
percentile in a file are therefore close to those of the distribution. The file is a JSON object:

    {"name": "pipeline_20", "seed": 20, "tool_p99_s": 20.0,
     "groups": [{"samples": [{"lengths": [9, 30, 12],       tokens before each call, and at the end
                              "seconds": [0.4, 2.1],        latency of each call
                              "observations": [16, 9],      tokens that each call returns
                              "right": true},               whether the answer is right
                             ...]}, ...]}
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from coa_jax.bench.measure import output_path
from coa_jax.bench.workload import FIRST_ID, Call, Script
from coa_jax.bounds import MAX_INT
from coa_jax.cli import run_main
from coa_jax.errors import UserError
from coa_jax.files import replace

WORKLOADS = Path(__file__).parent / "workloads"

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


def read_workload(name: str) -> PipelineWorkload:
    """Reads a workload.

    Args:
        name: ``5``, ``20`` or ``60`` for a workload of the package, or the path of a workload file.

    Raises:
        UserError: the file does not exist or is malformed.
    """
    path = WORKLOADS / f"pipeline_{name}.json"
    path = path if path.exists() else Path(name)
    try:
        value = json.loads(path.read_text())
        groups = tuple(
            tuple(_sample(number, sample) for sample in group["samples"])
            for number, group in enumerate(value["groups"])
        )
    except OSError as error:
        raise UserError(f"--workload={name}: {error.strerror}; give 5, 20, 60 or a file") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a workload of the pipeline benchmark: {error!r}") from error
    if len({len(group) for group in groups}) != 1:
        raise UserError(f"{path}: the groups have different sizes, or there are none")
    return PipelineWorkload(path.stem, groups)


def _sample(group: int, sample: Mapping[str, Any]) -> WorkloadSample:
    calls = tuple(
        Call(float(seconds), tuple(range(FIRST_ID, FIRST_ID + int(size))))
        for seconds, size in zip(sample["seconds"], sample["observations"], strict=True)
    )
    lengths = tuple(map(int, sample["lengths"]))
    if len(lengths) != len(calls) + 1 or min(lengths) < 1:
        raise ValueError(f"the lengths {lengths} do not fit a sample with {len(calls)} calls")
    return WorkloadSample(Script(group, lengths, calls), bool(sample["right"]))


def draw(p99: float, seed: int, name: str) -> dict[str, Any]:
    """Draws a workload at random, as the JSON object that the module's docstring describes.

    Args:
        p99: 99th percentile of the tool latency, in seconds.
        seed: seed of all random numbers.
        name: name of the workload.
    """
    random = np.random.default_rng(seed)

    def log_normal(median: float, p99: float, size: int) -> np.ndarray:
        places = (random.permutation(size) + random.uniform(size=size)) / size
        quantiles = [statistics.NormalDist().inv_cdf(place) for place in places]
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
    rows = [
        {
            "lengths": lengths[i].tolist(),
            "seconds": [round(float(s), 3) for s in seconds[i]],
            "observations": observations[i].tolist(),
            "right": bool(order[i // SIZE, i % SIZE] < right[i // SIZE]),
        }
        for i in range(samples)
    ]
    groups = [{"samples": rows[i : i + SIZE]} for i in range(0, samples, SIZE)]
    return {"name": name, "seed": seed, "tool_p99_s": p99, "groups": groups}


def define_flags() -> None:
    """Defines the command-line flags of ``python -m coa_jax.bench.pipeline_workload``."""
    flags.DEFINE_float("p99", 20.0, "99th percentile of the tool latency (s)", lower_bound=0.6)
    flags.DEFINE_integer("seed", 0, "seed of all random numbers", 0, MAX_INT)
    flags.DEFINE_string("out", None, "file to write", required=True)


def main(_: list[str]) -> None:
    """Runs ``python -m coa_jax.bench.pipeline_workload``: writes a random workload."""
    path = output_path(flags.FLAGS.out)
    assert path is not None  # the flag is required
    workload = draw(flags.FLAGS.p99, flags.FLAGS.seed, path.stem)
    replace(path, (json.dumps(workload, separators=(",", ":")) + "\n").encode())
    print(f"{len(workload['groups'])} groups -> {path}")


if __name__ == "__main__":
    run_main(main, define_flags)
