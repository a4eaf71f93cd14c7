"""Variants of a config file: sizes of the model, machines, and a small form for debugging."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from coa_jax.cli import load_config
from coa_jax.errors import UserError

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
"""Settings of a stage that the variant ``debug`` takes from ``configs/STAGE/tiny.py``."""


def parse_machine(argument: str | None, sizes: Sequence[str]) -> tuple[str, str, bool]:
    """Parses a variant with a machine, such as ``7b,v5e-8``.

    Args:
        argument: a size, a machine of `MACHINES` and ``debug``, each optional, with commas between
            them; or None.
        sizes: sizes that the config file has; the first is the default.

    Returns:
        The size, the machine ("" for none), and whether ``debug`` is given.

    Raises:
        UserError: a part of the argument is unknown, or there are two sizes or machines.
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
    """Parses a variant, which follows the colon in ``--config=FILE.py:7b,debug``.

    Args:
        argument: a size and ``debug``, each optional, with a comma between them; or None.
        sizes: sizes that the config file has; the first is the default.

    Returns:
        The size ("" if the file has no sizes), and whether ``debug`` is given.

    Raises:
        UserError: a part of the argument is unknown, or there are two sizes.
    """
    parts = [part for part in (argument or "").split(",") if part]
    chosen = [part for part in parts if part in sizes]
    unknown = [part for part in parts if part not in (*sizes, "debug")]
    if unknown or len(chosen) > 1:
        known = ", ".join((*sizes, "debug"))
        wrong = unknown[0] if unknown else argument
        raise UserError(f"--config: there is no variant {wrong!r}; known are {known}")
    return chosen[0] if chosen else (sizes[0] if sizes else ""), "debug" in parts


MACHINES: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "h100": {
        "sft": {
            "1.5b": {"length": 32_768},
            "4b": {"length": 16_384, "lora": 32},
            "7b": {"length": 8_192, "lora": 32},
        },
        "rl": {
            "1.5b": {"length": 16_384, "slots": 32},
            "4b": {"length": 8_192, "lora": 32, "slots": 16},
        },
    },
    "8xh100": {
        "sft": {
            "1.5b": {"length": 32_768, "fsdp": 8},
            "4b": {"length": 32_768, "fsdp": 8},
            "7b": {"length": 32_768, "fsdp": 4, "tensor": 2},
        },
        "rl": {
            "1.5b": {"length": 32_768, "fsdp": 8, "slots": 16},
            "4b": {"length": 32_768, "fsdp": 8, "slots": 6},
            "7b": {"length": 32_768, "fsdp": 4, "tensor": 2, "slots": 8},
        },
    },
    "v5e-8": {
        "sft": {
            "1.5b": {"length": 16_384, "fsdp": 8},
            "4b": {"length": 8_192, "fsdp": 4, "tensor": 2},
            "7b": {"length": 8_192, "fsdp": 8, "lora": 32},
        },
        "rl": {
            "1.5b": {"length": 16_384, "fsdp": 8, "slots": 8},
            "4b": {"length": 8_192, "fsdp": 4, "tensor": 2, "decode": 4, "slots": 16},
            "7b": {"length": 8_192, "fsdp": 8, "lora": 32, "decode": 4, "slots": 16},
        },
    },
    "v6e-8": {
        "sft": {
            "1.5b": {"length": 32_768, "fsdp": 8},
            "4b": {"length": 16_384, "fsdp": 8},
            "7b": {"length": 16_384, "fsdp": 4, "tensor": 2},
        },
        "rl": {
            "1.5b": {"length": 32_768, "fsdp": 8, "slots": 8},
            "4b": {"length": 16_384, "fsdp": 8, "decode": 4, "slots": 16},
            "7b": {"length": 16_384, "fsdp": 4, "tensor": 2, "decode": 4, "slots": 16},
        },
    },
}
"""Machine -> stage -> size -> settings that fit into its memory (docs/scaling.md): tokens of a row,
sizes of the mesh axes, rank of adapters (0 trains all parameters), and slots and chips of an
engine."""


def on_machine(config: ConfigDict, stage: str, size: str, machine: str) -> ConfigDict:
    """Changes the lengths, mesh and memory settings of a config for a pod to fit a small machine.

    Args:
        config: a config for a pod; changed in place.
        stage: ``sft`` or ``rl``.
        size: size of the model, such as ``7b``.
        machine: key of `MACHINES`.

    Returns:
        The same config.

    Raises:
        UserError: `MACHINES` has no settings for this model, stage and machine.
    """
    known = MACHINES[machine][stage]
    if size not in known:
        raise UserError(
            f"--config: there are no settings with which {stage} of {size} fits {machine}; the "
            f"sizes with settings are {', '.join(known)}"
        )
    fit = known[size]
    config.row_length, config.remat = fit["length"], "full"
    config.rows = fit.get("fsdp", 1)
    config.mesh.fsdp, config.mesh.tensor = fit.get("fsdp", 1), fit.get("tensor", 1)
    config.lora.rank = fit.get("lora", 0)
    if stage == "rl":
        config.mesh.decode_tensor = fit.get("decode", 1)
        config.engine.slots = fit["slots"]
        config.engine.max_length = config.rollout.max_tokens = fit["length"]
    return config


def in_small(config: ConfigDict, stage: str) -> ConfigDict:
    """Changes a config to the model, data and sizes of ``configs/STAGE/tiny.py``, for debugging.

    Args:
        config: a config; changed in place.
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
