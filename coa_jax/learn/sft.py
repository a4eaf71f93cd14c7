"""Observation-masked supervised fine-tuning on distilled trajectories (paper §3.1)."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from coa_jax.learn.batch import Batch, Example, pack, split_rows
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.data import example_stream, next_batches, tokenize_records
from coa_jax.learn.losses import bind, sft_loss
from coa_jax.learn.scratch import template_words
from coa_jax.learn.step import OptimizerConfig, TrainState, check_updates, init_state, train_step
from coa_jax.model.api import Model, load_model
from coa_jax.model.attention.causal import choose
from coa_jax.model.config import ModelConfig
from coa_jax.model.lora import LoraBase, LoraConfig, attach, split
from coa_jax.model.peft_io import save_trained
from coa_jax.model.remat import policy_name
from coa_jax.model.weights import Params
from coa_jax.parallel import processes
from coa_jax.parallel.placement import MeshConfig, put_batch, training_mesh
from coa_jax.progress import progress
from coa_jax.run_dir import RunDir
from coa_jax.trajectory import read_records


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """A fine-tuning run.

    Attributes:
        model: Hugging Face directory to start from.
        data: JSONL of distilled records to learn.
        validation: JSONL of records whose loss is measured; empty for none.
        prompt_style: ``full`` or ``brief``.
        rename_share: share of the records whose names and numbers are replaced by random ones, see
            `augment.rename`; 0 unless the policy starts from nothing.
        seed: order of the data.
        batch_size: records of an update (paper §3.1: 256).
        rows: rows of a micro-batch.
        row_length: tokens of a row; longer records are left out and counted.
        dtype: operands of products; parameters and their sums stay float32.
        remat: which activations the backward pass computes again, see `model.remat.POLICIES`.
        optimizer: AdamW and its schedule; ``total_steps`` is the length of the run.
        validate_every: updates between two measurements of the validation loss.
        checkpoint_every: updates between two checkpoints.
        mesh: axes over which parameters and rows are sharded.
        attention: implementation in training: ``auto`` or a name, see docs/kernels.md.
        lora: adapters to train in place of the whole model, see `model.lora`.
    """

    model: str
    data: str
    validation: str
    prompt_style: str
    rename_share: float
    seed: int
    batch_size: int
    rows: int
    row_length: int
    dtype: str
    remat: str
    optimizer: OptimizerConfig
    validate_every: int
    checkpoint_every: int
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    attention: str = "auto"
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        policy_name(self.remat, "sft config: remat")


def train(config: SFTConfig, run: RunDir, output: Path) -> None:
    """Fine-tunes and writes the model as a Hugging Face directory to ``output``.

    Started again in the same run directory it goes on after the newest checkpoint, and ends with
    the parameters that it would have had without the interruption.
    """
    mesh = training_mesh(config.mesh)
    records = read_records(config.data)
    held_out = read_records(config.validation) if config.validation else []
    model = load_model(config.model, mesh=mesh)
    _, kept = tokenize_records(
        model.tokenizer, records, style=config.prompt_style, length=config.row_length
    )
    if dropped := len(records) - len(kept):
        logging.warning(
            "%s: %d of %d records have more than %d tokens and are left out",
            config.data,
            dropped,
            len(records),
            config.row_length,
        )
    validation: Sequence[Example] = ()
    if held_out:
        validation, _ = tokenize_records(
            model.tokenizer, held_out, style=config.prompt_style, length=config.row_length
        )
    params, base = split(model.params, model.config, config.lora, config.seed, mesh)
    attention = choose(config.attention, model.config, config.dtype, mesh)
    loss_fn = bind(sft_loss, dtype=config.dtype, remat=config.remat, attention=attention)
    stream = example_stream(
        model.tokenizer,
        kept,
        style=config.prompt_style,
        length=config.row_length,
        seed=config.seed,
        rename_share=config.rename_share,
        keep=template_words(kept, config.prompt_style) if config.rename_share else frozenset(),
    )

    def batches_from(cursor: int) -> tuple[list[Batch], int]:
        return next_batches(
            stream,
            cursor,
            batch_size=config.batch_size,
            rows=config.rows,
            length=config.row_length,
        )

    def validate(state: TrainState) -> float:
        return mean_loss(state, base, validation, config, model.config, loss_fn, mesh)

    fit(
        config,
        run,
        output,
        dataclasses.replace(model, params=params),
        base,
        loss_fn=loss_fn,
        batches_from=batches_from,
        epoch=len(kept),
        validate=validate if validation else None,
        mesh=mesh,
    )


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
    """The loop of every run over a fixed set of examples: updates, metrics, checkpoints, the model.

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
    with progress(phase.upper(), total=total, initial=step) as bar:
        while step < total:
            began = time.monotonic()
            batches, cursor = batches_from(cursor)
            processes.meet(f"update {step + 1}", config.mesh.wait_seconds)
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
            stats["time/step"] = time.monotonic() - began
            if validate is not None and (step % config.validate_every == 0 or step == total):
                stats["validation/loss"] = validate(state)
            run.metrics(step, phase, **stats)
            bar.update(loss=stats["loss"])
            error = check_updates(stats, config.optimizer)
            if step % config.checkpoint_every == 0 or step == total or error:
                checkpoints.save(step, state, {"cursor": cursor})
            if error:
                raise error
    checkpoints.close()
    save_trained(model, state.params, base, config.model, output)


def _resume(
    config: FitConfig, run: RunDir, params: Params, phase: str
) -> tuple[TrainState, int, Checkpoints]:
    state = init_state(params, config.optimizer)
    checkpoints = Checkpoints(run.checkpoints / phase)
    step = checkpoints.latest()
    if step is None:
        run.rewind(phase, 0)
        return state, 0, checkpoints
    state, extra = checkpoints.restore(step, state)
    run.rewind(phase, step)
    return state, int(extra["cursor"]), checkpoints


def mean_loss(
    state: TrainState,
    base: LoraBase | None,
    examples: Sequence[Example],
    config: SFTConfig,
    model: ModelConfig,
    loss_fn: Any,
    mesh: jax.sharding.Mesh | None = None,
) -> float:
    """Mean loss over the policy's tokens of all examples."""
    total, count = jnp.zeros(()), 0.0
    for batch in split_rows(pack(examples, config.row_length), config.rows):
        placed = put_batch(batch, mesh)
        total = _add_loss(total, state.params, base, placed, loss_fn=loss_fn, model=model)
        count += float(np.sum(batch.mask))
    return float(total) / max(count, 1.0)


@functools.partial(jax.jit, static_argnames=("loss_fn", "model"))
def _add_loss(
    total: jax.Array,
    params: Params,
    base: LoraBase | None,
    batch: Batch,
    *,
    loss_fn: Any,
    model: ModelConfig,
) -> jax.Array:
    return total + loss_fn(attach(base, params), model, batch)[0]
