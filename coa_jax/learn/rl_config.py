"""Settings of a reinforcement-learning run."""

from __future__ import annotations

import dataclasses

from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.step import OptimizerConfig
from coa_jax.model.config import DTYPES
from coa_jax.model.lora import LoraConfig
from coa_jax.model.remat import policy_name
from coa_jax.parallel.placement import MeshConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.settings import at_least_one, check_seed, one_of
from coa_jax.tasks import GradersConfig


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """A reinforcement-learning run.

    Attributes:
        model: Hugging Face directory to start from.
        tasks: task source, see `tasks.load_tasks`.
        num_tasks: tasks of the training split that are drawn from.
        seed: order of the tasks and randomness of the samples.
        groups: tasks whose groups make one step.
        group_size: samples of a task.
        max_rounds: how often a step may sample further tasks until enough groups have a signal.
        updates: optimiser updates of a step; above 1 the later ones are off-policy.
        format_reward: whether a right answer counts only where the protocol was obeyed, as in the
            paper's eq 11; else the answer alone counts, as in its eq 10.
        temperature: of sampling, and of the probabilities that are trained.
        rows: rows of a micro-batch.
        row_length: tokens of a row; at least ``rollout.max_tokens``.
        attention_length: positions of a row in attention where samples of a task share their
            prompt, see `batch.pack`; 0 gives each its own.
        dtype: operands of products in training; the engine has its own.
        remat: which activations the backward pass computes again, see `model.remat.POLICIES`.
        algorithm: a preset and the knobs that differ from it.
        optimizer: ``total_steps`` counts updates and is the length of the run.
        engine: shapes of decoding.
        rollout: budgets of a trajectory.
        checkpoint_every: steps between two checkpoints.
        graders: what a right answer is, and who says so; see docs/grading.md.
        mesh: axes over which parameters and rows are sharded.
        attention: implementation in training: ``auto`` or a name, see docs/kernels.md.
        lora: adapters to train in place of the whole model, see `model.lora`.
        rollouts_ahead: 0 samples every batch with the newest policy.  1 samples the next batch
            while a batch is learned, with the policy before that update: rollouts and updates
            overlap, and the ratio to the sampler's log-probabilities, clipped as ``algorithm``
            says, corrects for the one step between the two.
        keep_last: newest checkpoints that stay.
        keep_best: metric of a step whose best checkpoint stays too, such as ``reward/mean``; empty
            for none.  What a step says of its rollouts is about the policy before its updates; the
            checkpoint of that step has the parameters after them.
        profile_steps: (first, last) step that `jax.profiler` records into WORKDIR/profile.
    """

    model: str
    tasks: str
    num_tasks: int
    seed: int
    groups: int
    group_size: int
    max_rounds: int
    updates: int
    format_reward: bool
    temperature: float
    rows: int
    row_length: int
    dtype: str
    remat: str
    algorithm: Algorithm
    optimizer: OptimizerConfig
    engine: EngineConfig
    rollout: RolloutConfig
    checkpoint_every: int
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    attention_length: int = 0
    attention: str = "auto"
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    rollouts_ahead: int = 0
    keep_last: int = 2
    keep_best: str = ""
    profile_steps: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens that a trajectory may have."""
        return min(self.rollout.max_tokens, self.engine.max_length)

    @property
    def chosen(self) -> Algorithm:
        """The algorithm with every knob set."""
        return self.algorithm.resolve(self.longest)

    def __post_init__(self) -> None:
        policy_name(self.remat, "rl config: remat")
        check_seed(self.seed, "rl config: seed")
        one_of(self, "rl config: ", DTYPES, "dtype")
        longest = self.longest
        if self.row_length < longest:
            raise UserError(
                f"rl config: row_length is {self.row_length}, trajectories have up to {longest} "
                "tokens; raise row_length or lower rollout.max_tokens"
            )
        if self.attention_length and self.attention_length < self.row_length:
            raise UserError(
                f"rl config: attention_length is {self.attention_length}, rows have "
                f"{self.row_length} tokens; give 0, or more than row_length"
            )
        if self.temperature <= 0:
            raise UserError(
                f"rl config: temperature is {self.temperature}; without chance in the samples "
                "there is nothing to learn from, give 1.0"
            )
        algorithm = self.chosen
        alone = algorithm.advantage in ("batch", "gae") and algorithm.learn_from == "all"
        if self.group_size == 1 and not alone:
            raise UserError(
                "rl config: group_size is 1; samples of one task are compared with each other: "
                "give at least 2, or algorithm.name=ppo or reinforce++, which learn from all"
            )
        at_least_one(self, "rl config: ", "groups", "group_size", "max_rounds", "updates", "rows",
                     "num_tasks", "checkpoint_every")  # fmt: skip
        if self.optimizer.total_steps < self.updates:
            raise UserError(
                f"rl config: optimizer.total_steps is {self.optimizer.total_steps}, a step makes "
                f"{self.updates} updates; give at least as many"
            )
        older = self.rollouts_ahead or algorithm.learn_from == "signal"  # and its surplus
        if older and algorithm.old_logp == "trainer" and not algorithm.tis_cap:
            why = "rollouts_ahead is 1" if self.rollouts_ahead else "surplus groups are kept"
            raise UserError(
                f"rl config: {why} and algorithm.old_logp is 'trainer': nothing corrects for the "
                "policy that sampled; give algorithm.tis_cap=2, or algorithm.old_logp=sampler"
            )
        if self.updates > self.groups:
            raise UserError(
                f"rl config: updates is {self.updates}, of {self.groups} groups; an update needs a "
                "group: give at most as many"
            )
        if self.rollouts_ahead not in (0, 1):
            raise UserError(
                f"rl config: rollouts_ahead is {self.rollouts_ahead}; give 0 or 1, the ratio does "
                "not correct for older policies"
            )
