"""Trains on a fixed set of examples: SFT, DPO and rejection fine-tuning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from coa_jax.engine.engine import Engine
from coa_jax.evaluation.held_out import HeldOut
from coa_jax.model.api import Model
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig, warn_of_positions
from coa_jax.model.params import Params, split_trained
from coa_jax.parallel import processes
from coa_jax.run.run_dir import RunDir
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.config import FitConfig
from coa_jax.train.data import Update, UpdateSequence, read_ahead
from coa_jax.train.loop import Loop, Trained, export
from coa_jax.train.losses import Loss
from coa_jax.train.memory import check_rows
from coa_jax.train.metrics import train_speed
from coa_jax.train.step import TrainState, init_state, run_state, train_step


def fit(
    config: FitConfig,
    run: RunDir,
    output: Path,
    model: Model,
    *,
    weights: Callable[[], Params],
    loss: Loss,
    compute: Compute,
    updates: Callable[..., UpdateSequence],
    epoch: int,
    longest: int,
    phase: str = "sft",
    complete: Callable[[Update], Update] | None = None,
    validate: Callable[[TrainState], float] | None = None,
    held_out: HeldOut | None = None,
    evaluate_every: int = 0,
    engines: Callable[[TrainState], Sequence[Engine]] = lambda state: (),
) -> None:
    """Trains a model, writes metrics and checkpoints, and exports the model at the end.

    An interrupted run resumes from its newest checkpoint. On SIGTERM, the process completes the
    current update, saves a checkpoint, and ends, see `stop.end_run`. A resumed run repeats an
    evaluation that SIGTERM ended.

    Args:
        config: settings of the run.
        run: directory of the run, for metrics and checkpoints.
        output: directory for the exported model.
        model: architecture (with the adapters to train) and tokenizer of the model, without
            parameters.
        weights: function that reads the initial parameters, without adapters, in the dtype
            ``config.loaded_dtype``; updates donate these parameters, unless adapters are trained. A
            resumed run calls the function only if the run trains adapters, because no checkpoint
            contains the frozen base parameters.
        loss: loss of an update.
        compute: dtype, operations and sharding; rows are split over the mesh of ``compute``.
        updates: function that creates the updates of the run. Its keyword arguments are the fields
            ``batch_size``, ``rows``, ``length``, ``cursor`` and ``number`` of `UpdateSequence`.
        epoch: number of examples in one pass over the data.
        longest: number of tokens of the longest sequence; a warning is logged if the model supports
            fewer positions.
        phase: name of the training stage in metrics and checkpoints.
        complete: function that adds arrays to an update before its step, such as log-probabilities
            of a reference; None if nothing is added.
        validate: function that computes the validation loss; None for no validation.
        held_out: evaluates the model during the run; None for no evaluations.
        evaluate_every: number of updates between two evaluations.
        engines: function that creates the engines of an evaluation.

    Raises:
        UserError: the settings do not fit the model or a checkpoint, or the loss or the gradient of
            several updates in a row was not finite.
    """
    warn_of_positions(model.config, longest, "row_length")
    trained = _begin(config, run, model, weights, compute, phase)
    check_rows(model.config, config.rows, config.row_length, config.dtype, compute.mesh)
    planned = updates(
        batch_size=config.batch_size,
        rows=config.rows,
        length=config.row_length,
        cursor=trained.extra["cursor"],
        number=trained.total - trained.step,
    )
    loop = Loop(
        config=config,
        run=run,
        phase=phase,
        trained=trained,
        parts=("data", "update", "validation", "checkpoint"),
        shown={"loss": "loss"},
        held_out=held_out,
        evaluate_every=evaluate_every,
        engines=lambda: engines(trained.state),
    )
    make_updates(
        loop,
        config,
        planned,
        loss=loss,
        model_config=model.config,
        compute=compute,
        epoch=epoch,
        speed=lambda update, tokens, seconds: train_speed(
            model.config, update.lengths, tokens, seconds
        ),
        complete=complete,
        validate=validate,
    )
    export(config, trained, output, phase)


def make_updates(
    loop: Loop,
    config: FitConfig,
    planned: UpdateSequence,
    *,
    loss: Loss,
    model_config: ModelConfig,
    epoch: int,
    compute: Compute | None = None,
    speed: Callable[[Update, float, float], dict[str, float]] = lambda *_: {},
    complete: Callable[[Update], Update] | None = None,
    validate: Callable[[TrainState], float] | None = None,
) -> None:
    """Makes the planned updates of a run, and writes their metrics and checkpoints.

    Args:
        loop: the loop of the run; its checkpoints are closed at the end.
        config: settings of the run.
        planned: the data of the updates, in order.
        loss: loss of an update.
        model_config: architecture of the model, which the loss gets.
        epoch: number of examples in one pass over the data.
        compute: see `fit`; None computes in float32 on the first device.
        speed: computes the throughput from an update, its tokens with a loss, and its seconds.
        complete: see `fit`.
        validate: see `fit`.
    """
    trained = loop.trained
    with (
        contextlib.closing(trained.checkpoints),
        loop,
        read_ahead(planned, config.data_workers) as ahead,
    ):
        for clock in loop:
            name = f"update {trained.step + 1}"
            processes.set_activity(f"data of {name}")
            with clock("data"):
                update = next(ahead)
            if complete is not None:
                with clock("score"):
                    update = complete(update)
            processes.barrier(name, config.mesh.wait_seconds)
            processes.set_activity(name)
            with clock("update"):
                trained.state, stats = train_step(
                    trained.state,
                    update.batches,
                    loss=loss,
                    model_config=model_config,
                    compute=compute,
                    optimizer=config.optimizer,
                    capacity=-(-config.batch_size // config.rows),
                    rows=update.rows,
                    count=update.tokens,
                )
            trained.step += 1
            trained.extra["cursor"] = update.cursor
            stats["epoch"] = update.cursor / epoch
            stats |= speed(update, stats["tokens"], clock.seconds["update"])
            if validate is not None and loop.due(config.validate_every):
                with clock("validation"):
                    stats["validation/loss"] = validate(trained.state)
            loop.end_step(stats | loop.evaluate())


def _begin(
    config: FitConfig,
    run: RunDir,
    model: Model,
    weights: Callable[[], Params],
    compute: Compute,
    phase: str,
) -> Trained:
    """Begins a run, or resumes the run from its newest checkpoint."""
    checkpoints = Checkpoints(
        run.checkpoints / phase,
        config.keep_last,
        config.keep_best,
        wait_seconds=config.mesh.wait_seconds,
        before_save=run.sync,
    )
    restored, total = None, config.optimizer.total_steps
    if checkpoints.steps():
        like = run_state(model.config, config.optimizer, compute.mesh, config.loaded_dtype)
        if model.config.lora.rank:
            like = like._replace(frozen=weights())
        restored = checkpoints.newest(like)
    run.begin(phase, 0 if restored is None else restored.step, total)
    if restored is not None:
        return Trained(model, restored.state, checkpoints, restored.step, total, restored.extra)
    params, frozen = split_trained(weights(), model.config, config.seed, compute.mesh)
    state = init_state(params, config.optimizer, frozen)
    return Trained(model, state, checkpoints, 0, total, {"cursor": 0})
