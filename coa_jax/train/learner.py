"""The state of a reinforcement-learning run: policy, engines, and position in the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.group import (
    free_engine_memory,
    make_engines,
    new_copies,
    on_separate_devices,
    parameter_copies,
    publish_all,
)
from coa_jax.engine.layout import share_base
from coa_jax.engine.memory import describe_waves, engine_memory
from coa_jax.model.api import describe_model, load_weights
from coa_jax.model.params import DecodeParams, Params, split_trained, without_adapters
from coa_jax.model.tokenizer import eos_ids
from coa_jax.parallel import processes
from coa_jax.parallel.placement import rollout_devices, training_mesh
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.train.advantages import advantages_of
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.loop import Trained
from coa_jax.train.memory import check_rows
from coa_jax.train.movement import norm_before
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.step import TrainState, init_state, run_state
from coa_jax.train.teacher import load_teacher
from coa_jax.train.update import critic_run_state, critic_state, reference_params

_States = tuple[TrainState, TrainState | None, Params | None]
"""The policy, the critic (None without a critic) and the reference (None without a reference)."""


class Learner(Trained):
    """The policy of a run of RL, the engines that sample from it, and the position in the run.

    `loop.Trained` explains the inherited attributes. The mapping ``extra`` has the key ``ledger``,
    the state of the `admission.Ledger` (which tasks are sampled next) after the newest step, and
    the key ``pool``, the state of the task pool (`task_pool.TaskPool`), if there is one.

    Attributes:
        engines: decoding engines of this process.
        critic: critic and its optimiser state; None without a critic.
        reference: parameters of the reference policy, see `train.update.reference_params`; None if
            the algorithm needs no reference.
        teacher: teacher model on the devices of this run, see `train.teacher.load_teacher`; None
            without such a teacher.
        compute: dtype, operations and sharding of the updates.
        constraint: constraint under which the policy samples; None without a constraint.
        norm_before: norm of the adapters that an earlier run added to the initial model, see
            `movement.norm_before`.
    """

    def __init__(self, config: RLConfig, protocols: Iterable[str], checkpoints: Checkpoints):
        """Loads the model or the newest checkpoint, and creates the engines.

        Args:
            config: settings of the run.
            protocols: names of the protocols that the tasks use.
            checkpoints: checkpoints of the run; the caller closes them.

        Raises:
            UserError: the model does not fit the settings, or the checkpoint does not fit the
                settings.
        """
        self._config, self.checkpoints = config, checkpoints
        self.step, self.total, self.extra = 0, config.rules.steps, {}
        self._mesh = training_mesh(config.mesh, config.rows, rollouts=True)
        self.model = model = describe_model(config.model, config.lora)
        self.compute = config.compute(model.config, self._mesh)
        self.state, self.critic, self.reference = self._resumed() or self._begun()
        check_rows(model.config, config.rows, config.row_length, config.dtype, self._mesh)
        self.teacher = load_teacher(config.teacher, model.tokenizer, config.dtype, self._mesh)
        self.norm_before = norm_before(config.model) if config.lora.rank else 0.0
        shared = isinstance(self.state.frozen, DecodeParams)
        note = " (parameters that training holds too, as the same arrays)" if shared else ""
        print(f"engine: {engine_memory(model.config, config.engine)}{note}", flush=True)
        ends = constraint_or_ends(
            config.rollout, model.tokenizer, model.config.vocab_size, protocols
        )
        self.constraint = ends if config.rollout.constrain else None
        if self.constraint is not None:
            print(f"constraint: {self.constraint}", flush=True)
        self.engines = make_engines(
            self.state.all_params,
            model.config,
            config.engine,
            eos_ids(model.tokenizer),
            ends,
            config.mesh.decode_tensor,
            rollout_devices(config.mesh),
        )
        groups = processes.count() * len(parameter_copies(self.engines))
        shapes = [engine.config for engine in self.engines]
        places = processes.count() * sum(shape.slots for shape in shapes)
        full_length = processes.count() * sum(
            shape.num_pages // shape.pages_per_slot for shape in shapes
        )
        waves = describe_waves(config.groups * config.group_size, places, groups)
        print(f"rollouts: {waves}; the cache holds {full_length:,} of full length", flush=True)
        for engine in self.engines if config.budgets.max_seconds else ():
            engine.warm_up()  # so that compilation does not count against `max_seconds`

    def _begun(self) -> _States:
        """Creates the state of a new run."""
        config, model = self._config, self.model.config
        params = load_weights(config.model, self._mesh, config.loaded_dtype)
        # Copy the parameters first, because updates of the state reuse their memory.
        critic, reference = critic_state(config, params), reference_params(config, params)
        trained, frozen = split_trained(params, model, config.seed, self._mesh)
        return init_state(trained, config.optimizer, self._shared(frozen)), critic, reference

    def _shared(self, frozen: Params) -> Params | DecodeParams:
        """Returns frozen parameters in the layout in which engines can share them, if they can."""
        config, model = self._config, self.model.config
        if not config.shares_base(model, self._mesh, jax.default_backend()):
            return frozen
        return share_base(frozen, without_adapters(model))

    def _resumed(self) -> _States | None:
        """Reads the newest checkpoint and sets the position in the run; returns None without one.

        The model's files are read only for parameters that are not trained: the reference, and the
        frozen parameters of a run that trains adapters.
        """
        if not self.checkpoints.steps():
            return None
        config, model = self._config, self.model.config
        dtype, reference = config.loaded_dtype, None
        like = run_state(model, config.optimizer, self._mesh, dtype)
        if model.lora.rank:
            frozen = load_weights(config.model, self._mesh, dtype)
            like = like._replace(frozen=self._shared(frozen))
        elif config.chosen.needs_reference:
            reference = load_weights(config.model, self._mesh)
        critic = critic_run_state(config, model, self._mesh)
        restored = self.checkpoints.newest(like, {} if critic is None else {"critic": critic})
        assert restored is not None
        self.step, self.extra = restored.step, restored.extra
        critic = restored.more.get("critic")
        if critic is None and config.chosen.needs_critic:  # saved under another algorithm
            critic = critic_state(config, load_weights(config.model, self._mesh))
        return restored.state, critic, reference

    def still_learnable(self, trajectory: Trajectory) -> bool:
        """Returns whether a resumed run can train on a trajectory that was sampled before.

        The trajectory must have been sampled under the constraint of this run, or without a
        constraint if this run has none.
        """
        constrained = trajectory.metadata["rollout"].get("constrain", False)
        if self.constraint is None:
            return not constrained
        return constrained and trajectory.protocol in self.constraint.start

    @property
    def update_arguments(self) -> dict[str, Any]:
        """Arguments for `update.update`, such as the critic, without the policy and the groups."""
        return {
            "model_config": self.model.config,
            "compute": self.compute,
            "constraint": self.constraint,
            "critic": self.critic,
            "reference": self.reference,
            "teacher": self.teacher,
            "version": self.step,
            "norm_before": self.norm_before,
        }

    def publish(self) -> None:
        """Copies the current policy to the engines; no slot of an engine may be in use."""
        publish_all(self.engines, self.state.all_params)

    def free_engine_memory(self) -> None:
        """Frees the engines' memory until the next `publish`; no slot of an engine may be in use.

        Engines on separate devices keep their memory, because nothing else needs the memory of
        those devices.
        """
        if not on_separate_devices(self.engines, self.state.params):
            free_engine_memory(self.engines)

    def weights(self) -> list[DecodeParams]:
        """Returns copies of the current policy in the layout of the engines.

        The engines may decode while the copies are made.
        """
        return new_copies(self.engines, self.state.all_params)

    def save(self, metrics: Mapping[str, float]) -> None:
        """Writes a checkpoint, see `loop.Trained.save`."""
        more = {} if self.critic is None else {"critic": self.critic}
        self.checkpoints.save(self.step, self.state, dict(self.extra), metrics=metrics, more=more)


def group_rows(
    algorithm: Algorithm, groups: Sequence[Sequence[Trajectory]]
) -> list[dict[str, Any]]:
    """Converts the trajectories of groups to JSON objects for the trace files.

    If the algorithm computes one advantage per trajectory from the rewards of its group alone,
    ``metadata.advantage`` of each graded trajectory holds the advantage.
    """
    rows = []
    for group in groups:
        graded = [] if algorithm.whitened else advantages_of(algorithm, group)
        known = {id(trajectory): float(a) for trajectory, a in graded if not a.ndim}
        for trajectory in group:
            row = trajectory.to_json()
            if id(trajectory) in known:
                row["metadata"] = {**row["metadata"], "advantage": known[id(trajectory)]}
            rows.append(row)
    return rows
