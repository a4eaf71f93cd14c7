"""Ends the runs of `tests.train.tiny_runs` from outside, at random moments or after a step."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests import forked
from tests.train.tiny_runs import PHASE, rows, words_of


def start(kind: str, folder: Path, name: str) -> BaseProcess:
    """Starts the run of a kind in a process of its own; ``KIND-compiled`` has its programs."""
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / f"{kind}-compiled")}
    return forked.start(words_of(kind, folder, name), env=env, err=folder / f"{name}-errors")


def wait_until(process: BaseProcess, condition: Callable[[], bool]) -> bool:
    """Whether a condition came true before the process ended."""
    end = time.monotonic() + 240
    while process.is_alive():
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
    process = start(kind, folder, name)
    try:
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
    finally:
        killed = process.is_alive()
        process.kill()
        process.join()
    errors = (folder / f"{name}-errors").read_text()
    assert process.exitcode in ((0, -signal.SIGKILL) if killed else (0,)), errors[-3000:]
    return process.exitcode != 0


def stop_after_a_step(kind: str, folder: Path, name: str) -> tuple[int | None, str]:
    """Sends SIGTERM to a run that has made a step; returns the exit code and what it said."""
    process = start(kind, folder, name)
    try:
        assert wait_until(process, lambda: len(rows(folder / name, PHASE[kind])) >= 1)
        process.terminate()
        process.join(120)
    finally:
        process.kill()
        process.join()
    return process.exitcode, (folder / f"{name}-errors").read_text()
