"""Runs a program on simulated devices, of which a process has one number for its lifetime."""

from __future__ import annotations

import os
from pathlib import Path

from tests import forked


def on_devices(count: int, *command: str, optimized: bool = False) -> list[str]:
    """Lines that ``python COMMAND...`` prints on ``count`` devices.

    ``optimized`` compiles its programs as a user's run does.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if optimized:
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}"
    done = forked.run(command, Path(__file__).parents[1], environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
