"""A reinforcement-learning run between two steps: what it has, learns, publishes and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coa_jax.engine.group import make_engines, new_copies, publish_all
from coa_jax.engine.memory import engine_memory
from coa_jax.engine.meter import MeteredEngine
from coa_jax.errors import UserError
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.room import check_rows
from coa_jax.learn.step import init_state
from coa_jax.learn.teacher import load_teacher
from coa_jax.learn.update import critic_state, reference_params
from coa_jax.model.api import load_model
from coa_jax.model.params import DecodeParams, merge_adapters, split_trained, without_adapters
from coa_jax.model.tokenizer import eos_ids
from coa_jax.parallel.placement import rollout_devices, training_mesh
from coa_jax.rollout.constrain import constraint_for
from coa_jax.trajectory import Trajectory


class Learner:
    """The policy, what it is learned with, the engines that sample from it, and the position.

    Attributes:
        model: architecture, with the adapters that are trained, and tokenizer; its parameters are
            used up.
        engines: of this process.
        state, critic: what is trained.
        reference: see `learn.update.reference_params`.
        teacher: a local one, see `learn.teacher.load_teacher`.
        compute: how the updates compute.
        constraint: constraint of sampling; None without one.
        step: steps that have been learned.
        ledger: state of the stream of groups after ``step`` steps, see `admission.Composition`.
        pool: what `pool.Pool` knows after ``step`` steps; {} without one.
        total: steps of the run.
    """

    def __init__(self, config: RLConfig, protocols: Iterable[str], checkpoints: Checkpoints):
        """Loads the model, makes the engines, and goes on after the newest checkpoint.

        Args:
            config: of the run.
            protocols: of all tasks.
            checkpoints: of the run; the caller closes them.
        """
        self._config, self._checkpoints = config, checkpoints
        self._mesh = training_mesh(config.mesh, config.rows, rollouts=True)
        loaded = load_model(config.model, mesh=self._mesh)
        architecture = dataclasses.replace(loaded.config, lora=config.lora)
        self.model = model = dataclasses.replace(loaded, config=architecture)
        check_rows(model.config, config.rows, config.row_length, config.dtype, self._mesh)
        self.compute = config.compute(model.config, self._mesh)
        # Before the state, whose updates take the parameters' memory.
        self.critic = critic_state(config, model.params)
        self.reference = reference_params(config, model.params)
        self.teacher = load_teacher(config.teacher, model.tokenizer, config.dtype, self._mesh)
        trained, frozen = split_trained(model.params, model.config, config.seed, self._mesh)
        self.state = init_state(trained, config.optimizer, frozen)
        self.step = 0
        self.ledger: dict[str, Any] = {}
        self.pool: Mapping[str, Sequence[Any]] = {}
        self.total = config.rules.steps
        print(f"engine: {engine_memory(model.config, config.engine)}", flush=True)
        self.constraint = constraint_for(
            config.rollout, model.tokenizer, model.config.vocab_size, protocols
        )
        if self.constraint is not None:
            print(f"constraint: {self.constraint}", flush=True)
        self.engines = make_engines(
            merge_adapters(model.config, self.state.model),
            without_adapters(model.config),
            config.engine,
            eos_ids(model.tokenizer),
            self.constraint,
            config.mesh.decode_tensor,
            MeteredEngine,
            rollout_devices(config.mesh),
        )
        for engine in self.engines if config.budgets.max_seconds else ():
            engine.warm_up()  # or the first trajectories would spend their time on compilation
        self._resume()

    def _resume(self) -> None:
        more: dict[str, Any] = {} if self.critic is None else {"critic": self.critic}
        restored = self._checkpoints.newest(self.state, more)
        if restored is None:
            return
        self.state, self.step = restored.state, restored.step
        if "ledger" not in restored.extra:
            raise UserError(
                f"{self._checkpoints.directory}: an earlier version wrote these checkpoints; start "
                "the run in another --workdir"
            )
        self.ledger = restored.extra["ledger"]
        self.pool = restored.extra.get("pool", {})
        self.critic = restored.more.get("critic", self.critic)

    def still_learnable(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory of an earlier part of the run obeys the constraint of this one."""
        constrained = trajectory.metadata["rollout"].get("constrain", False)
        if self.constraint is None:
            return not constrained
        return constrained and trajectory.protocol in self.constraint.start

    def publish(self) -> None:
        """Gives the engines, none of whose slots is in use, the policy as it is now."""
        publish_all(self.engines, merge_adapters(self.model.config, self.state.model))

    def weights(self) -> list[DecodeParams]:
        """The present policy in the layout of the engines, which may be decoding."""
        return new_copies(self.engines, merge_adapters(self.model.config, self.state.model))

    def save(self, metrics: dict[str, float]) -> None:
        """Writes a checkpoint.

        Args:
            metrics: of the step, of which ``keep_best`` names one.
        """
        more: dict[str, Any] = {} if self.critic is None else {"critic": self.critic}
        extra = {"ledger": self.ledger}
        if self.pool:
            extra["pool"] = {id: list(known) for id, known in self.pool.items()}
        self._checkpoints.save(self.step, self.state, extra, metrics=metrics, more=more)


def group_rows(groups: Sequence[Sequence[Trajectory]]) -> list[dict[str, Any]]:
    """The trajectories of groups as JSON objects."""
    return [trajectory.to_json() for group in groups for trajectory in group]
