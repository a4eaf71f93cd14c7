"""The loop of every run over a fixed set of examples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
from absl import logging

from coa_jax.bounds import Bounded, Count, Items, OneOf, Place, Seed, Size
from coa_jax.learn.batch import Batch
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.clock import Clock, Profile
from coa_jax.learn.losses import Loss
from coa_jax.learn.metrics import memory, sequence_lengths, train_speed
from coa_jax.learn.room import check_rows
from coa_jax.learn.step import OptimizerConfig, TrainState, check_updates, init_state, train_step
from coa_jax.learn.stop import end_run, stop_on_sigterm
from coa_jax.learn.watch import Watch
from coa_jax.model.api import Model
from coa_jax.model.attention.choice import implementations
from coa_jax.model.compute import Compute, training_compute
from coa_jax.model.config import DTYPES, ModelConfig, warn_of_positions
from coa_jax.model.params import split_trained
from coa_jax.model.peft_io import save_trained
from coa_jax.model.remat import POLICIES
from coa_jax.parallel import processes
from coa_jax.parallel.placement import MeshConfig
from coa_jax.progress import progress
from coa_jax.run_dir import RunDir

_PARTS = ("data", "update", "validation", "checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(Bounded):
    """What all runs over a fixed set of examples have in common.

    Attributes:
        model: Hugging Face directory to start from.
        seed: order of the data.
        batch_size: examples of an update.
        rows: rows of a micro-batch.
        row_length: tokens of a row; longer examples are left out and counted.
        dtype: operands of products; parameters and their sums stay float32.
        remat: which activations the backward pass computes again, see `model.remat.POLICIES`.
        optimizer: AdamW and its schedule; ``total_steps`` is the length of the run.
        validate_every: updates between two measurements of the validation loss, where there is one.
        checkpoint_every: updates between two checkpoints.
        mesh: axes over which parameters and rows are sharded.
        attention: implementation in training: ``auto`` or a name, see docs/kernels.md.
        keep_last: newest checkpoints that stay.
        keep_best: metric of an update whose best checkpoint stays too; empty for none.  The
            validation loss is that of the checkpoint, ``loss`` that of the parameters before.
        profile_steps: (first, last) update that `jax.profiler` records into WORKDIR/profile.
    """

    model: Place
    seed: Seed
    batch_size: Size
    rows: Size
    row_length: Size
    dtype: Annotated[str, OneOf(*DTYPES)]
    remat: Annotated[str, OneOf(*POLICIES)]
    optimizer: OptimizerConfig
    validate_every: Count = 1
    checkpoint_every: Count
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    attention: Annotated[str, OneOf("auto", *implementations("causal"))] = "auto"
    keep_last: Count = 2
    keep_best: Annotated[str, OneOf("", "loss")] = ""
    profile_steps: Annotated[tuple[Count, ...], Items(0, 2)] = ()


def compute_of(config: FitConfig, model: ModelConfig, mesh: jax.sharding.Mesh | None) -> Compute:
    """How a run computes, see `training_compute`."""
    return training_compute(
        model,
        dtype=config.dtype,
        remat=config.remat,
        attention=config.attention,
        mesh=mesh,
        collectives=config.mesh.collectives,
    )


def fit(
    config: FitConfig,
    run: RunDir,
    output: Path,
    model: Model,
    *,
    loss: Loss,
    compute: Compute,
    batches_from: Callable[[int], tuple[list[Batch], int]],
    epoch: int,
    longest: int,
    phase: str = "sft",
    validate: Callable[[TrainState], float] | None = None,
) -> None:
    """Updates, metrics and checkpoints, and in the end the model.

    SIGTERM ends it after the update that it is in, which is saved, with exit code 0.

    Args:
        config: settings.
        run: where metrics and checkpoints go; a run that was interrupted goes on.
        output: directory of the model.
        model: what the run begins with, without adapters even if its architecture has them: they
            are made here.  Its parameters are donated.
        loss: loss of an update.
        compute: how to compute; rows are split over its mesh.
        batches_from: micro-batches of the update that begins at a cursor, on the host, and the
            cursor of the next.
        epoch: examples of one pass.
        longest: tokens of the longest sequence, whose positions begin anew in every one of a row.
        phase: name in metrics and checkpoints.
        validate: a figure of held-out data.
    """
    warn_of_positions(model.config, longest, "row_length")
    check_rows(model.config, config.rows, config.row_length, config.dtype, compute.mesh)
    state, cursor, checkpoints = _resume(config, run, model, compute.mesh, phase)
    total, step = config.optimizer.total_steps, int(state.step)
    adapters = bool(model.config.lora.rank)
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
            processes.doing(f"data of update {step + 1}")
            with clock("data"):
                batches, cursor = batches_from(cursor)
            processes.meet(f"update {step + 1}", config.mesh.wait_seconds)
            processes.doing(f"update {step + 1}")
            with clock("update"):
                state, stats = train_step(
                    state,
                    batches,
                    loss=loss,
                    model=model.config,
                    compute=compute,
                    optimizer=config.optimizer,
                    capacity=-(-config.batch_size // config.rows),
                )
            step += 1
            stats["epoch"] = cursor / epoch
            lengths = sequence_lengths(batches)
            stats |= train_speed(
                model.config, lengths, stats["tokens"], clock.seconds["update"], adapters
            )
            if validate is not None and (step % config.validate_every == 0 or step == total):
                with clock("validation"):
                    stats["validation/loss"] = validate(state)
            run.metrics(step, phase, **stats, **memory(), **clock.report())
            profile.after(step)
            for text in watch.see({**stats, "step": step}):
                logging.warning("%s, step %d: %s", phase.upper(), step, text)
            bar.update(loss=stats["loss"])
            clock, stopping = Clock(*_PARTS), stop.agreed(config.mesh.wait_seconds)
            error = check_updates(stats, config.optimizer)
            if step % config.checkpoint_every == 0 or step == total or stopping or error:
                with clock("checkpoint"):
                    checkpoints.save(step, state, {"cursor": cursor}, metrics=stats)
            if error:
                raise error
    if step < total:
        end_run(step, total)
    save_trained(dataclasses.replace(model, params=state.model), config.model, output)


def _resume(
    config: FitConfig, run: RunDir, model: Model, mesh: jax.sharding.Mesh | None, phase: str
) -> tuple[TrainState, int, Checkpoints]:
    checkpoints = Checkpoints(
        run.checkpoints / phase,
        config.keep_last,
        config.keep_best,
        wait_seconds=config.mesh.wait_seconds,
    )
    trained, frozen = split_trained(model.params, model.config, config.seed, mesh)
    state, cursor = init_state(trained, config.optimizer, frozen), 0
    restored = checkpoints.newest(state)
    if restored is not None:
        state, cursor = restored.state, int(restored.extra["cursor"])
    run.rewind(phase, 0 if restored is None else restored.step)
    return state, cursor, checkpoints
