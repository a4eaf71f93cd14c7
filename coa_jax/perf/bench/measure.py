"""Common parts of the benchmarks: statistics, process counters, peak rates, and results."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from coa_jax.errors import UserError
from coa_jax.files.durable import write_json
from coa_jax.model.ops import einsum


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns the median, minimum and maximum of repeated measurements, rounded to five digits."""
    values = list(values)
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {
        name: value if isinstance(value, int) else float(f"{value:.5g}")
        for name, value in figures.items()
    }


# --- counters of the process ---------------------------------------------------------------


@functools.cache
def _events() -> collections.Counter[str]:
    """Counts the events that JAX times, with one listener, because JAX cannot remove listeners."""
    counts: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts


def compile_count() -> int:
    """Returns the number of programs that JAX compiled or loaded from its compilation cache.

    The count begins at the first call of this function in the process.
    """
    return _events()["/jax/core/compile/backend_compile_duration"]


def reset_peak_memory() -> None:
    """Resets the peak that `peak_memory_mb` returns, where this is supported (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float:
    """Returns the peak resident memory, in 10^6 bytes.

    The peak is measured from the last call of `reset_peak_memory` on; without such a call, from the
    start of the process.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1.024e-3
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1.024e-3


def after_warm_up() -> Callable[[], dict[str, float]]:
    """Begins to measure compilations and memory; to be called when all programs are compiled.

    Returns:
        A function that returns, by name, the number of compilations and the peak memory since the
        call of `after_warm_up`.
    """
    reset_peak_memory()
    compiled = compile_count()
    return lambda: {
        "compiles_after_warmup": compile_count() - compiled,
        "peak_rss_mb": round(peak_memory_mb(), 1),
    }


# --- ceilings of the machine ---------------------------------------------------------------


def best_seconds(function: Callable[[], Any], seconds: float = 0.5) -> float:
    """Returns the time of the fastest of several calls, after one call that is not timed.

    The minimum is used rather than the median, because other programs on the machine can only make
    a call slower.

    Args:
        function: function to time; the time includes waiting for its result.
        seconds: approximate total time of the timed calls.
    """
    jax.block_until_ready(function())
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        began = time.perf_counter()
        jax.block_until_ready(function())
        best = min(best, time.perf_counter() - began)
    return best


def read_bandwidth(megabytes: int = 512) -> float:
    """Measures the memory bandwidth, in bytes per second, of a matrix-vector product in float32.

    Args:
        megabytes: size of the matrix in MiB, which must be larger than the processor's caches.
    """
    columns = 4096
    matrix = jnp.ones((megabytes * 2**18 // columns, columns), jnp.float32)
    vector = jnp.ones((columns,), jnp.float32)
    product = jax.jit(lambda m, v: einsum("ij,j->i", m, v, "float32"))
    return matrix.nbytes / best_seconds(lambda: product(matrix, vector))


def peak_flops(dtype: str, size: int = 0) -> float:
    """Measures the FLOP/s of a square matmul, which is computed like the matmuls of the model.

    Args:
        dtype: dtype of the operands.
        size: number of rows and columns; 0 for 2048 on a CPU, and 8192 on accelerators.
    """
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    x, y = (jax.random.normal(jax.random.key(i), (size, size)).astype(dtype) for i in (0, 1))
    product = jax.jit(lambda x, y: einsum("ij,jk->ik", x, y, dtype))
    return 2 * size**3 / best_seconds(lambda: product(x, y))


# --- results -------------------------------------------------------------------------------


def output_path(out: str | None) -> Path | None:
    """Checks the output path before a long measurement; returns None if there is no path.

    Raises:
        UserError: the path is a directory, or its parent directory does not exist.
    """
    if out is None:
        return None
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--out={out}: give a file in an existing directory")
    return path


def report(result: dict[str, Any], path: Path | None) -> None:
    """Prints a result as one line of JSON, and writes it to ``path`` unless ``path`` is None.

    Before that, the function adds the device, the number of cores, the load average and the version
    of JAX to the result.
    """
    device = jax.devices()[0]
    result |= {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load1": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
    }
    print(json.dumps(result), flush=True)
    if path is not None:
        write_json(path, result)


def given(names: Iterable[str]) -> dict[str, Any]:
    """Returns the values of those command-line flags that ``names`` lists, by name."""
    return {name: getattr(flags.FLAGS, name) for name in names}
