"""Kills a command once its output file has grown."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def kill_when(command: Sequence[str], folder: Path, file: Path, lines: int) -> int:
    """Starts a command, kills it (-9) when a file has more than so many lines.

    Args:
        command: the program and its arguments.
        folder: where it is run.
        file: that it appends to; need not be there yet.
        lines: whole lines.

    Returns:
        The whole lines that the file was left with.
    """
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while lines_of(file) <= lines:
            assert process.poll() is None, f"ended with {process.returncode} by itself"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return lines_of(file)


def lines_of(file: Path) -> int:
    """Whole lines of a file; 0 where it is not."""
    return file.read_bytes().count(b"\n") if file.exists() else 0
