"""Builds the requests and rewards of groups; a group is all samples of one task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import SamplingParams
from coa_jax.model.api import Model
from coa_jax.parallel.transfer import gather
from coa_jax.protocol import Prompt
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.request import Request, make_request
from coa_jax.tasks import Graders, Task
from coa_jax.train.admission import Composition
from coa_jax.train.advantages import has_signal
from coa_jax.train.group_stream import LocalShare
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.shaping import shape_reward
from coa_jax.train.task_pool import Score


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The groups of samples that a step needs, gathered from all processes.

    Attributes:
        composition: names the groups that the step uses, see `admission.Ledger.next_step`.
        used: the graded groups that the step trains on.
        everything: all graded groups that the step examined: the groups in ``used``, and groups
            without a signal, whose rewards are all equal.
        dropped: groups that were dropped because they were too old; some of their samples may be
            missing.
    """

    composition: Composition
    used: list[list[Trajectory]]
    everything: list[list[Trajectory]]
    dropped: list[list[Trajectory]]


def assemble(share: LocalShare, wait_seconds: float) -> Sampled:
    """Gathers the groups of a step from all processes; every process must call this function.

    Args:
        share: the groups of this process.
        wait_seconds: number of seconds to wait for the slowest process, see `processes.barrier`.
    """
    mine = (share.groups, share.dropped)
    everything: dict[int, list[Trajectory]] = {}
    lost: list[list[Trajectory]] = []
    for part, too_old in gather([mine], "gathering of groups", wait_seconds):
        everything.update(part)
        lost.extend(too_old)
    used = [everything[index] for index in share.composition.used]
    examined = [everything[index] for index in share.composition.examined]
    return Sampled(share.composition, used, examined, lost)


def request_of(
    config: RLConfig,
    model: Model,
    task: Task,
    prompt: Prompt,
    index: int,
    environments: Environments | None = None,
) -> Request:
    """Builds the request for all samples of a group.

    Args:
        config: settings of the run.
        model: the policy; the function uses only its tokenizer.
        task: the task to sample.
        prompt: prompt style in which the policy sees the task.
        index: index of the task in the run's stream of tasks, from which the samples' seeds are
            derived.
        environments: creates the environment in which the policy acts; None if the policy only
            calls tools.
    """
    samples, sampling = range(config.group_size), SamplingParams(temperature=config.temperature)
    return make_request(
        task, prompt, config.seed, index, samples, sampling,
        metadata={"stage": "rl-train"}, environments=environments,
    ).encoded(model.tokenizer)  # fmt: skip


async def graded(
    config: RLConfig, graders: Graders, task: Task, trajectory: Trajectory
) -> Trajectory:
    """Grades a trajectory by the graders that need no other samples of the same task.

    The result is the trajectory with the reward that these graders give. When all samples of the
    task have been graded in this way, `completed` applies the graders that compare samples.

    Args:
        config: settings of the run; ``config.stops`` may remove the reward because of the stop
            reason.
        graders: the graders that the config names.
        task: the task that the trajectory tries to solve.
        trajectory: a finished trajectory.
    """
    reward = await graders.grade_alone(task, trajectory)
    if config.stops.added(trajectory) is None:
        reward = dataclasses.replace(reward, value=None)
    return dataclasses.replace(trajectory, reward=reward)


async def completed(
    config: RLConfig, graders: Graders, task: Task, group: Sequence[Trajectory]
) -> list[Trajectory]:
    """Computes the final rewards of a group, after every sample has been graded by `graded`.

    The result is all trajectories of the group with the rewards on which the policy is trained.

    Args:
        config: settings of the run.
        graders: graders of the run; some of them compare the samples of a group.
        task: task of the group.
        group: the trajectories of the group, each returned by `graded`.
    """
    alone = [trajectory.reward for trajectory in group if trajectory.reward is not None]
    together = await graders.grade_together(task, group, alone)
    shaped = [
        shape_reward(
            reward,
            len(trajectory.tokens),
            format_reward=config.format_reward,
            budget=config.longest,
            buffer=config.chosen.overlong_buffer,
            penalty=config.chosen.overlong_penalty,
            stop=config.stops.added(trajectory) or 0.0,
        )
        for reward, trajectory in zip(together, group, strict=True)
    ]
    return [dataclasses.replace(t, reward=r) for t, r in zip(group, shaped, strict=True)]


def is_learned(config: RLConfig, group: Sequence[Trajectory]) -> bool:
    """Returns whether a step can train on a group.

    With ``learn_from=signal``, a step can train on a group only if the rewards of the group, before
    the length penalty, differ. This is the dynamic sampling of DAPO (arXiv 2503.14476 §3.2). With
    ``learn_from=all``, a step can train on every group.
    """
    return config.chosen.learn_from == "all" or has_signal(earned(group))


def score_group(group: Sequence[Trajectory]) -> Score:
    """Counts the trajectories of a group that solved the task, and those that were graded.

    A trajectory solved the task if its reward, before length penalties, is at least 1.
    """
    graded = [value for value in earned(group) if value is not None]
    return sum(value >= 1.0 for value in graded), len(graded)


def learned_lengths(groups: Sequence[Sequence[Trajectory]]) -> list[int]:
    """Returns the number of tokens of each sequence on which a step trains, without repetitions.

    Samples of a group with equal tokens and rewards are trained on as one, so they count once.
    Trajectories without a reward or without policy tokens are left out.
    """
    lengths: list[int] = []
    for group in groups:
        learned = {
            (one.tokens.tobytes(), reward): len(one.tokens)
            for t, reward in zip(group, rewards(group), strict=True)
            if reward is not None and t.num_policy_tokens
            for one in t.sequences
        }
        lengths.extend(learned.values())
    return lengths


def graded_values(groups: Sequence[Sequence[Trajectory]]) -> list[float]:
    """Returns the rewards of all graded trajectories of several groups, in one list."""
    return [value for group in groups for value in rewards(group) if value is not None]


def rewards(group: Sequence[Trajectory]) -> list[float | None]:
    """Returns the reward of each trajectory of a group; None where there is no reward."""
    return [None if t.reward is None else t.reward.value for t in group]


def earned(group: Sequence[Trajectory]) -> list[float | None]:
    """Returns each trajectory's reward before the length penalty; None where there is no reward."""
    return [
        None if t.reward is None else t.reward.parts.get("earned", t.reward.value) for t in group
    ]
