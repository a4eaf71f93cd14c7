"""SIGTERM, which a cluster sends before it takes a machine away: the run saves and ends well."""

from __future__ import annotations

import asyncio
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
"""How often a process looks whether another has been asked."""


class Stop:
    """Whether the run has been asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def agreed(self, wait_seconds: float, due: bool = False) -> tuple[bool, bool]:
        """Whether a process of the run has been asked to stop, and whether one says that it is due.

        Every process calls this at the same step and gets the same answer: one that stopped or
        saved alone would leave the others waiting for it.

        Args:
            wait_seconds: see `processes.exchange`.
            due: whether this process's clock says that a checkpoint is due.
        """
        if processes.count() == 1:  # also in a notebook, whose event loop is running
            return self.requested, due
        # No program on the devices: rollouts that go on may be about to start one.
        mine = [self.requested, due]
        told = asyncio.run(processes.exchange(mine, "the end of a step", wait_seconds))
        return any(stop for stop, _ in told), any(due for _, due in told)


@contextlib.contextmanager
def stop_on_sigterm(hurry: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Takes the first SIGTERM as a request; a second one ends the process at once.

    A request to one process is a request to all of them, which learn of it within a second or two.

    Args:
        hurry: called once with the request, to cut short what the run waits for.  It runs in a
            signal handler, or in a thread if there are several processes.
    """
    stop = Stop()

    def request(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop.requested = True
        if processes.count() == 1:
            hurry()

    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
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
            follower.join(5 * _SECONDS)  # no longer: the coordinator may be frozen


def _follow(stop: Stop, hurry: Callable[[], None], over: threading.Event) -> None:
    """Passes a request on to the other processes, or takes theirs over."""
    while not over.wait(_SECONDS):
        # What ails the connection is found out by the watch, which ends the process.
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

    The exit code is 0, or that of COA_JAX_STOP_CODE: the scripts that start runs set it, so that
    they tell a run that has to go on from one that has come to its end.
    """
    if jax.process_index() == 0:
        print(
            f"stopped by SIGTERM after step {step} of {total}, which is saved; "
            "run the same command again to continue",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(int(os.environ.get("COA_JAX_STOP_CODE", "0")))
