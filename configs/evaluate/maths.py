r"""Evaluates the paper's code agent on AIME, AMC, MATH500 or OlympiadBench.

    coa-jax evaluate --config=configs/evaluate/maths.py:aime24 --workdir=runs/aime24

Variants: the argument names a benchmark, ``aime24`` (default), ``aime25``, ``amc23``, ``math500``
or ``olympiad``, and a size, ``7b`` (default) or ``32b``, for example ``maths.py:math500,32b``. The
sizes differ in temperature. ``maths.py:aime24,debug`` scales the config down, see
configs/evaluate/tiny.py.
Needs: a policy of configs/rl/code.py, or any served policy: ``--config.endpoint.url=http://.../v1
--config.endpoint.model=NAME``; the questions (docs/benchmarks.md says where from) in /mnt/data or
by ``--config.tasks=aime:PATH``; the sandbox for programs; the extra ``maths``.
Takes: unknown: nobody has run this size yet.
Gives: avg@16 for AIME and AMC, and pass@1 for the other benchmarks, with the error and by level and
topic; a majority vote; and costs.

From the paper (§4.2) and its script: as configs/evaluate/code.py, but with 16 samples for AIME and
AMC.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.command import load_config
from coa_jax.run.variants import SMALL, parse_variants

FILES = {  # file of the release, samples, name of the benchmark
    "aime24": ("aime24.parquet", 16, "aime"),
    "aime25": ("aime25.parquet", 16, "aime"),
    "amc23": ("amc23.parquet", 16, "amc"),
    "math500": ("math500.parquet", 1, "math500"),
    "olympiad": ("OlympiadBench.parquet", 1, "olympiadbench"),
}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration for a benchmark and a size."""
    name, size, debug = parse_variants(arg, tuple(FILES), ("7b", "32b"), SMALL)
    config = load_config(f"configs/evaluate/code.py:{size},{debug}")
    file, samples, benchmark = FILES[name]
    config.tasks, config.stage = f"/mnt/data/{file}", name
    if debug:
        config.tasks = f"{benchmark}:runs/debug/benchmarks/{benchmark}.jsonl"
    else:
        config.samples = samples
    config.graders.private_tests = ""
    return config
