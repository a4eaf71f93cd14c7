"""Settings of training runs: fine-tuning, preferences, and rejection sampling.

`rl_config` has the settings of reinforcement learning.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from coa_jax.config.fields import (
    Between,
    Bounded,
    Count,
    Items,
    Natural,
    OneOf,
    Place,
    Positive,
    Prose,
    Seconds,
    Seed,
    Share,
    Size,
    Times,
)
from coa_jax.config.preflight import SECONDS, ProbeSeconds
from coa_jax.data.records import ProtocolName
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.evaluation.config import HeldOutConfig
from coa_jax.model.attention.choice import implementations
from coa_jax.model.config import DTYPES, REMAT, LoraConfig, ModelConfig
from coa_jax.parallel.config import MeshConfig
from coa_jax.protocol import FormatName, Level
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks import GradersConfig
from coa_jax.tools.make import ToolsConfig
from coa_jax.tools.net.chat import ServedModel
from coa_jax.train.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from coa_jax.model.compute import Compute


METRICS = ("eval/pass_at_1", "eval/reward")
"""Metrics of an evaluation by which ``keep_best`` can select a checkpoint; the highest is best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Bounded):
    """Settings that all training runs have.

    Attributes:
        model: directory or Hub name of the initial model, in Hugging Face format.
        seed: seed of the order of the data and of all random numbers.
        rows: number of rows per micro-batch; 0 chooses by the free memory, see
            `defaults.completed`.
        row_length: number of tokens per row; 0 for the length of the longest sequence.
        dtype: dtype of the matmul operands; auto chooses by the processor. Trained parameters and
            their gradients stay float32.
        remat: recomputed activations (none, dots, full); auto: by the free memory, see
            `model.remat.POLICIES`.
        optimizer: settings of AdamW and of its learning rate; ``total_steps`` is the number of
            updates of the run.
        checkpoint_every: number of steps between two checkpoints.
        checkpoint_seconds: number of seconds after the last checkpoint at which the next one is
            due, in addition to the checkpoints of ``checkpoint_every``. It is saved at the end of
            the step in progress, unless a checkpoint is still being written. Training continues
            while a checkpoint is written. A preemption costs the steps since the last complete
            checkpoint, so a small number loses less work.
        mesh: sizes of the mesh axes over which parameters and rows are sharded.
        lora: LoRA adapters to train instead of the whole model. The parameters of the model are
            then frozen, and have the dtype ``dtype``.
        attention: implementation of attention in training: ``auto``, or a name, see
            docs/kernels.md.
        keep_last: number of newest checkpoints to keep.
        export_dtype: dtype of the model that is exported at the end; checkpoints are float32.
        profile_steps: first and last step that `jax.profiler` records, into the folder
            WORKDIR/profile; () for no profile.
    """

    model: Place
    seed: Seed = 0
    rows: Natural = 0
    row_length: Natural = 0
    dtype: Annotated[str, OneOf("auto", *DTYPES)] = "auto"
    remat: Annotated[str, OneOf("auto", *REMAT)] = "auto"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint_every: Count = 20
    checkpoint_seconds: Seconds = 300.0
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    attention: Annotated[str, OneOf("auto", *implementations("causal"))] = "auto"
    keep_last: Count = 2
    export_dtype: Annotated[str, OneOf(*DTYPES)] = "bfloat16"
    profile_steps: Annotated[tuple[Count, ...], Items(0, 2)] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise UserError("model is missing; give a Hugging Face directory or a name of the Hub")

    @property
    def loaded_dtype(self) -> str:
        """The dtype in which the run reads its model: float32 for parameters that are trained.

        Frozen parameters are read in the dtype of the matmuls, which would round them anyway.
        """
        return self.dtype if self.lora.rank else "float32"

    def compute(self, model_config: ModelConfig, mesh: Mesh | None) -> Compute:
        """Returns the dtype, operations and sharding with which updates are computed.

        Args:
            model_config: architecture of the model.
            mesh: devices of the run; None for one device.

        Raises:
            UserError: ``attention`` names an implementation that cannot run on these devices.
        """
        from coa_jax.model.compute import training_compute  # here, because it loads JAX

        return training_compute(
            model_config,
            dtype=self.dtype,
            remat=self.remat,
            attention=self.attention,
            mesh=mesh,
            collectives=self.mesh.collectives,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(TrainingConfig):
    """Settings of a training run on a fixed set of examples, beyond those of `TrainingConfig`.

    Examples with more than ``row_length`` tokens are left out, and a warning states how many.

    Attributes:
        batch_size: number of examples per update.
        data_workers: number of processes per host that read, tokenise and pack the next updates; 0
            for a thread of the training process. A thread suffices as long as the metric
            ``time/data``, the time spent waiting for data, is small.
        validate_every: number of updates between measurements of the validation loss, if the run
            has validation data.
        keep_best: metric whose best checkpoint is kept; "" for none. This checkpoint is kept in
            addition to the newest checkpoints. A validation loss describes the parameters in
            the checkpoint. The training loss (``loss``) describes the parameters before the last
            update, and not those in the checkpoint.
    """

    batch_size: Size = 32
    data_workers: Annotated[int, Between(0, 1024)] = 0
    validate_every: Count = 1
    keep_best: Annotated[str, OneOf("", "loss")] = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(FitConfig):
    """Settings of supervised fine-tuning, in addition to those of `FitConfig`.

    Each example is one record. The Chain-of-Agents paper uses 256 examples per update (§3.1).

    Attributes:
        data: records to train on: a file, a pattern, a folder or a data set
            (``hf:NAME:CONFIG:SPLIT``, ``tfds:NAME:SPLIT``), or several of these separated by
            commas; see docs/data.md.
        weights: relative frequencies of the paths in ``data``; () for all records alike. There is
            one number per path.
        validation: records on which the validation loss is measured; "" for none.
        protocol: protocol of records that name none; "" infers it from their tags.
        prompt_style: prompt style in which the policy sees the questions, see `tasks.prompts`.
        level: level of the protocol rules, ``lenient`` or ``paper``; the instructions in the prompt
            explain the rules of this level. "" takes the level of each record.
        format: format of calls and answers; "" keeps the format of each record. Otherwise, records
            in the format ``tags`` are rewritten in this format, with their thoughts, calls and
            answers, see `RolloutConfig.format`.
        rename_share: share of the records in which names and numbers are replaced by random ones,
            see `train.renaming`. Leave it 0 unless the policy is trained from random weights.
        keep_best: metric whose best checkpoint is kept; "" for none. This checkpoint is kept in
            addition to the newest checkpoints. Metrics of the evaluations on ``held_out``
            have names that begin with ``eval/``.
        evaluate_every: number of updates between evaluations on ``held_out``; 0 for none. The
            evaluations use live tools.
        held_out: tasks and sampling settings of the evaluations.
        engine: settings of the decoding engine in evaluations, such as the number of slots.
        rollout: limits of a trajectory in evaluations. The fields ``prompt_style``, ``level`` and
            ``format`` of ``rollout`` are ignored; the settings of the same names above apply
            instead.
        graders: settings of the graders of answers in evaluations.
        tools: tools that the policy can call in evaluations.
        probe_s: time limit, in seconds, of a check before the first update, in which each server
            that evaluations need must respond; 0 skips this check.
    """

    data: Place
    validation: Place = ""
    prompt_style: Place = "brief"
    rename_share: Share = 0.0
    keep_best: Annotated[str, OneOf("", "loss", "validation/loss", *METRICS)] = ""
    weights: tuple[Positive, ...] = ()
    protocol: ProtocolName = ""
    level: Level = ""
    format: FormatName = ""
    evaluate_every: Natural = 0
    held_out: HeldOutConfig = dataclasses.field(default_factory=HeldOutConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)
    tools: ToolsConfig = dataclasses.field(default_factory=ToolsConfig)
    probe_s: ProbeSeconds = SECONDS

    @property
    def parts(self) -> list[str]:
        """The paths in ``data``, one for each number in ``weights``.

        If ``weights`` is (), the whole text of ``data`` is the only part.
        """
        return self.data.split(",") if self.weights else [self.data]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.parts):
            raise UserError(
                f"weights has {len(self.weights)} numbers, and data {len(self.parts)} paths; give "
                "one number for each path, or no weights"
            )
        check_best(self.keep_best, self.evaluate_every, self.checkpoint_every)
        if self.evaluate_every and not (self.held_out.tasks or self.held_out.mixture):
            raise UserError(
                f"evaluate_every is {self.evaluate_every}, and held_out.tasks is empty; name a "
                "source of tasks"
            )
        if self.keep_best.startswith("validation/") and (
            not self.validation or self.checkpoint_every % self.validate_every
        ):
            raise UserError(
                f"keep_best is {self.keep_best}, which is not known at every "
                "checkpoint; give validation, and make checkpoint_every a multiple of "
                "validate_every"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RFTConfig(FitConfig):
    """Settings of rejection-sampling fine-tuning, in addition to those of `FitConfig`.

    Attributes:
        traces: path of the ``traces.jsonl`` of a run that sampled and graded trajectories; "" to
            train only on the records of ``data``.
        phase: phase of that run, such as ``rl``. Only trajectories of this phase are read; "" reads
            the trajectories of all phases, including evaluations.
        min_reward: minimum reward of a trajectory that the policy is trained on.
        per_task: maximum number of trajectories of one task. The limit keeps tasks that are solved
            often from dominating the training data.
        data: records to train on in addition to the trajectories, see `SFTConfig.data`; "" for no
            records.
        protocol: protocol of the records that name no protocol themselves; "" infers the protocol
            of such a record from its tags.
        prompt_style: prompt style in which the policy sees the records' questions, see
            `tasks.prompts`.
    """

    traces: Place
    phase: Prose
    min_reward: Annotated[float, Between(-1e9, 1e9)]
    per_task: Count
    data: Place = ""
    protocol: ProtocolName = ""
    prompt_style: Place = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.traces and not self.data:
            raise UserError("give traces, data or both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(FitConfig):
    """Settings of direct preference optimisation (DPO), in addition to those of `FitConfig`.

    Each example is a pair of trajectories, and fills one row. The initial model, ``model``, also
    serves as the reference model; if adapters are trained, the model is in memory only once.

    Attributes:
        traces: path of the ``traces.jsonl`` of a run that sampled and graded trajectories.
        phase: phase of that run, such as ``rl``. Only trajectories of this phase are read; "" reads
            the trajectories of all phases, including evaluations.
        beta: factor by which the difference of log-ratios is multiplied in the loss, see
            `dpo_objective`. With a smaller value, the policy moves farther from the reference.
        min_gap: minimum difference between the rewards of the two trajectories of a pair.
        per_task: maximum number of pairs of one task.
        keep_best: metric whose best checkpoint is kept; "" for none. This checkpoint is kept in
            addition to the newest checkpoints.
    """

    traces: Place
    phase: Prose
    beta: Positive
    min_gap: Positive
    per_task: Count
    keep_best: Annotated[str, OneOf("", "loss", "dpo/accuracy", "dpo/margin")] = ""


@dataclasses.dataclass(frozen=True)
class DistilledConfig(Bounded):
    """Treatment of *distilled* tasks: RL tasks whose answers the policy's training records show.

    A task is distilled in two cases:

    - A record has the same question: the same words in the same order. Case and punctuation are
      ignored, so "3 + 4" has the same words as "3 - 4". Therefore the record and the task must also
      have an accepted answer in common, if both have accepted answers.
    - A record asks for the same fact in other words: it has the same accepted answers as the task,
      and the same ``kind``, ``relation`` and ``entities`` (in any order) in its metadata. Only
      generated tasks have entities; all others are compared by their questions.

    Attributes:
        tasks: treatment of distilled tasks. ``leave_out`` leaves them out before the tasks are
            shuffled, so fewer than ``num_tasks`` may remain; ``count`` trains on them; ``refuse``
            ends the run if there are any.
        records: the records that the policy was trained on, see `SFTConfig.data`. "" finds the
            records if ``model`` is still in the work directory of its training, see `trained_on`.
    """

    tasks: Literal["leave_out", "count", "refuse"] = "leave_out"
    records: Place = ""


@dataclasses.dataclass(frozen=True)
class TeacherConfig(ServedModel):
    """Settings of the model that scores the student's tokens.

    The teacher must have the same vocabulary as the student.

    Attributes:
        model: Hugging Face directory of the teacher or, if ``url`` is given, the name of the model
            on that server; "" for no teacher.
        url: URL of an OpenAI-compatible server whose ``/completions`` supports ``prompt_logprobs``,
            such as vLLM or ``coa_jax.serve``; "" for a local model.
        attempts: maximum number of attempts per request, see `ServedModel`.
        concurrency: number of sequences that a process sends to the server at the same time.
    """

    attempts: Times = 5
    concurrency: Times = 16

    def check(self, opd_coef: float, temperature: float, constrained: bool) -> None:
        """Checks that the settings of a run fit the teacher.

        Args:
            opd_coef: setting ``opd_coef`` of the algorithm: the factor of the teacher's advantages.
            temperature: sampling temperature.
            constrained: whether ``rollout.constrain`` limits the tokens that may be sampled.

        Raises:
            UserError: the algorithm needs a teacher, but the settings name none; the settings name
                a teacher, but the algorithm uses none; or the teacher is on a server, but sampling
                has a temperature other than 1 or a limited choice of tokens.
        """
        if opd_coef and not self.model:
            raise UserError(
                f"algorithm.opd_coef is {opd_coef:g} and there is no teacher: name a model in "
                "teacher.model"
            )
        if self.model and not opd_coef:
            raise UserError(
                f"teacher.model is {self.model!r}, and the algorithm uses no teacher: give "
                "algorithm.name=opd, or algorithm.opd_coef=1"
            )
        if self.url and (temperature != 1 or constrained):
            which = "rollout.constrain is True" if constrained else f"temperature is {temperature}"
            raise UserError(
                f"{which}, and a server scores at temperature 1 without a constraint: sample the "
                "same way, or use a local teacher (without teacher.url)"
            )


def check_best(keep_best: str, evaluate_every: int, checkpoint_every: int) -> None:
    """Checks that the metric ``keep_best`` is available for every checkpoint.

    Args:
        keep_best: metric that selects the best checkpoint; "" for no best checkpoint.
        evaluate_every: number of steps between two evaluations; 0 for no evaluations.
        checkpoint_every: number of steps between two checkpoints.

    Raises:
        UserError: ``keep_best`` is a metric of evaluations, and some checkpoint would be saved
            without an evaluation.
    """
    if keep_best in METRICS and (not evaluate_every or checkpoint_every % evaluate_every):
        raise UserError(
            f"keep_best is {keep_best}, which is not known at every checkpoint; give evaluate_every"
            ", and make checkpoint_every a multiple of it"
        )
