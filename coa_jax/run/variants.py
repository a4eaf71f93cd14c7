"""Variants of a config file: sizes of the model, machines, and a small variant for debugging."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from coa_jax.errors import UserError
from coa_jax.run.command import load_config
from coa_jax.run.machines import MACHINES

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
"""For each stage, the settings that the variant ``debug`` takes from ``configs/STAGE/tiny.py``."""

SMALL = ("", "debug")
"""Names of a config's sizes: "" as in the Chain-of-Agents paper, ``debug`` for a small run."""


def parse_variants(argument: str | None, *groups: Sequence[str]) -> tuple[str, ...]:
    """Parses the names after the colon of ``--config=FILE.py:7b,debug``.

    Args:
        argument: names in any order, separated by commas; None for no names.
        groups: groups of alternative names. The first name of a group is its default; it may be "".

    Returns:
        For each group, the name that the argument contains, or else the default.

    Raises:
        UserError: a name is unknown, or two names of a group are given.
    """
    names = [name.strip() for name in (argument or "").split(",") if name.strip()]
    variants = [name for group in groups for name in group if name]
    for name in names:
        if name not in variants:
            raise UserError(
                f"--config: there is no variant {name!r}; known are {', '.join(variants)}"
            )
    chosen = []
    for group in groups:
        selected = [name for name in group if name in names]
        if len(selected) > 1:
            raise UserError(f"--config: give one of {', '.join(selected)}, not both")
        chosen.append(selected[0] if selected else group[0])
    return tuple(chosen)


def parse_variant(argument: str | None, sizes: Sequence[str] = ("",)) -> tuple[str, bool]:
    """Parses the names after the colon of ``--config=FILE.py:SIZE,debug``; both are optional.

    Returns:
        The size, by default the first of ``sizes``; and whether the argument contains ``debug``.
    """
    size, debug = parse_variants(argument, sizes, SMALL)
    return size, bool(debug)


def on_machine(config: ConfigDict, stage: str, size: str, machine: str) -> ConfigDict:
    """Adapts a config that was written for a TPU pod to a small machine.

    The function changes the lengths, the mesh and the memory settings.

    Args:
        config: a config for a TPU pod, which is changed in place.
        stage: ``sft`` or ``rl``.
        size: size of the model, such as ``7b``.
        machine: name of the machine, a key of `MACHINES`.

    Returns:
        The same config.

    Raises:
        UserError: `MACHINES` has no settings for this model, stage and machine.
    """
    fits = MACHINES[machine][stage]
    if size not in fits:
        raise UserError(
            f"--config: there are no settings with which {stage} of {size} fits {machine}; the "
            f"sizes with settings are {', '.join(fits)}"
        )
    fit = fits[size]
    config.row_length, config.remat, config.rows = fit.length, "full", fit.fsdp
    config.mesh.fsdp, config.mesh.tensor, config.lora.rank = fit.fsdp, fit.tensor, fit.lora
    if stage == "rl":
        config.mesh.decode_tensor = fit.decode
        config.engine.max_length = config.rollout.max_tokens = fit.length
    return config


def in_small(config: ConfigDict, stage: str) -> ConfigDict:
    """Changes a config to the model, data and sizes of ``configs/STAGE/tiny.py``, for debugging.

    Args:
        config: a config, which is changed in place.
        stage: ``sft``, ``rl`` or ``evaluate``.

    Returns:
        The same config.
    """
    tiny = load_config(f"configs/{stage}/tiny.py")
    for key in _SMALL[stage]:
        *groups, name = key.split(".")
        source, target = (functools.reduce(operator.getitem, groups, c) for c in (tiny, config))
        target[name] = _copied(source[name])
    return config


def _copied(value: Any) -> Any:
    return ConfigDict(value.to_dict()) if isinstance(value, ConfigDict) else value
