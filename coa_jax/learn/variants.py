"""The forms that a config file has: sizes of the model, and the same settings in small."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from coa_jax.cli import load_config
from coa_jax.errors import UserError
from coa_jax.learn.machines import MACHINES

_SMALL: Mapping[str, Sequence[str]] = {
    "sft": (
        "model", "data", "validation", "batch_size", "rows", "row_length", "validate_every",
        "checkpoint_every", "optimizer.total_steps", "optimizer.warmup_steps", "mesh",
    ),
    "rl": (
        "model", "tasks", "task_options", "mixture", "num_tasks", "groups", "group_size",
        "max_sampled", "mini_batch", "epochs", "rows", "row_length", "checkpoint_every",
        "optimizer.total_steps", "optimizer.warmup_steps", "engine", "rollout.max_tokens",
        "rollout.max_turn_tokens", "rollout.max_tool_calls", "rollout.max_observation_tokens",
        "rollout.prompt_style", "mesh",
    ),
    "evaluate": (
        "model", "num_tasks", "samples", "engine", "rollout.max_tokens", "rollout.max_turn_tokens",
        "rollout.max_tool_calls", "rollout.max_observation_tokens", "rollout.prompt_style",
    ),
}  # fmt: skip
"""Settings of a stage that make it large."""


def parse_machine(argument: str | None, sizes: Sequence[str]) -> tuple[str, str, bool]:
    """Reads ``7b,v5e-8``: a size, a machine of `MACHINES` ("" where none is given), and ``debug``.

    Raises:
        UserError: see `parse_variant`; or there are two machines.
    """
    parts = (argument or "").split(",")
    machines = [part for part in parts if part in MACHINES]
    if len(machines) > 1:
        raise UserError(f"--config: give one machine, not {' and '.join(machines)}")
    rest = ",".join(part for part in parts if part not in MACHINES)
    try:
        size, debug = parse_variant(rest, sizes)
    except UserError as error:
        raise UserError(f"{error}, and of machines {', '.join(MACHINES)}") from error
    return size, "".join(machines), debug


def parse_variant(argument: str | None, sizes: Sequence[str] = ()) -> tuple[str, bool]:
    """Reads what stands behind the colon of ``--config=FILE.py:7b,debug``.

    Args:
        argument: a size, ``debug``, both with a comma between, or None.
        sizes: that the file has; the first is taken where none is given.

    Returns:
        The size (empty where the file has none), and whether the small form is wanted.

    Raises:
        UserError: it is something else.
    """
    parts = [part for part in (argument or "").split(",") if part]
    chosen = [part for part in parts if part in sizes]
    unknown = [part for part in parts if part not in (*sizes, "debug")]
    if unknown or len(chosen) > 1:
        known = ", ".join((*sizes, "debug"))
        wrong = unknown[0] if unknown else argument
        raise UserError(f"--config: there is no variant {wrong!r}; known are {known}")
    return chosen[0] if chosen else (sizes[0] if sizes else ""), "debug" in parts


def on_machine(config: ConfigDict, stage: str, size: str, machine: str) -> ConfigDict:
    """A configuration with sizes that fit a small machine; all else is kept.

    Args:
        config: of a pod.
        stage: ``sft`` or ``rl``.
        size: of the model.
        machine: key of `MACHINES`.

    Raises:
        UserError: the model does not fit on the machine, in this stage.
    """
    known = MACHINES[machine][stage]
    if size not in known:
        raise UserError(
            f"--config: no settings are known by which {stage} of {size} fits {machine}; there are "
            f"those of {', '.join(known)}"
        )
    fit = known[size]
    config.row_length, config.remat, config.rows = fit.length, "full", fit.fsdp
    config.mesh.fsdp, config.mesh.tensor, config.lora.rank = fit.fsdp, fit.tensor, fit.lora
    if stage == "rl":
        config.mesh.decode_tensor, config.engine.slots = fit.decode, fit.slots
        config.engine.max_length = config.rollout.max_tokens = fit.length
    return config


def in_small(config: ConfigDict, stage: str) -> ConfigDict:
    """A configuration with the sizes of ``configs/STAGE/tiny.py``; all else is kept."""
    tiny = load_config(f"configs/{stage}/tiny.py")
    for key in _SMALL[stage]:
        *groups, name = key.split(".")
        source, target = (functools.reduce(operator.getitem, groups, c) for c in (tiny, config))
        target[name] = _copied(source[name])
    return config


def _copied(value: Any) -> Any:
    return ConfigDict(value.to_dict()) if isinstance(value, ConfigDict) else value
