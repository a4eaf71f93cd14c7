"""The training loop of runs over a fixed set of examples: SFT, DPO and rejection fine-tuning."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging

from coa_jax.model.api import Model
from coa_jax.model.compute import Compute
from coa_jax.model.config import warn_of_positions
from coa_jax.model.params import Params, split_trained
from coa_jax.model.peft_io import save_trained
from coa_jax.parallel import processes
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.clock import Clock, Profile
from coa_jax.train.config import FitConfig
from coa_jax.train.data import Update, UpdateSequence, read_ahead
from coa_jax.train.losses import Loss
from coa_jax.train.memory import check_rows
from coa_jax.train.metrics import peak_memory, train_speed
from coa_jax.train.step import TrainState, check_updates, init_state, run_state, train_step
from coa_jax.train.stop import end_run, stop_on_sigterm
from coa_jax.train.watch import Watch

_PARTS = ("data", "update", "validation", "checkpoint")


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
    evaluate: Callable[[TrainState, int], dict[str, float] | None] | None = None,
    hurry: Callable[[], None] = lambda: None,
) -> None:
    """Trains a model, writes metrics and checkpoints, and exports the model at the end.

    An interrupted run resumes from its newest checkpoint. On SIGTERM, the process completes the
    current update, saves a checkpoint, and exits with code 0. A resumed run repeats an evaluation
    that SIGTERM ended.

    Args:
        config: settings of the run.
        run: directory of the run, for metrics and checkpoints.
        output: directory for the exported model.
        model: architecture (with the adapters to train) and tokenizer of the model, without
            parameters.
        weights: function that reads the initial parameters, without adapters; updates donate these
            parameters. A resumed run calls the function only if the run trains adapters, because no
            checkpoint contains the frozen base parameters.
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
        evaluate: function that is called with the state and the number of the update. It returns
            the metrics of an evaluation, {} if no evaluation is due, or None if ``hurry`` ended the
            evaluation. A resumed run repeats a call that ``hurry`` ended. None for no evaluations.
        hurry: function that ends an evaluation in progress when the run must stop. A signal handler
            calls the function.

    Raises:
        UserError: the settings do not fit the model or a checkpoint, or the loss or the gradient of
            several updates in a row was not finite.
    """
    warn_of_positions(model.config, longest, "row_length")
    state, extra, checkpoints = _resume(config, run, model, weights, compute.mesh, phase)
    cursor, unmeasured = int(extra["cursor"]), bool(extra.get("unmeasured"))
    check_rows(model.config, config.rows, config.row_length, config.dtype, compute.mesh)
    total, step = config.optimizer.total_steps, int(state.step)
    watch = Watch(run.rows(phase))
    planned = updates(
        batch_size=config.batch_size,
        rows=config.rows,
        length=config.row_length,
        cursor=cursor,
        number=total - step,
    )
    with (
        contextlib.closing(checkpoints),
        contextlib.closing(Profile(config.profile_steps, run.path / "profile")) as profile,
        stop_on_sigterm(hurry) as stop,
        read_ahead(planned, config.data_workers) as ahead,
        progress(phase.upper(), total=total, initial=step) as bar,
    ):
        if unmeasured:  # a signal ended the evaluation of the newest checkpoint
            figures = evaluate(state, step) if evaluate is not None else {}
            unmeasured = figures is None
            run.add_metrics(step, phase, **(figures or {}))
        clock, stopping = Clock(*_PARTS), unmeasured
        while step < total and not stopping:
            profile.before(step + 1)
            processes.doing(f"data of update {step + 1}")
            with clock("data"):
                data = next(ahead)
                cursor = data.cursor
            if complete is not None:
                with clock("score"):
                    data = complete(data)
            processes.meet(f"update {step + 1}", config.mesh.wait_seconds)
            processes.doing(f"update {step + 1}")
            with clock("update"):
                state, stats = train_step(
                    state,
                    data.batches,
                    loss=loss,
                    model=model.config,
                    compute=compute,
                    optimizer=config.optimizer,
                    capacity=-(-config.batch_size // config.rows),
                    rows=data.rows,
                    count=data.tokens,
                )
            step += 1
            stats["epoch"] = cursor / epoch
            seconds = clock.seconds["update"]
            stats |= train_speed(model.config, data.lengths, stats["tokens"], seconds)
            if validate is not None and (step % config.validate_every == 0 or step == total):
                with clock("validation"):
                    stats["validation/loss"] = validate(state)
            if evaluate is not None:
                processes.doing(f"evaluation after update {step}")
                with clock("evaluation"):
                    figures = evaluate(state, step)
                unmeasured = figures is None
                stats |= figures or {}
            run.metrics(step, phase, **stats, **peak_memory(), **clock.report())
            profile.after(step)
            for text in watch.see({**stats, "step": step}):
                logging.warning("%s, step %d: %s", phase.upper(), step, text)
            bar.update(loss=stats["loss"])
            clock, overdue = Clock(*_PARTS), checkpoints.overdue(config.checkpoint_seconds)
            stopping, due = stop.agreed(config.mesh.wait_seconds, overdue)
            error = check_updates(stats, config.optimizer)
            due |= step % config.checkpoint_every == 0 or step == total
            if due or stopping or error:
                with clock("checkpoint"):
                    extra = {"cursor": cursor, "unmeasured": unmeasured}
                    checkpoints.save(step, state, extra, metrics=stats)
            if error:
                raise error
    if step < total or unmeasured:
        end_run(step, total)
    model = dataclasses.replace(model, params=state.model)
    settings = dataclasses.asdict(config)
    save_trained(model, config.model, output, config.export_dtype, phase, settings)


def _resume(
    config: FitConfig,
    run: RunDir,
    model: Model,
    weights: Callable[[], Params],
    mesh: jax.sharding.Mesh | None,
    phase: str,
) -> tuple[TrainState, dict[str, Any], Checkpoints]:
    checkpoints = Checkpoints(
        run.checkpoints / phase,
        config.keep_last,
        config.keep_best,
        wait_seconds=config.mesh.wait_seconds,
        before_save=run.sync,
    )
    restored = None
    if checkpoints.steps():
        like = run_state(model.config, config.optimizer, mesh)
        if model.config.lora.rank:
            like = like._replace(frozen=weights())
        restored = checkpoints.newest(like)
    step = 0 if restored is None else restored.step
    run.begin(phase, step, config.optimizer.total_steps)
    if restored is not None:
        return restored.state, restored.extra, checkpoints
    trained, frozen = split_trained(weights(), model.config, config.seed, mesh)
    return init_state(trained, config.optimizer, frozen), {"cursor": 0}, checkpoints
