"""Writes a checkpoint as a Hugging Face directory.

    coa-jax export --workdir=runs/rl --output=exported
    coa-jax export --workdir=runs/quickstart --phase=rl --step=16 --output=exported
    coa-jax export --workdir=runs/rl --best --output=exported
    coa-jax export --workdir=gs://bucket/runs/rl --push=Org/Name

The run may still be in progress. transformers, vLLM and ``coa_jax`` can load the exported
directory. Architecture and tokenizer come from the model with which the run started. The
file ``agent.json`` next to the weights holds the prompt and the protocol of the training, which
``ask`` and ``serve`` use. The tensors are bfloat16 by default; ``--dtype=float32`` keeps every bit
of the trained parameters in twice the bytes.

``--best`` selects the checkpoint with the best value of the metric that the run's setting
``keep_best`` names. If the metric is RL's ``reward/mean``, the samples of a step were drawn before
the updates of the step, but the exported policy includes these updates.

The directory has a model card (`coa_jax.model.hub_card`). ``--push`` uploads the directory to the
Hugging Face Hub; ``--output`` is then optional.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

from coa_jax import storage
from coa_jax.config.renamed import with_present_keys
from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.model.api import Model, describe_model, load_weights, save_model
from coa_jax.model.card import CARD, read_card
from coa_jax.model.config import LoraConfig
from coa_jax.model.hub_card import hub_card
from coa_jax.parallel.config import MeshConfig
from coa_jax.parallel.mesh import make_mesh
from coa_jax.parallel.placement import training_mesh
from coa_jax.protocol import find_protocols, write_protocols
from coa_jax.run.command import run_main, workdir_flag
from coa_jax.run.settings import build_config
from coa_jax.storage.checkpoint_folders import checkpoints_of
from coa_jax.storage.mirror import NAMES_ONLY
from coa_jax.train.checkpoint import Checkpoints, Damaged
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import run_state

PHASES = ("rl", "sft", "rft", "dpo")

_SKIPPED = (*NAMES_ONLY, "traces.jsonl", "metrics.jsonl", "steps.jsonl", "spool", "evaluations")


def export(
    workdir: Path,
    output: Path,
    phase: str = "",
    step: int | None = None,
    dtype: str = "bfloat16",
    best: bool = False,
) -> tuple[str, int]:
    """Writes the parameters of a checkpoint to ``output``.

    Args:
        workdir: directory of a training run.
        output: directory to create. If the export fails, the directory is not created.
        phase: kind of training, one of `PHASES`, such as ``sft``; "" if the run has only one.
        step: step of the checkpoint; None for the newest checkpoint.
        dtype: dtype of the saved tensors.
        best: whether to export the checkpoint that is best by the metric in the setting
            ``keep_best``, instead of the newest checkpoint.

    Returns:
        The phase and the step of the exported checkpoint.

    Raises:
        UserError: the run or the checkpoint does not exist, ``output`` exists already, or a file
            cannot be read or written.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError(f"--output={output} exists already: choose another directory")
    phase = phase or _only_phase(workdir)
    directory = checkpoints_of(workdir) / phase
    if not directory.is_dir():
        raise UserError(f"{directory} does not exist: the run has no checkpoint of that phase yet")
    settings = with_present_keys(durable.read_json_object(workdir / "config.json"))
    config = _phase_config(settings, phase, workdir)
    metric = config.get("keep_best", "") if best else ""
    checkpoints = Checkpoints(directory, best=metric, read_only=True)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{directory} contains no checkpoint yet: wait for one, or train further")
    if best:
        step = checkpoints.best()
        if step is None:
            raise UserError(f"{directory} has no checkpoint by keep_best={metric!r}; give --step")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{directory} contains no checkpoint {step}: the newest is {steps[-1]}")
    mesh = build_config(MeshConfig, config.get("mesh", {}), "config.mesh")
    model = _restored(checkpoints, step, config, _mesh(mesh))
    card = workdir / f"{phase}-{CARD}"
    model_card = durable.read_json_object(card) if card.is_file() else read_card(config["model"])
    model = model.replace(card=model_card)
    save_model(model, output, dtype=dtype)
    find_protocols(workdir)
    write_protocols(output)
    text = hub_card(storage.origin_of(config["model"]), phase, step, config, model_card)
    durable.replace(output / "README.md", text.encode())
    return phase, step


def _mesh(sizes: MeshConfig) -> jax.sharding.Mesh | None:
    """Returns the mesh of the run, or a mesh of all devices if the run used more of them."""
    if jax.device_count() == 1:
        return None
    try:
        return training_mesh(sizes)
    except UserError:  # the run used more devices
        return make_mesh(fsdp=-1)


def _restored(
    checkpoints: Checkpoints, step: int, config: Mapping[str, Any], mesh: jax.sharding.Mesh | None
) -> Model:
    """Returns the model of a checkpoint, with its adapters."""
    optimizer = build_config(OptimizerConfig, config["optimizer"], "config.optimizer")
    lora = build_config(LoraConfig, config.get("lora", {}), "config.lora")
    described = describe_model(config["model"])
    model = dataclasses.replace(described.config, lora=lora)
    state = run_state(model, optimizer, mesh)
    if lora.rank:
        state = state._replace(frozen=load_weights(config["model"], mesh))
    try:
        restored = checkpoints.restore(step, state)
    except Damaged as error:
        checkpoint = f"{checkpoints.directory}: checkpoint {step}"
        raise UserError(f"{checkpoint} is damaged ({error}); choose another --step") from error
    finally:
        checkpoints.close()
    return Model(model, restored.state.all_params, described.tokenizer)


def _only_phase(workdir: Path) -> str:
    if not workdir.is_dir():
        raise UserError(f"--workdir={workdir} does not exist: name the directory of a run")
    phases = [phase for phase in PHASES if (checkpoints_of(workdir) / phase).is_dir()]
    if not phases:
        raise UserError(f"{workdir} has no checkpoints: name the directory of a training run")
    if len(phases) > 1:
        raise UserError(f"{workdir} has checkpoints of {' and '.join(phases)}: choose with --phase")
    return phases[0]


def _phase_config(config: Mapping[str, Any], phase: str, workdir: Path) -> Mapping[str, Any]:
    """Returns the settings of the phase; a quickstart has them in a group with the phase's name."""
    if "optimizer" in config and "model" in config:
        return config
    if "optimizer" in config.get(phase, {}):
        start = "base" if phase == "sft" else "sft"
        return {**config[phase], "model": str(workdir / "models" / start)}
    raise UserError(f"{workdir}/config.json names no model and optimizer: this is no training run")


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax export``."""
    workdir_flag("directory of the run")
    flags.DEFINE_string("output", None, "directory to write, a local path or a URL")
    flags.DEFINE_string("push", "", "Org/Name of the Hub model to which the files are uploaded")
    flags.DEFINE_enum("phase", None, PHASES, "phase of the checkpoint, if the run has several")
    flags.DEFINE_integer("step", None, "step of the checkpoint (default: the newest)")
    flags.DEFINE_bool("best", False, "export the best checkpoint by keep_best")
    flags.DEFINE_enum(
        "dtype", "bfloat16", ["bfloat16", "float32", "float16"], "dtype of the saved tensors"
    )


def main(_: list[str]) -> None:
    """Runs ``coa-jax export``: exports a checkpoint."""
    values = flags.FLAGS
    if values.best and values.step is not None:
        raise UserError("--best and --step both choose a checkpoint: give one of them")
    if not (values.output or values.push):
        raise UserError("give --output, a directory to write, or --push with a name on the Hub")
    if values.push:
        storage.check_push(values.push)
    if storage.is_url(values.output or "") and storage.exists(values.output):
        raise UserError(f"--output={values.output} exists already: choose another directory")
    with contextlib.ExitStack() as stack:
        # The export of a run in a bucket needs neither its trajectories nor its metrics.
        workdir = stack.enter_context(storage.visited(values.workdir, _SKIPPED))
        if values.output:
            output = stack.enter_context(storage.output(values.output))
        else:
            output = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        choice = values.phase or "", values.step, values.dtype, values.best
        phase, step = export(workdir, output, *choice)
        if values.push:
            label = f"{phase} step {step}"
            print(f"{label} -> {storage.push_model(output, values.push, label)}")
    if values.output:
        print(f"{phase} step {step} -> {values.output}")


if __name__ == "__main__":
    run_main(main, define_flags)
