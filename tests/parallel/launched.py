"""Starts a program as several processes, as launch/local_processes.sh does it for a user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch_function(
    function: Callable[[str], None], argument: Path, devices: int = 1
) -> subprocess.CompletedProcess[str]:
    """Calls a function of a test module, with a path as text, in each of two processes."""
    module, name = function.__module__, function.__name__
    code = (
        "from coa_jax.run.command import run_main\n"
        "def main(argv):\n"
        f"    from {module} import {name}\n"
        f"    {name}({str(argument)!r})\n"
        "run_main(main)"
    )
    return launch(2, devices, "-c", code, timeout=240)


def launch(
    count: int, devices: int, *command: str, timeout: float = 300, grace: int = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python COMMAND...`` as ``count`` processes of ``devices`` simulated devices each.

    When one fails, the others have ``grace`` seconds to end by themselves.
    """
    return subprocess.run(
        [
            *("bash", str(ROOT / "launch" / "local_processes.sh"), str(count)),
            *("--devices", str(devices), "--grace", str(grace), sys.executable, *command),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
