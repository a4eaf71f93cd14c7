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
"""Metrics of a step whose best checkpoint may stay; of each the highest value is the best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(TrainingConfig):
    """A reinforcement-learning run; see `TrainingConfig` for the other settings.

    ``row_length`` must be at least ``rollout.max_tokens``.

    Attributes:
        tasks: task source, see `tasks.load_tasks`; "" where ``mixture`` has several.
        task_options: of the source.
        mixture: name -> ``tasks``, ``weight``, ``options``, ``num_tasks`` and ``split`` of a
            source, see `tasks.mixture.Part`.
        num_tasks: tasks of the training split that are drawn from, of each source.
        pool: which tasks are asked: all in turn, or by how often they are solved.
        groups: tasks whose groups make one step.
        group_size: samples of a task.
        max_sampled: a step looks at no more than this multiple of ``groups``; if too few of these
            groups have a signal, it learns from fewer.
        groups_in_flight: groups that are sampled at a time; 0 for as many as the share of groups
            with a signal makes necessary.
        max_staleness: greatest age of a group when a step learns from it, in steps between the
            oldest policy that sampled one of its tokens and the policy that learns.  0 samples each
            step with the newest policy, takes groups in the order of their tasks and ignores
            ``rollout.max_seconds`` and ``max_tool_seconds``: the run is then a function of its
            seed.  Above 0 rollouts go on while updates run, and older groups are dropped and their
            tasks asked again.
        admission: which groups a step takes if ``max_staleness`` is above 0: ``completion`` takes
            the first that end, which favours short trajectories; ``task_order`` waits for the
            oldest task.
        late_samples: what becomes of a group that has samples in flight when only one more step may
            learn from the group: ``drop_group`` goes on, and drops the group when its age passes
            ``max_staleness``; ``leave_out`` learns from the samples that have ended, if these are
            two or more, which favours short trajectories.
        in_flight_weights: what samples in flight do when weights change: ``keep`` what the earlier
            weights have computed in the cache, or ``recompute`` it.
        mini_batch: groups of one optimiser update, 0 for all of a step.  A step that has fewer
            groups makes fewer updates; each but its last is of that size.
        epochs: passes over the groups of a step (PPO); later ones take them in another order.
        format_reward: whether a right answer counts only where the protocol was obeyed, as in the
            paper's eq 11; else the answer alone counts, as in its eq 10.
        stops: what becomes of rewards of trajectories that were cut off, see `StopRewards`.
        temperature: of sampling, and of the probabilities that are trained.
        attention_length: positions of a row in attention where samples of a task share their
            prompt, see `batch.pack`; 0 gives each its own.
        algorithm: a preset and the knobs that differ from it.
        teacher: who scores the policy's tokens, where ``algorithm.opd_coef`` is above 0.
        engine: shapes of decoding.
        rollout: budgets of a trajectory.
        agent: a program that solves the tasks, in the place of the loop of tools.
        graders: what a right answer is, and who says so; see docs/grading.md.
        environment: what answers the policy, beside the tools; see docs/environments.md.
        lora: adapters to train in place of the whole model.
        keep_best: metric of a step whose best checkpoint stays too, such as ``reward/mean``; empty
            for none.  What a step says of its rollouts is about the policy before its updates; the
            checkpoint of that step, and its evaluation, have the parameters after them.
        evaluate_every: steps between two evaluations on ``held_out``; 0 for none.
        held_out: what is measured then; without sources the validation split of those that are
            trained on.
        traces: which trajectories are written, and in which format.
        probe_s: seconds that each server which the run needs (judge, tools) has to answer before
            the first step; 0 begins without asking them.
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
        """Tokens that a trajectory may have."""
        return min(self.rollout.max_tokens, self.engine.max_length)

    @property
    def budgets(self) -> RolloutConfig:
        """Budgets of a trajectory; without those of the clock where the seed decides alone."""
        if self.max_staleness:
            return self.rollout
        return dataclasses.replace(self.rollout, max_seconds=0.0, max_tool_seconds=0.0)

    @property
    def rules(self) -> Rules:
        """How steps are composed."""
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
        """Groups of a full optimiser update."""
        return self.mini_batch or self.groups

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates of a step that has all its groups."""
        return self.epochs * -(-self.groups // self.groups_per_update)

    @functools.cached_property
    def chosen(self) -> Algorithm:
        """The algorithm with every knob set."""
        return self.algorithm.resolve(self.longest)

    def __post_init__(self) -> None:
        super().__post_init__()
        parts_of(self)
        check_best(self.keep_best, self.evaluate_every, self.checkpoint_every)
        if self.rollout.cut_context:
            raise UserError(
                "rollout.cut_context is True: what was sampled from a context that was cut cannot "
                "be trained on; leave it False"
            )
        if self.agent and self.evaluate_every:
            raise UserError(
                f"evaluate_every is {self.evaluate_every}: it evaluates by the loop of tools, and "
                "agent names a program; give 0, and measure with coa-jax evaluate"
            )
        if self.agent and (self.rollout.constrain or self.format_reward):
            setting = "rollout.constrain" if self.rollout.constrain else "format_reward"
            raise UserError(
                f"{setting} is True: it holds for the protocols of the loop of tools, and agent "
                "names a program; leave it False"
            )
        if self.agent and self.environment:
            raise UserError("agent and environment are both set; give one of the two")
        longest = self.longest
        if self.row_length < longest:
            raise UserError(
                f"row_length is {self.row_length}, trajectories have up to {longest} "
                "tokens; raise row_length or lower rollout.max_tokens"
            )
        if self.attention_length and self.attention_length < self.row_length:
            raise UserError(
                f"attention_length is {self.attention_length}, rows have "
                f"{self.row_length} tokens; give 0, or more than row_length"
            )
        algorithm = self.chosen
        alone = algorithm.alone and algorithm.learn_from == "all"
        if self.group_size == 1 and not alone:
            raise UserError(
                "group_size is 1; samples of one task are compared with each other: "
                "give at least 2, or algorithm.name=ppo, reinforce++ or opd, which learn from all"
            )
        self.teacher.check(algorithm.opd_coef, self.temperature, self.rollout.constrain)
        if self.optimizer.total_steps < self.updates_per_step:
            raise UserError(
                f"optimizer.total_steps is {self.optimizer.total_steps}, a step makes "
                f"{self.updates_per_step} updates; give at least as many"
            )
        if self.mini_batch > self.groups:
            raise UserError(
                f"mini_batch is {self.mini_batch}, a step has {self.groups} groups: give at most "
                "as many, or 0 for all"
            )
        if self.max_staleness:
            algorithm.check_stale(f"max_staleness is {self.max_staleness}")
