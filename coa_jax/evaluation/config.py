"""Settings of evaluations: on benchmarks, and during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from coa_jax.config.fields import (
    Between,
    Bounded,
    Name,
    Natural,
    Place,
    Seed,
    Size,
    Sparse,
    Split,
    Temperature,
    TopP,
)
from coa_jax.config.preflight import SECONDS, Needs, ProbeSeconds
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.errors import UserError
from coa_jax.evaluation.exposure import BLOCKED
from coa_jax.evaluation.scaling import PickConfig
from coa_jax.protocol import TAGS
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.endpoint import PolicyEndpoint
from coa_jax.rollout.environments.base import EnvironmentConfig
from coa_jax.rollout.environments.session import graded_by_environment
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks import GradersConfig, Task
from coa_jax.tasks.mixture import Sources, load_parts, parts_of, sources_need
from coa_jax.tools.make import ToolsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesConfig(Bounded):
    """Settings of every evaluation: its tasks, and how they are sampled.

    Attributes:
        tasks: file, data set (hf:NAME) or name of a task source, see `tasks.load_tasks`; "" if
            ``mixture`` names the sources.
        task_options: options of the task source.
        mixture: maps names to task sources, see `tasks.mixture.Part`; weights have no effect.
        split: split of the task source: ``train``, ``validation`` or ``test``.
        num_tasks: number of tasks from each source; 0 for all, in their order.
        samples: number of samples per task. pass@1 is the mean over all samples; pass@k is computed
            if there are at least k samples per task.
        temperature: sampling temperature; 0 is greedy decoding.
    """

    tasks: Place = ""
    task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    split: Split = "validation"
    num_tasks: Natural = 0
    samples: Size = 1
    temperature: Temperature = 0.0

    @property
    def sampling(self) -> SamplingParams:
        """Sampling settings in the form that the engine takes."""
        return SamplingParams(self.temperature)

    @property
    def sampling_seed(self) -> int:
        """Seed of the random choice of tasks, and of the samples."""
        return 0

    def load(
        self, environment: EnvironmentConfig, protocol: str = "", sources: Sources | None = None
    ) -> list[Task]:
        """Loads the tasks of the evaluation.

        Args:
            environment: environment in which the policy acts, which may grade the tasks.
            protocol: default protocol, see `tasks.load_tasks`.
            sources: task sources to use in place of the configured ones; None to use the configured
                ones.

        Raises:
            UserError: the tasks cannot be loaded, or the environment does not fit them.
        """
        number = self.num_tasks or None
        parts = load_parts(sources or self, self.split, number, self.sampling_seed, protocol)
        return graded_by_environment(
            environment, [task for part in parts.values() for task in part]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutConfig(SamplesConfig):
    """Settings of the evaluations during a training run, in addition to those of `SamplesConfig`.

    If ``tasks`` and ``mixture`` are empty, reinforcement learning evaluates on the sources that the
    run trains on. The limits of a trajectory are those of the run (``rollout``).

    Attributes:
        tasks: task source; in RL, "" for the source of the training tasks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tasks or self.mixture:
            parts_of(self)

    def needs(self) -> Needs:
        """Returns what the sources of the tasks need, see `config.preflight`."""
        return sources_need(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SamplesConfig):
    """Settings of an evaluation on a benchmark, in addition to those of `SamplesConfig`.

    Attributes:
        seed: seed of the random choice of tasks, and of the samples.
        top_p: probability mass of nucleus sampling; 1 samples from all tokens.
        top_k: number of most probable tokens that can be sampled; 0 for all tokens.
        protocol: protocol of all tasks; "" for the protocol of each task. Questions without a
            protocol get this protocol, and a task with another protocol is an error.
        engine: settings of the engine that decodes on this machine.
        rollout: budgets of a trajectory.
        agent: external agent program that solves the tasks instead of the default loop of tools.
        graders: how answers are graded.
        environment: environment in which the policy acts, in addition to the tools; see
            docs/environments.md.
        endpoint: endpoint of the policy; if its ``url`` is "", the policy decodes on this machine.
        best_of: settings of best-of-n, in which a model chooses one of a task's samples.
        blocked: addresses that no sample should open. Tool calls that contain one of these
            addresses are counted, but not prevented. To prevent them, block the addresses in the
            settings of the tools.
        last_suggestion: whether the last ``suggested_answer`` of a sample takes the place of a
            missing answer, as the code of the Chain-of-Agents paper intends but never does. With
            this setting, with ``attempts`` above 1, or with ``rollout.cut_context``, the output
            says that the result is not a plain pass@1.
        attempts: maximum number of times that a sample is run. A sample without an answer is run
            again until it has an answer. The code of the Chain-of-Agents paper uses 3.
        retry_faults: whether to repeat samples that were ended by a fault of a tool or of the
            machine.
        probe_s: seconds within which each required server (policy, judge, tools, the model of
            ``best_of``) must answer before the first sample; 0 skips this check.
    """

    engine: EngineConfig
    rollout: RolloutConfig
    seed: Seed = 0
    top_p: TopP = 1.0
    top_k: Natural = 0
    agent: Annotated[AgentConfig, Sparse()] = dataclasses.field(default_factory=AgentConfig)
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)
    environment: Annotated[EnvironmentConfig, Sparse()] = dataclasses.field(
        default_factory=EnvironmentConfig
    )
    endpoint: Annotated[PolicyEndpoint, Sparse()] = dataclasses.field(
        default_factory=PolicyEndpoint
    )
    best_of: PickConfig = dataclasses.field(default_factory=PickConfig)
    protocol: Place = ""
    blocked: tuple[Place, ...] = BLOCKED
    last_suggestion: bool = False
    attempts: Annotated[int, Between(1, 100)] = 1
    retry_faults: bool = False
    probe_s: ProbeSeconds = SECONDS

    @property
    def sampling(self) -> SamplingParams:
        """Sampling settings (temperature, top_p, top_k) in the form that the engine takes."""
        return SamplingParams(self.temperature, self.top_p, self.top_k)

    @property
    def sampling_seed(self) -> int:
        """Seed of the random choice of tasks, and of the samples: the setting ``seed``."""
        return self.seed

    def __post_init__(self) -> None:
        super().__post_init__()
        parts_of(self)
        if self.best_of.n > self.samples:
            raise UserError(f"best_of.n is {self.best_of.n}; give at most samples, {self.samples}")
        ways = [name for name in ("agent", "environment", "endpoint") if getattr(self, name)]
        if len(ways) > 1:
            raise UserError(
                f"{' and '.join(ways)} are set: an agent program, an environment and a policy "
                "behind an endpoint exclude each other; give one of them"
            )
        for name in ("constrain", "cut_context"):
            if self.agent and getattr(self.rollout, name):
                raise UserError(
                    f"rollout.{name} is True: it applies to the loop of tools, but agent names a "
                    "program; leave it False"
                )
        for name in ("constrain", "strict", "format"):
            value = getattr(self.rollout, name)
            if self.endpoint and value not in (False, "", TAGS):
                raise UserError(
                    f"rollout.{name} is {value}: a policy behind an endpoint writes text in the "
                    f"format {TAGS}, and its tokens can be neither constrained nor checked; leave "
                    "the setting out"
                )
        if self.attempts > 1 and self.temperature == 0:
            raise UserError(
                f"attempts is {self.attempts}, but temperature is 0: each attempt would be the same"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateRun(EvaluateConfig):
    """The settings of an evaluation, with the policy and its tools.

    Attributes:
        model: directory or Hub name of the policy; ignored if ``endpoint`` names a server.
        stage: name of the evaluation, under which the work directory stores its results.
        tools: tools that the policy can call.
    """

    model: Place
    stage: Name
    tools: ToolsConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.graders.check_judge()
