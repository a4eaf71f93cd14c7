"""A reinforcement-learning run between two steps: what it has, learns, publishes and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from absl import logging

from coa_jax.engine.group import copies, make_engines, publish_all, take_copies
from coa_jax.engine.layout import cut, join
from coa_jax.engine.memory import engine_memory
from coa_jax.engine.meter import MeteredEngine
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.room import check_rows
from coa_jax.learn.step import init_state
from coa_jax.learn.teacher import load_teacher
from coa_jax.learn.update import critic_state, reference_params
from coa_jax.model.api import load_model
from coa_jax.model.params import DecodeParams, merge_adapters, split_trained, without_adapters
from coa_jax.model.tokenizer import eos_ids
from coa_jax.parallel.placement import training_mesh
from coa_jax.rollout.constrain import constraint_for
from coa_jax.trajectory import Trajectory


class Learner:
    """The policy, what it is learned with, the engines that sample from it, and the position.

    Attributes:
        model: architecture, with the adapters that are trained, and tokenizer; its parameters are
            used up.
        engines: of this process; they sample with the policy after ``policy_step`` steps.
        state, critic: what is trained.
        reference: see `learn.update.reference_params`.
        teacher: a local one, see `learn.teacher.load_teacher`.
        compute: how the updates compute.
        constraint: constraint of sampling; None without one.
        step: steps that have been learned.
        cursor: index of the next task.
        surplus: groups that were sampled and have not been learned yet.
        total: steps of the run.
        ahead: whether a batch is sampled while the one before it is learned.
    """

    def __init__(self, config: RLConfig, protocols: Iterable[str], checkpoints: Checkpoints):
        """Loads the model, makes the engines, and goes on after the newest checkpoint.

        Args:
            config: of the run.
            protocols: of all tasks.
            checkpoints: of the run; the caller closes them.
        """
        self._config, self._checkpoints = config, checkpoints
        self._mesh = training_mesh(config.mesh, config.rows)
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
        self.step = self.cursor = self.policy_step = 0
        self.surplus: list[list[Trajectory]] = []
        self.total = config.optimizer.total_steps // config.updates_per_step
        self.ahead = bool(config.rollouts_ahead)
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
        )
        for engine in self.engines if config.rollout.max_seconds else ():
            engine.warm_up()  # or the first trajectories would spend their time on compilation
        self._resume()

    def _resume(self) -> None:
        more: dict[str, Any] = {} if self.critic is None else {"critic": self.critic}
        if self.ahead:
            more["sampler"] = self._sampler()
        restored = self._checkpoints.newest(self.state, more)
        if restored is None:
            return
        self.state, self.step = restored.state, restored.step
        self.cursor = int(restored.extra["cursor"])
        self.surplus = self._still_learnable(restored.extra)
        self.critic = restored.more.get("critic", self.critic)
        self.publish()
        if "sampler" in restored.more:
            self.policy_step = self.step - 1
            take_copies(
                self.engines, cut(restored.more["sampler"], without_adapters(self.model.config))
            )

    def _still_learnable(self, extra: dict[str, Any]) -> list[list[Trajectory]]:
        """The groups that a checkpoint kept, without those that other settings have sampled."""
        groups = [
            [Trajectory.from_json(row) for row in group] for group in extra.get("surplus", ())
        ]
        rules = self.constraint

        def fits(trajectory: Trajectory) -> bool:
            constrained = trajectory.metadata["rollout"].get("constrain", False)
            if rules is None:
                return not constrained
            return constrained and trajectory.protocol in rules.start

        kept = [group for group in groups if all(map(fits, group))]
        if len(kept) < len(groups):
            logging.warning(
                "%d groups that were left over are not learned: they were sampled under another "
                "rollout.constrain or protocol",
                len(groups) - len(kept),
            )
        return kept

    def publish(self) -> None:
        """Gives the engines the policy as it is now."""
        publish_all(self.engines, merge_adapters(self.model.config, self.state.model))
        self.policy_step = self.step

    def save(self, metrics: dict[str, float]) -> None:
        """Writes a checkpoint.

        Args:
            metrics: of the step, of which ``keep_best`` names one.
        """
        # With the parameters that sample the next batch, where they are not those of the state.
        more: dict[str, Any] = {} if self.critic is None else {"critic": self.critic}
        if self.ahead and self.step < self.total:
            more["sampler"] = self._sampler()
        surplus = [group_rows([group]) for group in self.surplus]
        extra = {"cursor": self.cursor, "surplus": surplus}
        self._checkpoints.save(self.step, self.state, extra, metrics=metrics, more=more)

    def _sampler(self) -> DecodeParams:
        """The parameters of the engines of all processes."""
        model = without_adapters(self.model.config)
        return join(copies(self.engines), model, self._mesh, self._config.mesh.decode_tensor)


def group_rows(groups: Sequence[Sequence[Trajectory]]) -> list[dict[str, Any]]:
    """The trajectories of groups as JSON objects."""
    return [trajectory.to_json() for group in groups for trajectory in group]
