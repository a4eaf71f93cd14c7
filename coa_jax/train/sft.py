"""Observation-masked supervised fine-tuning on distilled trajectories.

The method is that of §3.1 of the Chain-of-Agents paper.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines
from coa_jax.evaluation.held_out import HeldOut, held_out_tasks
from coa_jax.model.api import Model, describe_model, download_once, load_weights
from coa_jax.model.card import CARD
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params
from coa_jax.model.tokenizer import eos_ids
from coa_jax.parallel.placement import own_rows, put_batch, training_mesh
from coa_jax.protocol import Prompt
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.rollout.environments.base import EnvironmentConfig
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import Graders
from coa_jax.tasks.prompts import Wording, load_prompt, make_card, warn_of_prompts
from coa_jax.tools.base import Tool
from coa_jax.train import data
from coa_jax.train.batch import Batch, first_fit
from coa_jax.train.config import SFTConfig
from coa_jax.train.defaults import completed
from coa_jax.train.fit import fit
from coa_jax.train.lengths import fitting, read_parts
from coa_jax.train.losses import Net, SFTLoss
from coa_jax.train.step import TrainState


def train(
    config: SFTConfig,
    run: RunDir,
    output: Path,
    augmentation: data.Augmentation | None = None,
    tools: Sequence[Tool] = (),
) -> None:
    """Fine-tunes a model, and writes the result as a Hugging Face directory to ``output``.

    If the run directory contains an interrupted run, the run resumes from its newest checkpoint.
    The resumed run ends with the same parameters as a run without the interruption.

    Args:
        config: settings of the run.
        run: directory of the run, for metrics and checkpoints.
        output: directory for the trained model.
        augmentation: creates the function that changes records at random, see `data.Augmentation`.
            If ``config.rename_share`` is above 0, give ``renaming(config.rename_share)``, see
            `train.renaming`. With None, the records stay unchanged.
        tools: live tools that the policy can call in evaluations.

    Raises:
        UserError: the records, the model and the settings do not fit together.
        ValueError: ``rename_share`` is set without an augmentation.
    """
    if config.rename_share and augmentation is None:
        raise ValueError("rename_share needs an augmentation that renames")
    download_once(config.model)
    prompt = load_prompt(config.prompt_style, config.model)
    model = describe_model(config.model, config.lora)

    paths = [*config.parts, *([config.validation] if config.validation else [])]
    readers, counts = read_parts(config, model.tokenizer, prompt, paths)
    lengths = counts[: len(config.parts)]
    wording = sum((part.wording for part in lengths), Wording())
    warn_of_prompts(wording, prompt, "records", "config.prompt_style")
    longest = max(int(each.sizes.max(initial=1)) for each in counts)
    length = config.row_length or longest
    parts = [fitting(*read, length) for read in zip(readers, counts, strict=True)]
    validation = parts.pop() if config.validation else None
    examples = data.join(parts)
    config = completed(config, model.config, longest, len(examples), run=run.path)
    mesh = training_mesh(config.mesh, config.rows)
    card = make_card(prompt, wording)
    run.keep_json(f"sft-{CARD}", card)
    model = model.replace(card=card)
    compute = config.compute(model.config, mesh)
    change = None
    if augmentation is not None:
        pairs = zip(readers, parts, strict=False)  # without the validation records
        trained = [part.record(row) for part, its in pairs for row in its.indices.tolist()]
        change = augmentation(model.tokenizer, trained, prompt)

    def validate(state: TrainState) -> float:
        assert validation is not None
        return mean_loss(state, validation, config, model.config, compute)

    held_out = _held_out(config, run, prompt, tools) if config.evaluate_every else None
    protocols = [task.protocol for task in held_out.tasks] if held_out else []

    fit(
        config,
        run,
        output,
        model,
        weights=functools.partial(load_weights, config.model, mesh, config.loaded_dtype),
        loss=SFTLoss(),
        compute=compute,
        updates=functools.partial(
            data.Updates,
            examples=examples,
            order=data.shuffled([*map(len, parts)], config.weights or (1.0,), config.seed),
            own=own_rows(mesh, config.rows),
            change=change,
        ),
        epoch=len(examples),
        longest=max(int(part.sizes.max()) for part in (examples, validation) if part),
        validate=validate if config.validation else None,
        held_out=held_out,
        evaluate_every=config.evaluate_every,
        engines=lambda state: _engines(config, model, state, protocols),
    )


def _held_out(config: SFTConfig, run: RunDir, prompt: Prompt, tools: Sequence[Tool]) -> HeldOut:
    rollout = dataclasses.replace(
        config.rollout,
        prompt_style=config.prompt_style,
        level=config.level,
        format=config.format,
    )
    tasks = held_out_tasks(config.held_out, rollout, EnvironmentConfig())
    warn_of_prompts(tasks, prompt, "tasks", "config.prompt_style")
    return HeldOut(
        config=config.held_out,
        tasks=tasks,
        folder=run.path / "evaluations",
        phase="sft",
        rollout=rollout,
        graders=Graders(config.graders),
        prompt=prompt,
        tools=tools,
        wait_seconds=config.mesh.wait_seconds,
    )


def _engines(
    config: SFTConfig, model: Model, state: TrainState, protocols: Sequence[str]
) -> list[Engine]:
    """Creates engines with the current parameters, for a single evaluation."""
    tokenizer = model.tokenizer
    engines: list[Engine] = make_engines(
        state.all_params,
        model.config,
        config.engine,
        eos_ids(tokenizer),
        constraint_or_ends(config.rollout, tokenizer, model.config.vocab_size, protocols),
        config.mesh.decode_tensor,
    )
    for engine in engines if config.rollout.max_seconds else ():
        engine.warm_up()  # so that compilation does not count against `max_seconds`
    return engines


def mean_loss(
    state: TrainState,
    examples: data.Examples,
    config: SFTConfig,
    model_config: ModelConfig,
    compute: Compute,
) -> float:
    """Computes the mean loss over the policy's tokens of all examples.

    Args:
        state: state of the run, whose model is measured.
        examples: examples of at most ``config.row_length`` tokens.
        config: settings of the run.
        model_config: architecture of the model.
        compute: dtype, operations and sharding of the computation.
    """
    rows, length = config.rows, config.row_length
    own, layout = own_rows(compute.mesh, rows), first_fit(examples.sizes, length)
    batches = data.MicroBatches(layout, examples.__getitem__, rows, length, own)
    total = jnp.zeros(())
    with data.read_ahead(batches, workers=0) as ahead:
        for batch in ahead:
            placed = put_batch(batch, compute.mesh, rows)
            total += _loss(state.all_params, placed, model_config=model_config, compute=compute)
    return float(total) / max(float(examples.losses.sum()), 1.0)


@functools.partial(jax.jit, static_argnames=("model_config", "compute"))
def _loss(
    params: Params, batch: Batch, *, model_config: ModelConfig, compute: Compute
) -> jax.Array:
    return SFTLoss()(params, batch, Net({}, model_config, compute))[0]
