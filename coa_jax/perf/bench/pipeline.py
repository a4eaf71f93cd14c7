"""Measures steps per hour of whole RL runs with long-tailed tool latencies and trajectory lengths.

    coa-jax bench-pipeline --workload=20 --workdir=runs/pipeline
    coa-jax bench-pipeline --workload=20 --workdir=runs/pipeline --set=max_staleness=2

The command runs the code of `coa-jax rl`: agent loop, engine, grading, updates and checkpoints. A
tiny policy samples real tokens. The workload fixes the number of tokens of each sample, the time
that its tools sleep, and whether its answer is right. The tool latency is log-normal, with a median
of 0.5 s and a 99th percentile of ``--workload`` seconds. The length of a sample is log-normal too,
with a 99th percentile of eight times the median. Half of the groups have a signal, which means that
the rewards of the group differ.

The first and the last steps are left out of the results. During the first steps programs are
compiled, and all groups start at once; during the last steps no groups start. The command prints
one JSON object:

    steps_per_hour       3600 / median seconds of a step
    steps_per_hour_mean  3600 / mean seconds; overlapping steps may end at almost the same time
    occupied             share of the slots' time in which a slot has a sample ...
    waiting              ... and in which that sample waits for a tool
    staleness            number of trajectories for each age. The age of a trajectory is step - 1
                         minus the oldest version of the policy that sampled some of its tokens
    time                 median seconds of a step by phase of the main thread, see docs/metrics.md
    floor                lower bounds, from measurements of the same process:
        decode_s           D: tokens of a step / tokens per second with all slots full and no tools,
                           including prefill
        tools_s            T: tool seconds of a step / number of slots, because a slot keeps its
                           sample while a tool runs
        update_s           U: update and publication of weights, without concurrent rollouts
        step_s             D + max(U, T): decoding and updates share the devices
        apart_s            max(D + T, U): decoding and updates have separate devices
        serial_s           D + T + U: nothing overlaps with an update
    of_floor             floor.step_s / mean seconds of a step: 1 is the best possible

A step needs ``--groups`` groups with a signal, and samples further groups until it has them. On
average a step therefore samples ``--groups`` / share of the groups with a signal. D and T count the
tokens and tool seconds of this number of groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
from absl import flags

from coa_jax.demo.bpe import train_bpe
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.model.api import Model, load_model, save_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params
from coa_jax.perf.bench.measure import given, output_path, report
from coa_jax.perf.bench.models import rl_settings, warm_engines
from coa_jax.perf.bench.pipeline_samples import (
    PROTOCOL,
    RIGHT,
    Samples,
    SampleWatch,
    WatchedSleep,
    within,
)
from coa_jax.perf.bench.pipeline_workload import PipelineWorkload, draw
from coa_jax.perf.bench.workload import FIRST_ID
from coa_jax.rollout import loop
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.run.command import run_main
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import Task
from coa_jax.train import learner, rl
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl_config import RLConfig

EDGE = 3
"""Number of steps at each end of a run that are left out of the results."""

# --- a run -----------------------------------------------------------------------------------


class _Run(RunDir):
    """A run directory that records when each step ended, and the ages of its trajectories."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.ends: list[float] = []
        self.figures: list[dict[str, Any]] = []
        self.ages: Counter[int] = Counter()

    def metrics(self, step: int, phase: str, **scalars: Any) -> None:
        """Writes the metrics of a step, see `RunDir.metrics`, and records when the step ended."""
        super().metrics(step, phase, **scalars)
        self.ends.append(time.perf_counter())
        self.figures.append(scalars)

    def traces(self, step: int, phase: str, rows: Iterable[Any], *form: str) -> None:
        """Writes the trajectories of a step, see `RunDir.traces`, and records their ages."""
        rows = list(rows)
        self.ages.update(step - 1 - row["metadata"]["policy_versions"][0][1] for row in rows)
        super().traces(step, phase, rows, *form)


def run_rl(
    config: RLConfig, workload: PipelineWorkload, path: Path, tool_share: float = 1.0
) -> tuple[_Run, SampleWatch]:
    """Runs reinforcement learning on a workload.

    Args:
        config: settings of the run, whose tasks must be those of `write_inputs`.
        workload: lengths, tool calls and answers of the samples.
        path: path of a new run directory.
        tool_share: factor by which the sleeping time of the tools is multiplied; 1 is the time of
            the workload.

    Returns:
        The run directory with the measurements of the run, and the measurements of the samples.
    """
    watch = SampleWatch()
    episodes = Samples(workload, watch)
    # Replace the class that parses the policy's text, and remove the end-of-sequence tokens.
    with (
        mock.patch.object(loop, "TextEpisodes", lambda *_: episodes),
        mock.patch.object(learner, "eos_ids", lambda _: list[int]()),
        contextlib.closing(_Run(path)) as run,
    ):
        rl.train(config, run, path / "model", [WatchedSleep(watch, tool_share)])
    return run, watch


def write_inputs(workload: PipelineWorkload, folder: Path) -> None:
    """Writes the inputs of a run to a folder: a policy with random weights, and the tasks.

    There is one task for each group of the workload.
    """
    questions = [f"Question {number} of {workload.name}." for number in range(len(workload.groups))]
    rows = (
        {"id": str(i), "question": q, "answer": RIGHT, "protocol": PROTOCOL}
        for i, q in enumerate(questions)
    )
    jsonl.write_lines(folder / "tasks.jsonl", rows)
    tokenizer = train_bpe(questions, 400)
    shape = ModelConfig("llama", len(tokenizer), 64, 128, 2, 4, 2, 16)
    model = Model(shape, init_params(shape, jax.random.key(0)), tokenizer)
    save_model(model, folder / "policy", overwrite=True)


def rl_config(
    workload: PipelineWorkload,
    folder: Path,
    *,
    steps: int,
    groups: int,
    slots: int,
    changes: Mapping[str, Any],
) -> RLConfig:
    """Creates the settings of a run on the inputs in a folder.

    Args:
        workload: the workload for which `write_inputs` wrote the inputs.
        folder: the folder to which `write_inputs` wrote the inputs.
        steps: number of steps of the run.
        groups: number of groups per step that have a signal (rewards that differ).
        slots: number of slots of the engine.
        changes: fields of `RLConfig` to override, by name.

    Raises:
        UserError: a name in ``changes`` is not a field of `RLConfig`.
    """
    if unknown := sorted(changes.keys() - {field.name for field in dataclasses.fields(RLConfig)}):
        raise UserError(f"--set: there is no setting {unknown[0]!r} of RL")
    prompt = 128
    longest = -(-(workload.longest + prompt) // 128) * 128
    config = rl_settings(
        EngineConfig(slots=slots, max_length=longest, chunk=8, dtype="float32"),
        OptimizerConfig(learning_rate=1e-6, total_steps=steps),
        model=str(folder / "policy"),
        tasks=str(folder / "tasks.jsonl"),
        num_tasks=len(workload.groups),
        groups=groups,
        group_size=len(workload.groups[0]),
        rows=4,
        row_length=longest,
        remat="none",
        algorithm=Algorithm(name="dapo"),
        keep_last=1,
        max_sampled=4.0,
    )
    return dataclasses.replace(config, **changes)


# --- the measurement -------------------------------------------------------------------------


def full_rate(config: RLConfig, workload: PipelineWorkload) -> float:
    """Measures the tokens sampled per second while all slots are in use and no tool sleeps.

    Args:
        config: settings of the run.
        workload: samples to decode.

    Raises:
        UserError: the workload has too few samples to fill the slots.
    """
    policy = load_model(config.model)
    engines = warm_engines(policy.params, policy.config, config.engine)
    watch = SampleWatch()
    last: list[tuple[float, int]] = []

    def requests() -> Iterator[Request]:
        prompt = tuple(range(FIRST_ID, FIRST_ID + 48))
        for number, group in enumerate(workload.groups):
            last.append((time.perf_counter(), watch.tokens))
            task = Task(str(number), "", PROTOCOL, (), "bench")
            yield Request(task, prompt, 0, number, tuple(range(len(group))))

    async def work() -> None:
        calls = max(len(script.calls) for script in workload.scripts)
        budgets = RolloutConfig(max_tokens=config.engine.max_length, max_tool_calls=calls)
        samples, tools = Samples(workload, watch), [WatchedSleep(watch, 0.0)]
        stream = loop.rollout(engines, None, requests(), tools, budgets, episodes=samples)
        async with contextlib.aclosing(stream):
            async for _ in stream:
                pass

    asyncio.run(work())
    (start, before), (end, after) = last[len(last) // 4], last[-1]
    if after == before:
        raise UserError("--slots: the workload has too few samples to fill the slots")
    return (after - before) / (end - start)


def floor(
    workload: PipelineWorkload, groups: int, slots: int, rate: float, update_s: float
) -> dict[str, float]:
    """Computes lower bounds on the time of an RL step, in seconds.

    Args:
        workload: samples of the run.
        groups: number of groups per step that have a signal (rewards that differ).
        slots: number of slots of the engine.
        rate: tokens sampled per second while all slots are in use, see `full_rate`.
        update_s: seconds that an update and the publication of the new weights take together.

    Returns:
        Three times by name: ``decode_s`` of decoding, ``tools_s`` of tool calls, divided by the
        slots, and ``update_s``. Three bounds that combine them: ``step_s`` if decoding and the
        update share devices, ``apart_s`` if they have separate devices, and ``serial_s`` if nothing
        overlaps with the update. The docstring of the module has the formulas.
    """
    sampled = groups / workload.signal
    decode = sampled * workload.tokens_per_group / rate
    tools = sampled * workload.seconds_per_group / slots
    return {
        "decode_s": decode,
        "tools_s": tools,
        "update_s": update_s,
        "step_s": decode + max(update_s, tools),
        "apart_s": max(decode + tools, update_s),
        "serial_s": decode + tools + update_s,
    }


def measure(
    workload: PipelineWorkload,
    folder: Path,
    *,
    steps: int = 16,
    groups: int = 8,
    slots: int = 32,
    edge: int = EDGE,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Measures a workload, and returns the result that the command prints.

    Args:
        workload: lengths, tool calls and answers of the samples.
        folder: folder for inputs and runs.
        steps: number of steps of the run, which must be more than twice ``edge``.
        groups: number of groups per step that have a signal (rewards that differ).
        slots: number of slots of the engine.
        edge: number of steps at the start and at the end of the run that are left out of the
            results.
        changes: fields of `RLConfig` to override, by name.
    """
    write_inputs(workload, folder)

    config = functools.partial(rl_config, workload, folder, groups=groups, slots=slots)
    # In a run without tool latency and with the default ``max_staleness=0``, no rollouts run during
    # an update, so nothing disturbs the time of the update.
    alone, _ = run_rl(config(steps=4, changes={}), workload, folder / "alone", tool_share=0.0)
    update_s = statistics.median(
        row["time/update"] + row["time/publish"] for row in alone.figures[1:]
    )
    chosen = config(steps=steps, changes=changes)
    least = floor(workload, groups, slots, full_rate(chosen, workload), update_s)
    run, watch = run_rl(chosen, workload, folder / "run")
    ends = run.ends[edge - 1 : len(run.ends) - edge]
    start, end = ends[0], ends[-1]
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    mean, space = statistics.mean(seconds), slots * (end - start)
    times = {
        name: statistics.median(row[name] for row in run.figures[edge:-edge])
        for name in run.figures[-1]
        if name.startswith("time/")
    }
    return {
        "bench": "pipeline",
        "workload": workload.name,
        "settings": dict(changes),
        "steps": len(run.ends),
        "groups": groups,
        "group_size": len(workload.groups[0]),
        "slots": slots,
        "steps_per_hour": round(3600 / statistics.median(seconds), 2),
        "steps_per_hour_mean": round(3600 / mean, 2),
        "step_s": [round(s, 3) for s in seconds],
        "occupied": round(within(watch.occupied, start, end) / space, 4),
        "waiting": round(within(watch.waited, start, end) / space, 4),
        "staleness": {str(age): run.ages[age] for age in sorted(run.ages)},
        "time": {name.removeprefix("time/"): round(value, 4) for name, value in times.items()},
        "floor": {name: round(value, 4) for name, value in least.items()},
        "of_floor": round(least["step_s"] / mean, 4),
    }


# --- the command -----------------------------------------------------------------------------


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax bench-pipeline``."""
    flags.DEFINE_integer("workload", 20, "99th percentile of the tool latency (s)", lower_bound=1)
    flags.DEFINE_string("workdir", None, "new folder for inputs and runs; by default temporary")
    flags.DEFINE_string("out", None, "JSON file for the result, which is printed as well")
    flags.DEFINE_integer("steps", 16, "steps of the run", lower_bound=2 * EDGE + 1)
    flags.DEFINE_integer("groups", 8, "groups that a step trains on", lower_bound=1)
    flags.DEFINE_integer("slots", 32, "sequences in progress at a time", lower_bound=1)
    flags.DEFINE_multi_string("set", [], "setting to change, e.g. max_staleness=2 (repeatable)")


def given_changes(texts: Iterable[str]) -> dict[str, Any]:
    """Parses the arguments of ``--set``; a value that is not valid JSON is taken as a string.

    Raises:
        UserError: a text is not of the form NAME=VALUE.
    """
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set={text}: give NAME=VALUE")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return changes


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-pipeline``: measures RL runs and prints JSON."""
    values = flags.FLAGS
    out = output_path(values.out)
    workload, changes = draw(values.workload), given_changes(values.set)
    with contextlib.ExitStack() as stack:
        folder = values.workdir or stack.enter_context(tempfile.TemporaryDirectory())
        if (Path(folder) / "run").exists():
            raise UserError(f"--workdir={folder}: contains a run; give a new folder")
        options = given(("steps", "groups", "slots"))
        result = measure(workload, Path(folder), changes=changes, **options)
    report(result, out)


if __name__ == "__main__":
    run_main(main, define_flags)
