"""Defines the flags of the rollout benchmarks for the workload and the engine's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

from coa_jax.bench.workload import Workload
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError

# --help lists the flags that this module defines under the command that calls the function below.
flags.disclaim_key_flags()


def define_shape_flags() -> None:
    """Defines the command-line flags for the workload, the engine and the number of repetitions."""
    flags.DEFINE_string("workload", None, "JSON file of the workload", required=True)
    flags.DEFINE_integer(
        "slots", 0, "sequences in progress at a time; 0 for min(rollouts, 32)", lower_bound=0
    )
    flags.DEFINE_integer("chunk", 8, "tokens that the device decodes per call", lower_bound=1)
    flags.DEFINE_integer(
        "max_length", 0, "positions per slot; 0 for the longest rollout", lower_bound=0
    )
    flags.DEFINE_multi_integer(
        "extend_buckets", [], "tokens that a prefill program processes (repeatable)", lower_bound=1
    )
    flags.DEFINE_integer(
        "pages", 0, "pages of a KV cache that slots share; 0 for unshared pages", lower_bound=0
    )
    flags.DEFINE_integer(
        "engines", 0, "engines that share the slots; 0 for the platform's default", lower_bound=0
    )
    flags.DEFINE_enum("cache_dtype", "", ["", "float32", "bfloat16", "int8"], "dtype of the cache")
    flags.DEFINE_integer("repeats", 3, "number of measured runs", lower_bound=1)


def given_shapes(values: Any, workload: Workload) -> EngineConfig:
    """Returns the shapes of an engine that the flags of `define_shape_flags` describe.

    Args:
        values: the values of the command-line flags.
        workload: the workload, whose rollouts must fit into a slot.

    Raises:
        UserError: a rollout is longer than ``--max_length``.
    """
    names = ("chunk", "dtype", "max_length", "extend_buckets", "pages", "cache_dtype", "engines")
    chosen = {name: getattr(values, name) for name in names}
    return engine_shapes(workload, slots=values.slots or min(len(workload.scripts), 32), **chosen)


def engine_shapes(
    workload: Workload, *, max_length: int = 0, extend_buckets: Sequence[int] = (), **shapes: Any
) -> EngineConfig:
    """Returns the shapes of an engine for a workload.

    Args:
        workload: the workload, whose rollouts must fit into a slot.
        max_length: number of positions per slot; 0 for the length of the longest rollout, rounded
            up to a multiple of 128.
        extend_buckets: numbers of tokens of the prefill programs, in any order, see `EngineConfig`.
        shapes: other fields of `EngineConfig`.

    Raises:
        UserError: a rollout is longer than ``max_length``.
    """
    max_length = max_length or -(-workload.longest // 128) * 128
    if workload.longest > max_length:
        raise UserError(
            f"the workload has a rollout of {workload.longest} tokens and --max_length is "
            f"{max_length}; raise --max_length, or leave it out"
        )
    buckets = tuple(sorted(extend_buckets))
    return EngineConfig(max_length=max_length, extend_buckets=buckets, **shapes)
