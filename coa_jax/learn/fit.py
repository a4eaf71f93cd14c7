"""The loop of every run over a fixed set of examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from absl import logging

from coa_jax.learn.batch import Batch
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.clock import Clock, Profile
from coa_jax.learn.flops import sequence_lengths
from coa_jax.learn.metrics import memory, train_speed
from coa_jax.learn.step import OptimizerConfig, TrainState, check_updates, init_state, train_step
from coa_jax.learn.stop import end_run, stop_on_sigterm
from coa_jax.learn.watch import Watch
from coa_jax.model.api import Model
from coa_jax.model.lora import LoraBase
from coa_jax.model.peft_io import save_trained
from coa_jax.model.weights import Params
from coa_jax.parallel import processes
from coa_jax.parallel.placement import MeshConfig
from coa_jax.progress import progress
from coa_jax.run_dir import RunDir

_PARTS = ("data", "update", "validation", "checkpoint")


class FitConfig(Protocol):
    """What `fit` reads of a run's settings."""

    @property
    def model(self) -> str:
        """Hugging Face directory to start from."""

    @property
    def batch_size(self) -> int:
        """Sequences, or pairs of them, of an update."""

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW and its schedule; ``total_steps`` is the length of the run."""

    @property
    def validate_every(self) -> int:
        """Updates between two measurements of the validation loss."""

    @property
    def checkpoint_every(self) -> int:
        """Updates between two checkpoints."""

    @property
    def keep_last(self) -> int:
        """Newest checkpoints that stay."""

    @property
    def keep_best(self) -> str:
        """Metric of an update whose best checkpoint stays too; empty for none."""

    @property
    def profile_steps(self) -> tuple[int, ...]:
        """(first, last) update that `jax.profiler` records; () for none."""

    @property
    def mesh(self) -> MeshConfig:
        """How long to wait for other processes."""


def fit(
    config: FitConfig,
    run: RunDir,
    output: Path,
    model: Model,
    base: LoraBase | None = None,
    *,
    loss_fn: Any,
    batches_from: Callable[[int], tuple[list[Batch], int]],
    epoch: int,
    phase: str = "sft",
    validate: Callable[[TrainState], float] | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> None:
    """Updates, metrics and checkpoints, and in the end the model.

    SIGTERM ends it after the update that it is in, which is saved, with exit code 0.

    Args:
        config: settings.
        run: where metrics and checkpoints go; a run that was interrupted goes on.
        output: directory of the model.
        model: what the run begins with; its parameters, those that are trained, are donated.
        base: the model whose adapters they are; None where all is trained.
        loss_fn: of an update.
        batches_from: micro-batches of the update that begins at a cursor, on the host, and the
            cursor of the next.
        epoch: examples of one pass.
        phase: name in metrics and checkpoints.
        validate: a figure of held-out data.
        mesh: over which rows are split.
    """
    state, cursor, checkpoints = _resume(config, run, model.params, phase)
    total, step = config.optimizer.total_steps, int(state.step)
    watch = Watch(run.rows(phase))
    with (
        contextlib.closing(checkpoints),
        contextlib.closing(Profile(config.profile_steps, run.path / "profile")) as profile,
        stop_on_sigterm() as stop,
        progress(phase.upper(), total=total, initial=step) as bar,
    ):
        clock, stopping = Clock(*_PARTS), False
        while step < total and not stopping:
            profile.before(step + 1)
            with clock("data"):
                batches, cursor = batches_from(cursor)
            processes.meet(f"update {step + 1}", config.mesh.wait_seconds)
            with clock("update"):
                state, stats = train_step(
                    state,
                    batches,
                    loss_fn=loss_fn,
                    model=model.config,
                    optimizer=config.optimizer,
                    base=base,
                    mesh=mesh,
                    capacity=-(-config.batch_size // config.rows),
                )
            step += 1
            stats["epoch"] = cursor / epoch
            lengths = sequence_lengths(batches)
            stats |= train_speed(model.config, lengths, stats["tokens"], clock.seconds["update"])
            if validate is not None and (step % config.validate_every == 0 or step == total):
                with clock("validation"):
                    stats["validation/loss"] = validate(state)
            run.metrics(step, phase, **stats, **memory(), **clock.report())
            profile.after(step)
            for text in watch.see({**stats, "step": step}):
                logging.warning("%s, step %d: %s", phase.upper(), step, text)
            bar.update(loss=stats["loss"])
            clock, stopping = Clock(*_PARTS), stop.agreed()
            error = check_updates(stats, config.optimizer)
            if step % config.checkpoint_every == 0 or step == total or stopping or error:
                with clock("checkpoint"):
                    checkpoints.save(step, state, {"cursor": cursor}, metrics=stats)
            if error:
                raise error
    if step < total:
        end_run(step, total)
    save_trained(model, state.params, base, config.model, output)


def _resume(
    config: FitConfig, run: RunDir, params: Params, phase: str
) -> tuple[TrainState, int, Checkpoints]:
    checkpoints = Checkpoints(run.checkpoints / phase, config.keep_last, config.keep_best)
    state, cursor = init_state(params, config.optimizer), 0
    restored = checkpoints.newest(state)
    if restored is not None:
        state, cursor = restored.state, int(restored.extra["cursor"])
    run.rewind(phase, 0 if restored is None else restored.step)
    return state, cursor, checkpoints
