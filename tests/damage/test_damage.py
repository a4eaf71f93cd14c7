"""Damaged models, traces, task files, private tests, ...: one line each, in bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GROWTH_MB = 1500
"""Most that a process may grow: a line of JSON may have 256 MiB, and is held twice."""


def fuzz(folder: Path, first: int, count: int) -> dict:
    """Reads damaged samples in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.damage.fuzz", str(folder), "all", str(first), str(count)],
        cwd=REPOSITORY, capture_output=True, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]  # not killed by a signal either
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(1000, 2000, marks=pytest.mark.slow)]
)
def test_damage_ends_in_one_line_within_bounds(tmp_path, first, count):
    found = fuzz(tmp_path, first, count)
    assert found["faults"] == []
    assert found["refused"] > count / 2  # most of the damage does matter
    assert found["grown_mb"] < GROWTH_MB
