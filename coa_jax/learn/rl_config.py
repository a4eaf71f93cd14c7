"""Settings of a reinforcement-learning run."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from coa_jax.bounds import Between, Count, Natural, OneOf, Place, Size, Times
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.teacher import TeacherConfig
from coa_jax.learn.training import TrainingConfig
from coa_jax.model.config import LoraConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks import GradersConfig

BEST = ("reward/mean", "reward/min", "reward/max", "format/valid", "group/frac_all_pass")
"""Metrics of a step whose best checkpoint may stay; of each the highest value is the best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(TrainingConfig):
    """A reinforcement-learning run; see `TrainingConfig` for the other settings.

    ``row_length`` must be at least ``rollout.max_tokens``.

    Attributes:
        tasks: task source, see `tasks.load_tasks`.
        num_tasks: tasks of the training split that are drawn from.
        groups: tasks whose groups make one step.
        group_size: samples of a task.
        max_rounds: how often a step may sample further tasks until enough groups have a signal.
        mini_batch: groups of one optimiser update, 0 for all of a step.  A step that has less
            groups makes less updates; each but its last is of that size.
        epochs: passes over the groups of a step (PPO); later ones take them in another order.
        format_reward: whether a right answer counts only where the protocol was obeyed, as in the
            paper's eq 11; else the answer alone counts, as in its eq 10.
        temperature: of sampling, and of the probabilities that are trained.
        attention_length: positions of a row in attention where samples of a task share their
            prompt, see `batch.pack`; 0 gives each its own.
        algorithm: a preset and the knobs that differ from it.
        teacher: who scores the policy's tokens, where ``algorithm.opd_coef`` is above 0.
        engine: shapes of decoding.
        rollout: budgets of a trajectory.
        graders: what a right answer is, and who says so; see docs/grading.md.
        lora: adapters to train in place of the whole model.
        rollouts_ahead: 0 samples every batch with the newest policy.  1 samples the next batch
            while a batch is learned, with the policy before that update: rollouts and updates
            overlap, and the ratio to the sampler's log-probabilities, clipped as ``algorithm``
            says, corrects for the one step between the two.
        keep_best: metric of a step whose best checkpoint stays too, such as ``reward/mean``; empty
            for none.  What a step says of its rollouts is about the policy before its updates; the
            checkpoint of that step has the parameters after them.
        probe_s: seconds that each server which the run needs (judge, tools) has to answer before
            the first step; 0 begins without asking them.
    """

    tasks: Place
    num_tasks: Count
    groups: Size
    group_size: Size
    max_rounds: Times
    format_reward: bool
    temperature: Annotated[float, Between(0, 100, above=True)]
    algorithm: Algorithm
    engine: EngineConfig
    rollout: RolloutConfig
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)
    mini_batch: Natural = 0
    epochs: Times = 1
    attention_length: Natural = 0
    teacher: TeacherConfig = dataclasses.field(default_factory=TeacherConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    rollouts_ahead: Annotated[int, Between(0, 1)] = 0
    keep_best: Annotated[str, OneOf("", *BEST)] = ""
    probe_s: Annotated[float, Between(0, 600)] = 10.0

    @property
    def longest(self) -> int:
        """Tokens that a trajectory may have."""
        return min(self.rollout.max_tokens, self.engine.max_length)

    @property
    def groups_per_update(self) -> int:
        """Groups of a full optimiser update."""
        return self.mini_batch or self.groups

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates of a step that has all its groups."""
        return self.epochs * -(-self.groups // self.groups_per_update)

    @property
    def stale(self) -> bool:
        """Whether a step may learn from what an older policy has sampled."""
        return bool(self.rollouts_ahead) or self.chosen.learn_from == "signal"  # and its surplus

    @property
    def chosen(self) -> Algorithm:
        """The algorithm with every knob set."""
        return self.algorithm.resolve(self.longest)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout.cut_context:
            raise UserError(
                "rollout.cut_context is True: what was sampled from a context that was cut cannot "
                "be trained on; leave it False"
            )
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
        alone = algorithm.advantage in ("batch", "gae", "none") and algorithm.learn_from == "all"
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
        if self.stale:
            ahead = self.rollouts_ahead
            algorithm.check_stale("rollouts_ahead is 1" if ahead else "surplus groups are kept")
