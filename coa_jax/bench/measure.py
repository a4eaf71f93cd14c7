"""What all benchmarks share: spreads, counters of the process, the machine's ceilings, results."""

from __future__ import annotations

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

from coa_jax.errors import UserError
from coa_jax.files import write_json
from coa_jax.model.ops import einsum

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest of repeated measurements; not counts to five digits."""
    values = list(values)
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {
        name: value if isinstance(value, int) else float(f"{value:.5g}")
        for name, value in figures.items()
    }


# --- counters of the process ---------------------------------------------------------------


@functools.cache
def _compile_count() -> list[int]:
    """A cell that counts compilations from the first call on; JAX listeners live for ever."""
    cell = [0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        cell[0] += event == _COMPILE_EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    return cell


def compile_count() -> int:
    """Programs that JAX has compiled, or loaded from its cache, since this was first called."""
    return _compile_count()[0]


def reset_peak_memory() -> None:
    """Lets `peak_memory_mb` begin anew, where the kernel can do that (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float:
    """Peak resident memory in 10^6 bytes since `reset_peak_memory`, else since the beginning."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1.024e-3
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1.024e-3


# --- ceilings of the machine ---------------------------------------------------------------


def best_seconds(function: Callable[[], Any], seconds: float = 0.5) -> float:
    """The fastest of several calls after a first one, for about so many seconds.

    The fastest and not the median: a ceiling is what the machine can do when nothing disturbs it.
    """
    jax.block_until_ready(function())
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        began = time.perf_counter()
        jax.block_until_ready(function())
        best = min(best, time.perf_counter() - began)
    return best


def read_bandwidth(megabytes: int = 512) -> float:
    """Bytes a second at which a matrix-vector product reads a float32 matrix.

    Args:
        megabytes: size of the matrix in MiB; it must exceed the caches.
    """
    columns = 4096
    matrix = jnp.ones((megabytes * 2**18 // columns, columns), jnp.float32)
    vector = jnp.ones((columns,), jnp.float32)
    product = jax.jit(lambda m, v: einsum("ij,j->i", m, v, "float32"))
    return matrix.nbytes / best_seconds(lambda: product(matrix, vector))


def peak_flops(dtype: str, size: int = 0) -> float:
    """FLOP/s of a square product, computed as the model's products are.

    Args:
        dtype: of the operands.
        size: rows and columns; 0 for 2048 on a CPU and 8192 on accelerators.
    """
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    x, y = (jax.random.normal(jax.random.key(i), (size, size)).astype(dtype) for i in (0, 1))
    product = jax.jit(lambda x, y: einsum("ij,jk->ik", x, y, dtype))
    return 2 * size**3 / best_seconds(lambda: product(x, y))


# --- results -------------------------------------------------------------------------------


def output_path(out: str | None) -> Path | None:
    """Where the result goes; asked before measuring, since nobody wants to measure twice.

    Raises:
        UserError: a file cannot be made there.
    """
    if out is None:
        return None
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--out={out}: give a file in a directory that exists")
    return path


def report(result: dict[str, Any], path: Path | None) -> None:
    """Prints a result as one line of JSON and writes it to a file if there is one.

    The machine, the version of JAX and the load of the machine are added.
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
