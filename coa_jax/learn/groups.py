"""Groups of graded trajectories for a step, with dynamic sampling (paper §3.2)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence

import grain
import numpy as np

from coa_jax.engine.config import SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.learn.clock import Clock
from coa_jax.learn.objectives import has_signal
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.shaping import shape_reward
from coa_jax.model.api import Model
from coa_jax.parallel import processes
from coa_jax.protocol import Prompt
from coa_jax.rollout.collect import collect
from coa_jax.rollout.request import Request, prompt_ids
from coa_jax.tasks import Graders, Task
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Reward, Trajectory, format_valid


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The groups of one step.

    Attributes:
        used: what the step learns from, at most as many groups as it wants; each graded.
        everything: all groups that were sampled, graded.
        cursor: index of the next task.
        surplus: groups with a signal that the step has no room for; the next one begins with them.
        kept: how many of ``used`` an earlier step left over.
    """

    used: list[list[Trajectory]]
    everything: list[list[Trajectory]]
    cursor: int
    surplus: list[list[Trajectory]] = dataclasses.field(default_factory=list)
    kept: int = 0


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process has sampled for a step.

    Attributes:
        rounds: its groups, graded, of each round.
        cursor: index of the next task.
    """

    rounds: list[list[list[Trajectory]]]
    cursor: int


def sample_share(
    config: RLConfig,
    runner: asyncio.Runner,
    engines: Sequence[Engine],
    model: Model,
    stream: grain.MapDataset,
    prompt: Prompt,
    cursor: int,
    tools: Sequence[Tool],
    graders: Graders,
    clock: Clock,
    surplus: int = 0,
) -> Share:
    """Samples this process's part of tasks from ``cursor`` on, until all processes have enough.

    An algorithm that learns from a signal takes groups whose rewards differ, not only because of
    their lengths (DAPO's dynamic sampling, arXiv 2503.14476 §3.2).  It has ``surplus`` of them from
    earlier steps and samples in at most ``max_rounds`` rounds: the first as many tasks as are
    missing, a later one as many as the rate of the earlier rounds makes necessary.  Other
    algorithms take every group of one round.

    No program of all processes is run here, so that one may run beside it.  The time of grading
    goes to ``clock``.
    """
    rounds: list[list[list[Trajectory]]] = []
    sampled = useful = 0
    while len(rounds) < config.max_rounds:
        missing = config.groups - surplus - useful
        if missing <= 0:
            break
        rate = max(useful / sampled, 0.25) if sampled else 1.0
        wanted = min(config.groups, int(np.ceil(missing / rate)))
        requests = [
            _request(config, model, stream[index], prompt, index)
            for index in range(cursor, cursor + wanted)
        ]
        cursor, sampled = cursor + wanted, sampled + wanted
        mine = processes.share(requests)
        collected = collect(runner, engines, model.tokenizer, mine, tools, config.rollout)
        with clock("reward"):
            tasks = [request.task for request in mine]
            groups = _graded(config, runner, graders, tasks, collected)
        rounds.append(groups)
        if config.chosen.learn_from == "all":
            break
        found = sum(has_signal(earned(group)) for group in groups)
        if processes.count() > 1:
            wait = config.mesh.wait_seconds
            found = sum(runner.run(processes.exchange(found, "counting of groups", wait)))
        useful += found
    return Share(rounds, cursor)


def assemble(config: RLConfig, share: Share, surplus: Sequence[list[Trajectory]] = ()) -> Sampled:
    """Puts a step together from the shares of all processes, each of which calls this.

    It begins with the ``surplus`` of earlier steps, the oldest first.
    """
    everything: list[list[Trajectory]] = []
    learnable = list(surplus)
    for groups in share.rounds:
        for graded in processes.gather(groups, "gathering of groups", config.mesh.wait_seconds):
            everything.append(graded)
            if config.chosen.learn_from == "all" or has_signal(earned(graded)):
                learnable.append(graded)
    used, left = learnable[: config.groups], learnable[config.groups :]
    return Sampled(used, everything, share.cursor, left, kept=min(len(surplus), len(used)))


def _request(config: RLConfig, model: Model, task: Task, prompt: Prompt, index: int) -> Request:
    return Request(
        task=task,
        prompt=prompt_ids(model.tokenizer, task, prompt),
        seed=config.seed,
        prompt_id=index,
        samples=tuple(range(config.group_size)),
        sampling=SamplingParams(temperature=config.temperature),
        metadata={"stage": "rl-train"},
    )


def _graded(
    config: RLConfig,
    runner: asyncio.Runner,
    graders: Graders,
    tasks: Sequence[Task],
    groups: Sequence[Sequence[Trajectory]],
) -> list[list[Trajectory]]:
    """The groups with their rewards; judges and programs of all of them work at the same time."""
    pairs = [(task, t) for task, group in zip(tasks, groups, strict=True) for t in group]
    values = iter(runner.run(graders.grade_many(pairs)))
    return [
        [dataclasses.replace(t, reward=_shaped(config, next(values), t)) for t in group]
        for group in groups
    ]


def describe(sampled: Sampled) -> dict[str, float]:
    """Figures of a step's rollouts, all sampled groups included."""
    groups = sampled.everything
    counts = {
        "group/sampled": float(len(groups)),
        "group/used": float(len(sampled.used)),
        "group/surplus": float(len(sampled.surplus)),
        "stale/frac": sampled.kept / max(len(sampled.used), 1),
    }
    if not groups:
        return counts  # the surplus was enough
    flat = [trajectory for group in groups for trajectory in group]
    values = graded_values(groups)
    calls = [call for trajectory in flat for call in trajectory.tool_calls]
    lengths = [trajectory.num_policy_tokens for trajectory in flat]
    stops = Counter(str(trajectory.stop_reason) for trajectory in flat)
    unsure = sum(not has_signal(earned(group)) for group in groups)
    return {
        "reward/mean": float(np.mean(values)) if values else 0.0,
        "reward/std": float(np.std(values)) if values else 0.0,
        "reward/masked_frac": 1.0 - len(values) / len(flat),
        "reward/ungraded": float(sum(bool(t.reward and t.reward.reason) for t in flat)),
        "group/frac_zero_std": unsure / len(groups),
        **counts,
        "len/mean": float(np.mean(lengths)),
        "len/max": float(np.max(lengths)),
        "tool/calls": len(calls) / len(flat),
        "tool/fail_frac": sum(not call.ok for call in calls) / max(len(calls), 1),
        "tool/seconds": sum(call.end - call.start for call in calls) / len(flat),
        "format/valid": float(np.mean([format_valid(trajectory) for trajectory in flat])),
        **{f"stop/{reason}": count / len(flat) for reason, count in sorted(stops.items())},
    }


def graded_values(groups: Sequence[Sequence[Trajectory]]) -> list[float]:
    """Rewards of all trajectories that could be graded."""
    return [value for group in groups for value in rewards(group) if value is not None]


def rewards(group: Sequence[Trajectory]) -> list[float | None]:
    """Rewards of graded or ungraded trajectories; None where there is none."""
    return [None if t.reward is None else t.reward.value for t in group]


def earned(group: Sequence[Trajectory]) -> list[float | None]:
    """`rewards` before a penalty for length."""
    return [
        None if t.reward is None else t.reward.parts.get("earned", t.reward.value) for t in group
    ]


def _shaped(config: RLConfig, reward: Reward, trajectory: Trajectory) -> Reward:
    return shape_reward(
        reward,
        len(trajectory.tokens),
        format_reward=config.format_reward,
        budget=config.longest,
        buffer=config.chosen.overlong_buffer,
        penalty=config.chosen.overlong_penalty,
    )
