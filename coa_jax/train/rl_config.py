"""Settings of a reinforcement-learning run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from coa_jax.config.fields import Between, Bounded, Natural, OneOf, Place, Size, Sparse, Times
from coa_jax.config.preflight import SECONDS, ProbeSeconds
from coa_jax.data import trace_shards
from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.evaluation.config import HeldOutConfig
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.environments import EnvironmentConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks import GradersConfig
from coa_jax.tasks.mixture import parts_of
from coa_jax.tools.make import ToolsConfig
from coa_jax.train.admission import AdmissionRules
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.config import METRICS, DistilledConfig, TeacherConfig, TrainingConfig, check_best
from coa_jax.train.shaping import StopRewards
from coa_jax.train.task_pool import PoolConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from coa_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TracesConfig(Bounded):
    """Settings of the trajectories that a run writes to disk.

    Training does not depend on these settings.

    Attributes:
        share: share of the groups whose trajectories are written. The groups are selected by a hash
            of the task's index, so the selection is the same in every run and after a resume, and
            does not depend on the order in which groups finish.
        format: file format. "jsonl" appends to ``traces.jsonl``. "jsonl.gz" (compressed with gzip)
            and "array_record" (compressed with zstd) write one file per step to the folder
            ``traces/``.
    """

    share: Annotated[float, Between(0, 1)] = 1.0
    format: Annotated[str, OneOf("jsonl", *trace_shards.SHARD_FORMATS)] = "jsonl"

    def kept(self, groups: Iterable[list[Trajectory]]) -> list[list[Trajectory]]:
        """Returns the groups whose trajectories are to be written.

        Each trajectory must have the index of its task in its metadata.
        """
        return [group for group in groups if self._keeps(group[0].metadata["prompt_id"])]

    def _keeps(self, index: int) -> bool:
        digest = hashlib.blake2b(str(index).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64


BEST = ("reward/mean", "reward/min", "reward/max", "format/valid", "group/frac_all_pass", *METRICS)
"""Metrics by which ``keep_best`` can select a checkpoint; the highest value is best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(TrainingConfig):
    """Settings of a reinforcement-learning run, in addition to those of `TrainingConfig`.

    ``row_length`` must be at least the maximum length of a trajectory, ``rollout.max_tokens``.

    Attributes:
        tasks: file, data set (``hf:NAME``) or name of a task source, see `tasks.load_tasks`; "" if
            ``mixture`` names the sources.
        task_options: options of the task source.
        mixture: maps the name of a source to its ``tasks``, ``weight``, ``options``, ``num_tasks``
            and ``split``, see `tasks.mixture.Part`.
        num_tasks: number of training tasks to take from each source; 0 for all.
        distilled: treatment of tasks whose question or fact is also in a training record of the
            policy; by default such tasks are left out.
        pool: selection of the tasks that are sampled; by default no task is skipped.
        groups: number of groups (tasks with their samples) that a step trains on.
        group_size: number of samples per group.
        max_sampled: maximum number of groups that a step examines, as a multiple of ``groups``. A
            group has a signal if its rewards differ. A step that has examined the maximum number of
            groups trains on those of them that have a signal, even if their number is below
            ``groups``.
        groups_in_flight: number of groups that are sampled at the same time; 0 derives the number
            from the share of groups with a signal.
        max_staleness: maximum age in steps of what a step trains on; 0 for on-policy steps. The age
            of a group is the number of steps between the oldest policy version that sampled one of
            the group's tokens and the version that the step updates. With 0, the newest policy
            samples all groups of a step, steps take groups in task order, and the time limits
            ``rollout.max_seconds`` and ``rollout.max_tool_seconds`` are ignored; so the same seed
            reproduces the run. Above 0, rollouts continue during updates; a group that is too old
            is dropped, and its task is sampled again.
        admission: order in which steps take groups if ``max_staleness`` is above 0. ``completion``
            takes the groups that finish first, which favours short trajectories; ``task_order``
            waits for the oldest task.
        late_samples: treatment of a group that still has unfinished samples when the next step is
            the last one for which the group is not too old (see ``max_staleness``).
            ``drop_group`` continues sampling, and drops the group when its age exceeds
            ``max_staleness``. ``leave_out`` trains on the finished samples if there are two or
            more, which favours short trajectories. With ``max_staleness=0``, the step waits for all
            samples.
        in_flight_weights: treatment of the KV cache of unfinished samples when the weights change.
            ``keep`` keeps the entries that the earlier weights computed; ``recompute`` computes
            these entries again with the new weights.
        mini_batch: number of groups per optimiser update; 0 for all groups of a step. Only the last
            update of an epoch may have fewer groups.
        epochs: number of passes over the groups of a step, as in PPO. Passes after the first one
            shuffle the groups.
        format_reward: whether only trajectories that obey the protocol are rewarded, as in eq 11 of
            the Chain-of-Agents paper. If False, the answer alone decides, as in eq 10.
        stops: changes to the rewards of trajectories without an answer, see `StopRewards`.
        temperature: sampling temperature. Training divides the logits by the same temperature.
        attention_length: number of positions of a row inside attention; 0 repeats the prompt for
            every sample. Above 0, a row stores the prompt of a task once for all its samples, and
            only attention expands the row, so that every sample has the whole prompt. n samples of
            S tokens with a prompt of P tokens need n (P + S) positions, see docs/performance.md.
        algorithm: preset of the algorithm, and settings that override those of the preset.
        teacher: model that scores the policy's tokens; used if ``algorithm.opd_coef`` is above 0.
        engine: settings of the decoding engine, such as the number of slots.
        rollout: limits of a trajectory (such as ``max_tokens``), and settings of the prompt.
        agent: a program of your own that solves the tasks, instead of the tool loop.
        graders: settings of the graders of answers, see docs/grading.md.
        environment: environment in which the policy acts, in addition to the tools; see
            docs/environments.md.
        keep_best: metric whose best checkpoint is kept; "" for none. ``reward/mean`` is such a
            metric. The checkpoint is kept in addition to the newest checkpoints. Metrics of a
            step's rollouts describe the policy before the step's updates; the step's checkpoint and
            evaluation use the parameters after the updates.
        evaluate_every: number of steps between evaluations on ``held_out``; 0 for none.
        held_out: settings of the evaluations. If ``held_out`` names no task source, the policy is
            evaluated on the validation split of the training sources.
        traces: which trajectories are written to disk, and in which file format.
        probe_s: time limit, in seconds, of a check before the first step, in which each server that
            the run needs (judge, tools) must respond; 0 skips this check.
    """

    tasks: Place
    num_tasks: Natural = 0
    groups: Size = 8
    group_size: Size = 8
    format_reward: bool = False
    temperature: Annotated[float, Between(0, 100, above=True)] = 1.0
    algorithm: Annotated[Algorithm, Sparse()] = dataclasses.field(default_factory=Algorithm)
    engine: EngineConfig = dataclasses.field(default_factory=lambda: EngineConfig(slots=0))
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    agent: Annotated[AgentConfig, Sparse()] = dataclasses.field(default_factory=AgentConfig)
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)
    stops: Annotated[StopRewards, Sparse()] = dataclasses.field(default_factory=StopRewards)
    task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    distilled: DistilledConfig = dataclasses.field(default_factory=DistilledConfig)
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    environment: Annotated[EnvironmentConfig, Sparse()] = dataclasses.field(
        default_factory=EnvironmentConfig
    )
    mini_batch: Natural = 0
    epochs: Times = 1
    attention_length: Natural = 0
    teacher: Annotated[TeacherConfig, Sparse()] = dataclasses.field(default_factory=TeacherConfig)
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
    probe_s: ProbeSeconds = SECONDS

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a trajectory.

        This is the smaller of ``rollout.max_tokens`` and ``engine.max_length``.
        """
        return min(self.rollout.max_tokens, self.engine.max_length)

    def shares_base(self, model_config: ModelConfig, mesh: Mesh | None, platform: str) -> bool:
        """Returns whether training and decoding use the same arrays of the frozen parameters.

        Args:
            model_config: architecture of the model, with the adapters that the run trains.
            mesh: training mesh; None for one device.
            platform: platform of the devices, such as ``cpu``.
        """
        from coa_jax.engine.layout import shares_base  # here, because it loads JAX

        if self.mesh.rollout_devices:
            return False
        dtype = self.engine.on_platform(platform).dtype
        return shares_base(model_config, mesh, self.loaded_dtype, dtype, self.mesh.decode_tensor)

    @property
    def budgets(self) -> RolloutConfig:
        """Limits of a trajectory; without time limits if ``max_staleness`` is 0.

        With 0, the same seed must reproduce the run, and time limits would make the run depend on
        the speed of the machine.
        """
        if self.max_staleness:
            return self.rollout
        return dataclasses.replace(self.rollout, max_seconds=0.0, max_tool_seconds=0.0)

    @property
    def rules(self) -> AdmissionRules:
        """Rules by which the run chooses the groups of each step."""
        return AdmissionRules(
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
        """Number of optimiser updates of an RL step, summed over its epochs."""
        return self.epochs * -(-self.groups // self.groups_per_update)

    @functools.cached_property
    def chosen(self) -> Algorithm:
        """The algorithm of the run, in which every unset setting has the preset's value."""
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
        if 0 < self.row_length < longest:
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
        if 0 < self.optimizer.total_steps < self.updates_per_step:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLRun(RLConfig):
    """The settings of a run of RL together with the settings of its tools.

    Attributes:
        tools: tools that the policy can call.
    """

    tools: ToolsConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.graders.check_judge()
