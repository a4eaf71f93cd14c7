"""Handles SIGTERM: the run saves its state and exits.

A cluster sends SIGTERM before it preempts a machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

import jax

from coa_jax.parallel import processes

_SECONDS = 1.0
"""Number of seconds between two checks whether another process has received SIGTERM."""


class Stop:
    """Remembers whether the run was asked to stop, and coordinates stopping between processes.

    Attributes:
        requested: whether this process knows that the run was asked to stop.
    """

    def __init__(self) -> None:
        self.requested = False

    def agreed(self, wait_seconds: float, due: bool = False) -> tuple[bool, bool]:
        """Agrees with the other processes whether to stop and whether to save a checkpoint.

        Every process must call this method at the same step, and gets the same result. A process
        that stopped or saved alone would leave the other processes waiting.

        Args:
            wait_seconds: number of seconds to wait for the slowest process, see
                `processes.all_gather`.
            due: whether a checkpoint is due in this process, see `Checkpoints.overdue`.

        Returns:
            Two booleans: whether any process was asked to stop, and whether a checkpoint is due in
            all processes.
        """
        # This exchange runs no program on the devices: a rollout thread may be launching one.
        mine = [self.requested, due]
        votes = processes.all_gather(mine, "the end of a step", wait_seconds)
        return any(stop for stop, _ in votes), all(due for _, due in votes)


@contextlib.contextmanager
def stop_on_sigterm(hurry: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Treats the first SIGTERM as a request to stop; a second SIGTERM ends the process at once.

    If one process receives SIGTERM, all processes of the run know of the request within about two
    seconds.

    Args:
        hurry: function that is called once after a request to stop. The function should end work
            for which the run would otherwise wait. It is called in a signal handler or, if there
            are several processes, in a thread.
    """
    stop = Stop()

    def request(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop.requested = True
        # Not print: the signal may have interrupted a print.
        os.write(2, b"\nSIGTERM: the run saves its state and ends; a second one ends it at once\n")
        if processes.count() == 1:
            hurry()

    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can handle signals
        return
    over = threading.Event()
    follower = threading.Thread(target=_follow, args=(stop, hurry, over), daemon=True)
    before = signal.signal(signal.SIGTERM, request)
    if processes.count() > 1:
        follower.start()
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
        over.set()
        if processes.count() > 1:
            follower.join(5 * _SECONDS)  # with a time limit, because the coordinator may hang


def _follow(stop: Stop, hurry: Callable[[], None], over: threading.Event) -> None:
    """Passes a request to stop on to the other processes, and adopts their requests."""
    while not over.wait(_SECONDS):
        # The watch of `processes` notices a lost connection, and ends this process.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if stop.requested:
                processes.ask_all_to_stop()
            elif not processes.asked_to_stop():
                continue
            stop.requested = True
            hurry()
            return


def end_run(step: int, total: int) -> NoReturn:
    """Ends a command that was asked to stop and has saved its state.

    The exit code is 143, as of a program that SIGTERM ends, or the value of ``$COA_JAX_STOP_CODE``.
    Launch scripts set this variable to recognise a run that must be continued.

    Args:
        step: number of the last completed step, which is saved.
        total: number of steps of the run.
    """
    if jax.process_index() == 0:
        print(
            f"stopped by SIGTERM after step {step} of {total}, which is saved; "
            "run the same command again to continue",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(int(os.environ.get("COA_JAX_STOP_CODE", 128 + signal.SIGTERM)))
