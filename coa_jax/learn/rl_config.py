"""Settings of a reinforcement-learning run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from coa_jax.agents.config import AgentConfig
from coa_jax.bounds import Between, Count, Natural, OneOf, Place, Size, Times
from coa_jax.engine.config import EngineConfig
from coa_jax.environments import EnvironmentConfig
from coa_jax.errors import UserError
from coa_jax.learn.admission import Rules
from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.held_out import METRICS, HeldOutConfig, check_best
from coa_jax.learn.pool import PoolConfig
from coa_jax.learn.shaping import StopRewards
from coa_jax.learn.teacher import TeacherConfig
from coa_jax.learn.traces import TracesConfig
from coa_jax.learn.training import TrainingConfig
from coa_jax.model.config import LoraConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks import GradersConfig
from coa_jax.tasks.mixture import parts_of

BEST = ("reward/mean", "reward/min", "reward/max", "format/valid", "group/frac_all_pass", *METRICS)
"""Metrics by which ``keep_best`` can select a checkpoint; the highest value is best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(TrainingConfig):
    """Settings of a reinforcement-learning run, in addition to those of `TrainingConfig`.

    ``row_length`` must be at least the maximum length of a trajectory, ``rollout.max_tokens``.

    Attributes:
        tasks: task source, see `tasks.load_tasks`; "" if ``mixture`` names the sources.
        task_options: options of the task source.
        mixture: maps the name of a source to its ``tasks``, ``weight``, ``options``, ``num_tasks``
            and ``split``, see `tasks.mixture.Part`.
        num_tasks: number of tasks of the training split that each source provides.
        pool: selection of the tasks that are sampled; by default no task is skipped.
        groups: number of groups that a step trains on; a group is the set of samples of one task.
        group_size: number of samples per group.
        max_sampled: maximum number of groups that a step examines, as a multiple of ``groups``. If
            fewer than ``groups`` of the examined groups have a signal (rewards that differ), the
            step trains on the groups with a signal alone.
        groups_in_flight: number of groups that are sampled at the same time; 0 derives the number
            from the share of groups with a signal.
        max_staleness: greatest age, in steps, of a group that a step trains on. The age is the
            number of steps between the oldest policy version that sampled one of the group's tokens
            and the current version. With 0, each step is sampled with the newest policy, takes
            groups in task order, and ignores ``rollout.max_seconds`` and
            ``rollout.max_tool_seconds``, so the run is a function of its seed. Above 0, rollouts
            continue during updates; a group that is too old is dropped, and its task is sampled
            again.
        admission: order in which steps take groups if ``max_staleness`` is above 0. ``completion``
            takes the groups that finish first, which favours short trajectories; ``task_order``
            waits for the oldest task.
        late_samples: treatment of a group that has unfinished samples when only one more step may
            train on the group. ``drop_group`` continues sampling, and drops the group when its age
            exceeds ``max_staleness``. ``leave_out`` trains on the finished samples if there are two
            or more, which favours short trajectories.
        in_flight_weights: treatment of the KV cache of unfinished samples when the weights change:
            ``keep`` keeps the entries of the earlier weights, ``recompute`` computes them again
            with the new weights.
        mini_batch: number of groups per optimiser update; 0 for all groups of a step. Only the last
            update of an epoch may have fewer groups.
        epochs: number of passes over the groups of a step, as in PPO. Passes after the first one
            shuffle the groups.
        format_reward: True if a correct answer gets a reward only if its trajectory obeys the
            protocol, as in eq 11 of the Chain-of-Agents paper; False if the answer alone decides,
            as in eq 10.
        stops: changes to the rewards of trajectories that were cut off, see `StopRewards`.
        temperature: sampling temperature. Training divides the logits by the same temperature.
        attention_length: number of positions per row in attention. Above 0, the samples of a task
            in the same row share one copy of their prompt; only in attention does the row hold a
            copy per sample (see `batch.pack`). With 0 no prompts are shared.
        algorithm: a preset of the algorithm, with settings that override it.
        teacher: model that scores the policy's tokens; used if ``algorithm.opd_coef`` is above 0.
        engine: static shapes of the decoding engine.
        rollout: budgets of a trajectory, and how the policy is prompted.
        agent: a program of your own that solves the tasks, instead of the tool loop.
        graders: how the answers are graded, see docs/grading.md.
        environment: environment in which the policy acts, in addition to the tools; see
            docs/environments.md.
        lora: LoRA adapters to train instead of the whole model.
        keep_best: metric that selects the best checkpoint, such as ``reward/mean``. This checkpoint
            is kept beside the newest ones; "" for no best checkpoint. Metrics of a step's rollouts
            belong to the policy before the step's updates; the step's checkpoint and evaluation
            have the parameters after the updates.
        evaluate_every: number of steps between two evaluations on ``held_out``; 0 for no
            evaluations.
        held_out: settings of the evaluations.  If it names no sources, the policy is evaluated on
            the validation split of its training sources.
        traces: which trajectories are written to disk, and in which file format.
        probe_s: number of seconds within which each server that the run needs (judge, tools) must
            answer before the first step; 0 skips this check.
    """

    tasks: Place
    num_tasks: Count
    groups: Size
    group_size: Size
    format_reward: bool
    temperature: Annotated[float, Between(0, 100, above=True)]
    algorithm: Algorithm
    engine: EngineConfig
    rollout: RolloutConfig
    agent: AgentConfig = dataclasses.field(default_factory=AgentConfig)
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)
    stops: StopRewards = dataclasses.field(default_factory=StopRewards)
    task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    mini_batch: Natural = 0
    epochs: Times = 1
    attention_length: Natural = 0
    teacher: TeacherConfig = dataclasses.field(default_factory=TeacherConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    max_sampled: Annotated[float, Between(1, 1000)] = 2.0
    groups_in_flight: Natural = 0
    max_staleness: Annotated[int, Between(0, 100)] = 0
    admission: Literal["completion", "task_order"] = "completion"
    late_samples: Literal["drop_group", "leave_out"] = "drop_group"
    in_flight_weights: Literal["keep", "recompute"] = "keep"
    keep_best: Annotated[str, OneOf("", *BEST)] = ""
    evaluate_every: Natural = 0
    held_out: HeldOutConfig = dataclasses.field(default_factory=HeldOutConfig)
    traces: TracesConfig = dataclasses.field(default_factory=TracesConfig)
    probe_s: Annotated[float, Between(0, 600)] = 10.0

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a trajectory."""
        return min(self.rollout.max_tokens, self.engine.max_length)

    @property
    def budgets(self) -> RolloutConfig:
        """Budgets of a trajectory, without time limits if ``max_staleness`` is 0."""
        if self.max_staleness:
            return self.rollout
        return dataclasses.replace(self.rollout, max_seconds=0.0, max_tool_seconds=0.0)

    @property
    def rules(self) -> Rules:
        """Rules by which the run composes its steps."""
        return Rules(
            groups=self.groups,
            most=int(self.max_sampled * self.groups),
            max_staleness=self.max_staleness,
            in_order=self.admission == "task_order",
            in_flight=self.groups_in_flight,
            steps=self.optimizer.total_steps // self.updates_per_step,
        )

    @property
    def groups_per_update(self) -> int:
        """Number of groups in a full optimiser update."""
        return self.mini_batch or self.groups

    @property
    def updates_per_step(self) -> int:
        """Number of optimiser updates in a step with ``groups`` groups."""
        return self.epochs * -(-self.groups // self.groups_per_update)

    @functools.cached_property
    def chosen(self) -> Algorithm:
        """The algorithm, in which every unset setting has the value of its preset."""
        return self.algorithm.resolve(self.longest)

    def __post_init__(self) -> None:
        super().__post_init__()
        parts_of(self)
        check_best(self.keep_best, self.evaluate_every, self.checkpoint_every)
        if self.rollout.cut_context:
            raise UserError(
                "rollout.cut_context is True: tokens that were sampled from a cut context cannot "
                "be trained on; leave it False"
            )
        if self.agent and self.evaluate_every:
            raise UserError(
                f"evaluate_every is {self.evaluate_every}: evaluations use the tool loop, and "
                "agent names a program; give 0, and measure with coa-jax evaluate"
            )
        if self.agent and (self.rollout.constrain or self.format_reward):
            setting = "rollout.constrain" if self.rollout.constrain else "format_reward"
            raise UserError(
                f"{setting} is True: it applies to the protocols of the tool loop, and agent "
                "names a program; leave it False"
            )
        if self.agent and self.environment:
            raise UserError("agent and environment are both set; give one of the two")
        longest = self.longest
        if self.row_length < longest:
            raise UserError(
                f"row_length is {self.row_length}, and trajectories have up to {longest} "
                "tokens; raise row_length or lower rollout.max_tokens"
            )
        if self.attention_length and self.attention_length < self.row_length:
            raise UserError(
                f"attention_length is {self.attention_length}, and rows have "
                f"{self.row_length} tokens; give 0, or at least row_length"
            )
        algorithm = self.chosen
        alone = algorithm.alone and algorithm.learn_from == "all"
        if self.group_size == 1 and not alone:
            raise UserError(
                "group_size is 1, and the algorithm compares samples of one task: "
                "give at least 2, or algorithm.name=ppo, reinforce++ or opd"
            )
        self.teacher.check(algorithm.opd_coef, self.temperature, self.rollout.constrain)
        if self.optimizer.total_steps < self.updates_per_step:
            raise UserError(
                f"optimizer.total_steps is {self.optimizer.total_steps}, and a step makes "
                f"{self.updates_per_step} updates; give at least as many"
            )
        if self.mini_batch > self.groups:
            raise UserError(
                f"mini_batch is {self.mini_batch}, and a step has {self.groups} groups: give at "
                "most as many, or 0 for all"
            )
        if self.max_staleness:
            algorithm.check_stale(f"max_staleness is {self.max_staleness}")
