"""Measures a policy on tasks with live tools."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.engine.memory import engine_memory
from coa_jax.evaluate.metrics import details, summarize
from coa_jax.learn.batch import prompt_ids
from coa_jax.model.api import Model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.progress import progress
from coa_jax.rollout.collect import collect
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tasks import Graders, GradersConfig, Task
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """An evaluation.

    Attributes:
        tasks: task source, see `tasks.load_tasks`.
        split: ``validation`` or ``test``.
        num_tasks: tasks that are drawn.
        samples: samples of a task; pass@k needs k of them.
        seed: which tasks, and the randomness of the samples.
        temperature, top_p, top_k: of sampling; temperature 0 is greedy.
        engine: shapes of decoding.
        rollout: budgets of a trajectory.
        graders: how answers are graded.
    """

    tasks: str
    split: str
    num_tasks: int
    samples: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    engine: EngineConfig
    rollout: RolloutConfig
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)


def evaluate(
    model: Model, tasks: Sequence[Task], config: EvaluateConfig, tools: Sequence[Tool], stage: str
) -> list[list[Trajectory]]:
    """Graded samples of every task.

    Args:
        model: the policy.
        tasks: what it is asked.
        config: how.
        tools: live tools.
        stage: goes into the trajectories' metadata.
    """
    graders = Graders(config.graders)
    print(f"engine: {engine_memory(model.config, config.engine)}", flush=True)
    constraint = constraint_for(
        config.rollout,
        model.tokenizer,
        model.config.vocab_size,
        (task.protocol for task in tasks),
    )
    if constraint is not None:
        print(f"constraint: {constraint}", flush=True)
    engine = Engine(model.params, model.config, config.engine, eos_ids(model.tokenizer), constraint)
    if config.rollout.max_seconds:
        engine.warm_up()  # or the first trajectories would spend their time on compilation
    sampling = SamplingParams(config.temperature, config.top_p, config.top_k)
    style = config.rollout.prompt_style
    requests = [
        Request(
            task=task,
            prompt=prompt_ids(model.tokenizer, task.protocol, task.question, style),
            seed=config.seed,
            prompt_id=index,
            samples=tuple(range(config.samples)),
            sampling=sampling,
            metadata={"stage": stage},
        )
        for index, task in enumerate(tasks)
    ]
    with (
        asyncio.Runner() as runner,
        progress(f"evaluate {stage}", total=len(tasks) * config.samples) as bar,
    ):
        groups = collect(
            runner,
            engine,
            model.tokenizer,
            requests,
            tools,
            config.rollout,
            on_finish=lambda trajectory: bar.update(),
        )
    pairs = [(task, t) for task, group in zip(tasks, groups, strict=True) for t in group]
    rewards = iter(asyncio.run(graders.grade_many(pairs)))
    return [[dataclasses.replace(t, reward=next(rewards)) for t in group] for group in groups]


def blocks(groups: Sequence[Sequence[Trajectory]], stage: str) -> dict[str, Any]:
    """What ``summary.json`` says about a stage."""
    return {stage: summarize(groups), f"{stage}_details": details(groups)}


def table(result: Mapping[str, Any], stage: str) -> str:
    """The figures of a stage for a terminal."""
    block, more = result[stage], result[f"{stage}_details"]
    low, high = block["ci95"]
    lines = [
        f"{stage}: pass@1 {block['pass_at_1']:.3f} (95 % {low:.3f}-{high:.3f}, n {block['n']})",
        *(f"  pass@{k} {rate:.3f}" for k, rate in more["pass_at_k"].items() if k != "1"),
        *(
            f"  {hops} hops: {entry['pass_at_1']:.3f} (n {entry['n']})"
            for hops, entry in more["by_hops"].items()
        ),
        f"  {block['tokens_per_task']:.0f} tokens and {block['tool_calls_per_task']:.2f} tool "
        f"calls a task, {100 * block['format_valid']:.1f} % obey the protocol",
        f"  ends: {', '.join(f'{name} {count}' for name, count in more['stops'].items())}",
    ]
    for name, entry in more["tools"].items():
        outcomes = ", ".join(f"{k} {v}" for k, v in sorted(entry["outcomes"].items()))
        lines.append(f"  {name}: {entry['calls']} calls ({outcomes})")
    if more["tokens_per_solved"] is not None:
        lines.append(f"  {more['tokens_per_solved']:.0f} tokens per solved task")
    if more["ungraded"]:
        lines.append(f"  {more['ungraded']} samples could not be graded and are left out")
    return "\n".join(lines)
