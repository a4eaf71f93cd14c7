"""Measures how much one slow tool call slows down the other rollouts.

    coa-jax bench-workload --slow_tool=20 --out=slow.json
    coa-jax bench-stalls --model=DIR --workload=slow.json --slots=32 --out=r.json

The command alternates between the workload itself and a variant in which the longest tool call is
as quick as the median call. The throughput of the other rollouts is the number of their tokens,
divided by the time until the last of them has finished. The command prints one JSON object. Each
measurement is given as median, minimum and maximum:

    others_tokens_per_s        throughput of the other rollouts with the slow call ...
    others_tokens_per_s_quick  ... and with the quick call
    lost                       share of the throughput that the slow call costs, from the medians;
                               negative if the other rollouts are faster with the slow call, because
                               the waiting rollout does not decode
    wall_s, wall_s_quick       seconds until all rollouts have finished
    compiles_after_warmup      programs compiled in all repeats together; should be 0
    peak_rss_mb                peak resident memory in all repeats together, in 10^6 bytes
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.perf.bench.measure import after_warm_up, spread
from coa_jax.perf.bench.models import Subject, warm_engines
from coa_jax.perf.bench.rollout import run_workload
from coa_jax.perf.bench.shapes import define_flags, run_command
from coa_jax.perf.bench.workload import Call, Workload
from coa_jax.run.command import run_main


def shorten_slowest_call(workload: Workload) -> tuple[Workload, int]:
    """Shortens the longest tool call of a workload to the latency of the median call.

    Returns:
        The changed workload, and the index of the rollout that makes the shortened call.

    Raises:
        UserError: the workload has only one rollout, or no single call is the longest.
    """
    seconds = sorted(call.seconds for script in workload.scripts for call in script.calls)
    if len(workload.scripts) < 2 or len(seconds) < 2 or seconds[-1] == seconds[-2]:
        raise UserError(
            f"workload {workload.name}: one call of several rollouts must be longer than all "
            "others; write it with coa-jax bench-workload --slow_tool=20"
        )
    usual = statistics.median_low(seconds)

    def shorter(call: Call) -> Call:
        return dataclasses.replace(call, seconds=usual) if call.seconds == seconds[-1] else call

    scripts = tuple(
        dataclasses.replace(script, calls=tuple(map(shorter, script.calls)))
        for script in workload.scripts
    )
    (slow,) = (i for i, script in enumerate(scripts) if script != workload.scripts[i])
    return dataclasses.replace(workload, scripts=scripts), slow


def throughput(engines: Sequence[Engine], workload: Workload, apart: int) -> tuple[float, float]:
    """Runs a workload once, and measures the throughput of all rollouts except one.

    Args:
        engines: engines without stop tokens, with free slots, see `run_workload`.
        workload: a workload with at least two rollouts.
        apart: index of the rollout that is left out of the throughput.

    Returns:
        The number of tokens per second that the other rollouts sampled until the last of them
        finished, and the number of seconds until all rollouts, including the rollout ``apart``, had
        finished.
    """
    ends: dict[int, float] = {}
    began = time.perf_counter()

    def ended(trajectory: Trajectory) -> None:
        ends[trajectory.sample_id] = time.perf_counter() - began

    run_workload(engines, workload, on_finish=ended)
    others = [number for number in ends if number != apart]
    tokens = sum(workload.scripts[number].generated for number in others)
    return tokens / max(ends[number] for number in others), max(ends.values())


def measure(
    subject: Subject, workload: Workload, shapes: EngineConfig, repeats: int
) -> dict[str, Any]:
    """Measures throughput with and without the slow call of a workload.

    Both variants of the workload run ``repeats`` times, after the programs have been compiled.

    Args:
        subject: the model.
        workload: the workload, which has one slow call.
        shapes: shapes of the engines, with at least one slot per rollout.
        repeats: number of measured repetitions of each variant.

    Raises:
        UserError: there are fewer slots than rollouts, or the workload has no single longest call.
    """
    quick, slow = shorten_slowest_call(workload)
    if shapes.slots < len(workload.scripts):
        raise UserError(
            f"--slots={shapes.slots}: give one slot for each of the {len(workload.scripts)} "
            "rollouts, so that no rollout waits for a slot"
        )
    engines = warm_engines(subject.params, subject.config, shapes)
    counted = after_warm_up()
    runs: dict[str, list[float]] = {}
    for _ in range(repeats):
        for suffix, chosen in (("", workload), ("_quick", quick)):
            speed, wall = throughput(engines, chosen, slow)
            runs.setdefault(f"others_tokens_per_s{suffix}", []).append(speed)
            runs.setdefault(f"wall_s{suffix}", []).append(wall)
    medians = {name: statistics.median(values) for name, values in runs.items()}
    lost = 1 - medians["others_tokens_per_s"] / medians["others_tokens_per_s_quick"]
    return {
        "bench": "stalls",
        "model": subject.name,
        "workload": workload.name,
        **dataclasses.asdict(shapes),
        "repeats": repeats,
        "slow_tool_s": max(c.seconds for script in workload.scripts for c in script.calls),
        "lost": round(lost, 4),
        **{name: spread(values) for name, values in runs.items()},
        **counted(),
    }


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-stalls``: measures the cost of one slow tool call and prints JSON."""
    values = flags.FLAGS
    run_command(functools.partial(measure, repeats=values.repeats), values.dtype)


if __name__ == "__main__":
    run_main(main, define_flags)
