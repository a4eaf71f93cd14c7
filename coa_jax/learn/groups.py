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
from coa_jax.learn.advantages import has_signal
from coa_jax.learn.batch import prompt_ids
from coa_jax.learn.rl_config import RLConfig
from coa_jax.model.api import Model
from coa_jax.parallel import processes
from coa_jax.rollout.collect import collect
from coa_jax.rollout.request import Request
from coa_jax.tasks import Task, grade
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Reward, Trajectory, format_valid


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The groups of one step.

    Attributes:
        used: groups with a signal, at most as many as a step wants; each graded.
        everything: all groups that were sampled, graded.
        cursor: index of the next task.
    """

    used: list[list[Trajectory]]
    everything: list[list[Trajectory]]
    cursor: int


def sample_groups(
    config: RLConfig,
    runner: asyncio.Runner,
    engines: Sequence[Engine],
    model: Model,
    stream: grain.MapDataset,
    cursor: int,
    tools: Sequence[Tool],
) -> Sampled:
    """Samples tasks from ``cursor`` on until ``groups`` of them have differing rewards.

    At most ``max_rounds`` rounds; the first samples ``groups`` tasks, a later one as many as the
    rate of the earlier rounds makes necessary.
    """
    used: list[list[Trajectory]] = []
    everything: list[list[Trajectory]] = []
    for _ in range(config.max_rounds):
        missing = config.groups - len(used)
        rate = max(len(used) / len(everything), 0.25) if everything else 1.0
        wanted = min(config.groups, int(np.ceil(missing / rate)))
        requests = []
        for index in range(cursor, cursor + wanted):
            task: Task = stream[index]
            requests.append(
                Request(
                    task=task,
                    prompt=prompt_ids(
                        model.tokenizer, task.protocol, task.question, config.rollout.prompt_style
                    ),
                    seed=config.seed,
                    prompt_id=index,
                    samples=tuple(range(config.group_size)),
                    sampling=SamplingParams(temperature=config.temperature),
                    metadata={"stage": "rl-train"},
                )
            )
        cursor += wanted
        # Each process samples and grades its part; what follows depends on what all have gathered.
        mine = processes.share(requests)
        groups = [
            [dataclasses.replace(t, reward=_shape(config, grade(request.task, t))) for t in group]
            for request, group in zip(
                mine,
                collect(runner, engines, model.tokenizer, mine, tools, config.rollout),
                strict=True,
            )
        ]
        for graded in processes.gather(groups, "gathering of groups", config.mesh.wait_seconds):
            everything.append(graded)
            if has_signal(rewards(graded)) and len(used) < config.groups:
                used.append(graded)
        if len(used) >= config.groups:
            break
    return Sampled(used, everything, cursor)


def describe(sampled: Sampled) -> dict[str, float]:
    """Figures of a step's rollouts, all sampled groups included."""
    groups = sampled.everything
    flat = [trajectory for group in groups for trajectory in group]
    values = graded_values(groups)
    calls = [call for trajectory in flat for call in trajectory.tool_calls]
    lengths = [trajectory.num_policy_tokens for trajectory in flat]
    stops = Counter(str(trajectory.stop_reason) for trajectory in flat)
    unsure = sum(not has_signal(rewards(group)) for group in groups)
    return {
        "reward/mean": float(np.mean(values)) if values else 0.0,
        "reward/std": float(np.std(values)) if values else 0.0,
        "reward/masked_frac": 1.0 - len(values) / len(flat),
        "group/frac_zero_std": unsure / len(groups),
        "group/sampled": float(len(groups)),
        "group/used": float(len(sampled.used)),
        "len/mean": float(np.mean(lengths)),
        "len/max": float(np.max(lengths)),
        "tool/calls": len(calls) / len(flat),
        "tool/fail_frac": sum(not call.ok for call in calls) / max(len(calls), 1),
        "time/tool_wait": sum(call.end - call.start for call in calls) / len(flat),
        "format/valid": float(np.mean([format_valid(trajectory) for trajectory in flat])),
        **{f"stop/{reason}": count / len(flat) for reason, count in sorted(stops.items())},
    }


def graded_values(groups: Sequence[Sequence[Trajectory]]) -> list[float]:
    """Rewards of all trajectories that could be graded."""
    return [value for group in groups for value in rewards(group) if value is not None]


def rewards(group: Sequence[Trajectory]) -> list[float | None]:
    """Rewards of graded or ungraded trajectories; None where there is none."""
    return [None if t.reward is None else t.reward.value for t in group]


def _shape(config: RLConfig, reward: Reward) -> Reward:
    if reward.value is None or not config.format_reward:
        return reward
    return dataclasses.replace(reward, value=reward.value * reward.parts["format"])
