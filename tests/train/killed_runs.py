"""Kills the runs of `tests.train.tiny_runs` at random moments."""

from __future__ import annotations

import os
import random
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

from tests.killing import kill, started

PHASE = {"sft": "sft", "rl": "rl", "stream": "rl", "pool": "rl", "leave_out": "rl"}


def start(kind: str, folder: Path, name: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Starts the run of a kind in a process of its own, with programs in ``KIND-compiled``."""
    words = ["tests.train.tiny_runs", kind, str(folder), name]
    return started(words, folder / f"{kind}-compiled")


def wait_until(process: subprocess.Popen[bytes], condition) -> bool:
    """Whether a condition came true before the process ended."""
    end = time.monotonic() + 240
    while process.poll() is None:
        if condition():
            return True
        assert time.monotonic() < end
        time.sleep(0.001)
    return False


def writes_checkpoint(workdir: Path, kind: str) -> bool:
    folder = workdir / "checkpoints" / PHASE[kind]
    return folder.exists() and any("tmp" in name for name in os.listdir(folder))


def kill_once(kind: str, folder: Path, name: str, chance: random.Random) -> bool:
    """Kills a run at a random moment after it has begun to step; False if it ended before that."""
    workdir = folder / name
    with start(kind, folder, name) as process:
        # Rows that a resumed run takes back are no sign of life; a lock file with its number is.
        own = f"process {process.pid} on"
        lock = workdir / ".lock"
        wait_until(process, lambda: lock.exists() and own in lock.read_text())
        log = workdir / "metrics.jsonl"
        before = log.stat().st_size if log.exists() else 0
        moment = chance.choice(["checkpoint", "step", "step"])
        if moment == "checkpoint":
            reached = wait_until(process, lambda: writes_checkpoint(workdir, kind))
            delay = chance.uniform(0, 0.03)
        else:

            def moved() -> bool:
                return log.exists() and log.stat().st_size != before

            reached = wait_until(process, moved)
            delay = chance.uniform(0, 0.05 if kind == "sft" else 0.6)
        time.sleep(delay if reached else 0)
        return kill(process)
