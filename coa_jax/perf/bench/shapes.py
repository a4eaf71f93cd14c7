"""The flags of the benchmarks that run a workload on engines, and the shapes of these engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.perf.bench.measure import given, output_path, report
from coa_jax.perf.bench.models import Subject, define_model_flags, load_subject
from coa_jax.perf.bench.workload import Workload, read_workload

# --help lists the flags that this module defines under the command that calls the function below.
flags.disclaim_key_flags()


def define_flags() -> None:
    """Defines the flags that benchmarks of a workload on engines have in common."""
    define_model_flags()
    flags.DEFINE_string("workload", None, "JSON file of the workload", required=True)
    flags.DEFINE_integer("chunk", 8, "tokens that the device decodes per call", lower_bound=1)
    flags.DEFINE_multi_integer(
        "extend_buckets", [], "tokens that a prefill program processes (repeatable)", lower_bound=1
    )
    for name, about in (
        ("slots", "sequences in progress at a time; 0 for min(rollouts, 32)"),
        ("max_length", "positions per slot; 0 for the longest rollout"),
        ("pages", "pages of a KV cache that slots share; 0 for unshared pages"),
        ("engines", "engines that share the slots; 0 for the platform's default"),
    ):
        flags.DEFINE_integer(name, 0, about, lower_bound=0)
    flags.DEFINE_enum("cache_dtype", "", ["", "float32", "bfloat16", "int8"], "dtype of the cache")
    flags.DEFINE_integer("repeats", 3, "number of measured runs", lower_bound=1)


def run_command(
    measure: Callable[[Subject, Workload, EngineConfig], dict[str, Any]], dtype: str
) -> None:
    """Loads the model and the workload that the flags name, and reports the measurement.

    Args:
        measure: function that measures a workload, and returns the result.
        dtype: dtype of the parameters.

    Raises:
        UserError: the model or the workload cannot be read, or does not fit the other flags.
    """
    values = flags.FLAGS
    out = output_path(values.out)
    subject = load_subject(values.model, values.random, dtype)
    workload = read_workload(values.workload, subject.config.vocab_size)
    names = ("chunk", "dtype", "max_length", "extend_buckets", "pages", "cache_dtype", "engines")
    shapes = engine_shapes(
        workload,
        slots=values.slots or min(len(workload.scripts), 32),
        **given(names),
    )
    report(measure(subject, workload, shapes), out)


def engine_shapes(
    workload: Workload, *, max_length: int = 0, extend_buckets: Sequence[int] = (), **shapes: Any
) -> EngineConfig:
    """Returns the shapes of an engine for a workload.

    Args:
        workload: the workload, whose rollouts must fit into a slot.
        max_length: number of positions per slot; 0 for the length of the longest rollout, rounded
            up to a multiple of 128.
        extend_buckets: sizes, in tokens and in any order, of the programs that prefill prompts and
            observations, see `EngineConfig`.
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
