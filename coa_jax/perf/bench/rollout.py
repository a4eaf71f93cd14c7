"""Measures rollouts with tools: the agent loop and the engine of training on a fixed workload.

    coa-jax bench-rollout --model=DIR --workload=w.json --slots=32 --out=r.json
    coa-jax bench-rollout --random=qwen2.5-1.5b --dtype=bfloat16 --workload=w.json

`coa_jax/perf/bench/workload.py` describes the workload file. All programs are compiled before the
measurement. A repeat lasts from the first prefill to the last token. The command prints one JSON
object. A result that is measured in every repeat is given as median, minimum and maximum:

    wall_s                   seconds of a repeat: the sum of the next four, each of which is a mean
                             if there are several engines
    decode_s                   decoding
    extend_s                   prefilling prompts and observations, and copying the cache of a
                               prompt to the other samples of its group
    idle_s                     time in which no slot could decode, because all waited for tools
    host_s                     the rest: processing tokens, starting and ending samples
    tokens_per_s             sampled tokens that were kept / wall_s
    prefill_tokens_computed  positions that the prefill programs computed, including padding
    prefill_tokens_needed    tokens of each prompt once, and of each observation once
    decode_steps             decoding steps. The number of rows that a step computes depends on the
                             decoding program that the engine selects
    decode_occupancy         share of the computed rows, over all steps, that decoded a token ...
    decode_useful            ... and whose token was kept: tokens sampled between a closing tag and
                             the end of the chunk are discarded
    restarts                 times that a rollout gave way to others, because no page was free, and
                             was prefilled again
    compiles_after_warmup    programs compiled in all repeats together; should be 0
    peak_rss_mb              peak resident memory in all repeats together, in 10^6 bytes
    logp_gap_max             largest difference between the log-probability of a token in sampling
                             and in the forward pass of training
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from coa_jax.data.trajectory import Author, Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.model.compute import local_compute
from coa_jax.perf.bench.forced_episodes import Rollouts, Sleep
from coa_jax.perf.bench.measure import after_warm_up, spread
from coa_jax.perf.bench.models import Subject, warm_engines
from coa_jax.perf.bench.shapes import define_flags, run_command
from coa_jax.perf.bench.workload import Workload
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import run_main
from coa_jax.train.batch import pack, split_rows
from coa_jax.train.examples import trajectory_example
from coa_jax.train.logps import token_logps

# --- one repeat ----------------------------------------------------------------------------


def run_workload(
    engines: Sequence[Engine],
    workload: Workload,
    temperature: float = 1.0,
    on_finish: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:
    """Runs a workload in the same agent loop as in training.

    Args:
        engines: engines without stop tokens, whose slots are free and have at least
            ``workload.longest`` positions.
        workload: the workload to run.
        temperature: sampling temperature.
        on_finish: function that is called with each trajectory when the trajectory finishes.

    Returns:
        A trajectory for each rollout, in the order of the workload.
    """
    episodes = Rollouts(workload, temperature)
    calls = max(len(script.calls) for script in workload.scripts)
    config = RolloutConfig(max_tokens=engines[0].config.max_length, max_tool_calls=calls)
    finished = []

    async def work() -> None:
        requests, tools = episodes.requests(), [Sleep()]
        stream = rollout(engines, None, requests, tools, config, episodes=episodes)
        async with contextlib.aclosing(stream):
            async for trajectory in stream:
                on_finish(trajectory)
                finished.append(trajectory)

    asyncio.run(work())
    return sorted(finished, key=lambda trajectory: trajectory.sample_id)


def mean_of(engines: Sequence[Engine], name: str) -> float:
    """Returns the mean of a measurement (a field of `Meter`) over engines.

    The engines run at the same time, so their seconds are not added up.
    """
    return float(np.mean([getattr(engine.meter, name) for engine in engines]))


def measure_once(
    engines: Sequence[Engine], workload: Workload
) -> tuple[dict[str, float], list[Trajectory]]:
    """Runs a workload once, and measures it.

    With several engines, seconds are means over the engines, and counts are sums over them.

    Returns:
        The measurements by name, and the trajectories in the order of the workload.

    Raises:
        RuntimeError: the number of sampled tokens differs from that of the workload.
    """
    for one in engines:
        one.restart()
    began = time.perf_counter()
    trajectories = run_workload(engines, workload)
    wall = time.perf_counter() - began
    sampled = sum(int(np.sum(t.author == Author.POLICY)) for t in trajectories)
    if sampled != workload.generated_tokens:
        raise RuntimeError(f"{sampled} tokens were sampled, not {workload.generated_tokens}")
    places = sum(one.meter.row_steps for one in engines)
    seconds = {name: mean_of(engines, name) for name in ("decode_s", "extend_s", "idle_s")}
    figures = {
        "wall_s": wall,
        **seconds,
        "host_s": wall - sum(seconds.values()),
        "tokens_per_s": sampled / wall,
        "prefill_tokens_computed": sum(one.meter.extended_tokens for one in engines),
        "decode_steps": sum(one.meter.decode_steps for one in engines),
        "decode_occupancy": sum(one.meter.decoded_tokens for one in engines) / places,
        "decode_useful": sampled / places,
        "restarts": sum(len(t.metadata.get("restarts", ())) for t in trajectories),
    }
    return figures, trajectories


def logp_gap(subject: Subject, trajectories: Sequence[Trajectory], dtype: str) -> float:
    """Returns the largest absolute difference between sampling and training log-probabilities.

    Args:
        subject: the model that sampled the trajectories.
        trajectories: trajectories that were sampled at temperature 1.
        dtype: dtype of the matmul operands.
    """
    # If the length is a multiple of 128, the forward pass skips blocks of keys to which no query
    # attends.
    length = -(-max(len(t.tokens) for t in trajectories) // 128) * 128
    score = jax.jit(
        functools.partial(token_logps, compute=local_compute(dtype)), static_argnames=("config",)
    )
    gaps = []
    for batch in split_rows(pack([trajectory_example(t, 0.0) for t in trajectories], length), 1):
        logps, _ = score(subject.params, config=subject.config, batch=batch)
        gaps.append(np.max(np.abs(np.asarray(logps) - batch.logp) * batch.mask))
    return float(np.max(gaps))


# --- the command ---------------------------------------------------------------------------


def measure(
    subject: Subject, workload: Workload, shapes: EngineConfig, repeats: int
) -> dict[str, Any]:
    """Measures a workload ``repeats`` times, after compiling the programs; returns the result.

    Args:
        subject: the model.
        workload: the workload to run.
        shapes: shapes of the engines.
        repeats: number of measured repetitions.
    """
    began = time.perf_counter()
    engines = warm_engines(subject.params, subject.config, shapes)
    warm_up = time.perf_counter() - began
    counted = after_warm_up()
    measured = [measure_once(engines, workload) for _ in range(repeats)]
    runs, trajectories = [figures for figures, _ in measured], measured[-1][1]
    return {
        "bench": "rollout",
        "model": subject.name,
        "workload": workload.name,
        **dataclasses.asdict(shapes),
        "repeats": repeats,
        "warm_up_s": round(warm_up, 2),
        "generated_tokens": workload.generated_tokens,
        "prefill_tokens_needed": workload.prefill_tokens,
        **{name: spread(run[name] for run in runs) for name in runs[0]},
        **counted(),
        "logp_gap_max": logp_gap(subject, trajectories, shapes.dtype),
    }


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-rollout``: measures rollouts and prints JSON."""
    values = flags.FLAGS
    run_command(functools.partial(measure, repeats=values.repeats), values.dtype)


if __name__ == "__main__":
    run_main(main, define_flags)
