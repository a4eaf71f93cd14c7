"""The processes of a run: joining them, meeting, gathering, and noticing one that is gone.

Each process drives its own devices, engines and tools.  They work together in two ways only: in
compiled programs over the devices of all, and by gathering what each of them has sampled.  All of
them `meet` before, where a process that waits handles signals and says for whom it waits.

A process may be as slow as it likes: rollouts take an hour, and longer where a judge is slow.  Only
a heartbeat that is missing ends a run.  A thread of each process, `_watch`, ends it with one line
when another one is gone.

The coordinator, process 0, hosts the service through which they talk.  Of its client only calls
with a deadline come back when it is frozen or cut off, so the watch makes no other.

Environment of a process:

======================================  ===========================================================
COA_JAX_DISTRIBUTED=1                   JAX finds the others: TPU pods, GKE, SLURM, Open MPI
COA_JAX_COORDINATOR=HOST:PORT           address of process 0, where JAX does not
COA_JAX_NUM_PROCESSES, _PROCESS_ID      how many there are, and which one this is, from 0
COA_JAX_LOST_SECONDS                    silence after which a process is given up (default 60)
======================================  ===========================================================
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from absl import logging

from coa_jax.errors import UserError

T = TypeVar("T")

EXIT_LOST = 3
"""Exit code of a process that ends because another one is gone: the same command goes on."""

_ROOT = "coa_jax"
_VERDICT = f"{_ROOT}/verdict"
_STOP = f"{_ROOT}/stop/"
_COORDINATOR = f"{_ROOT}/alive/0"
_FINISHED = "finished"
_SMALLEST = 1 << 16  # bytes; payloads are padded to powers of two, which few programs serve


@dataclasses.dataclass
class _Joined:
    """This process among several.

    Attributes:
        client: of JAX's coordination service, in which all processes can set and read keys.
        index, count: this process, and how many there are.
        coordinator: address of the service, which lives in process 0.
        lost_seconds: silence after which a process is given up.
        doing: what it is at, for the others to read.
        told: how many exchanges of each kind it has been part of.
        beat: how often it has said that it lives.
        ending: set when the interpreter is at its end, which waits for all processes.
        lock: of what two threads do.
    """

    client: Any
    index: int
    count: int
    coordinator: str
    lost_seconds: float
    doing: str = "starting"
    told: dict[str, int] = dataclasses.field(default_factory=dict)
    beat: int = 0
    ending: threading.Event = dataclasses.field(default_factory=threading.Event)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def tell(self) -> None:
        """Says that this process lives, and what it does."""
        with self.lock:
            self.beat += 1
            state = {
                "beat": self.beat,
                "doing": self.doing,
                "name": f"{socket.gethostname()}, pid {os.getpid()}",
            }
            key = f"{_ROOT}/alive/{self.index}"
            self.client.key_value_set(key, json.dumps(state), allow_overwrite=True)

    def others(self) -> dict[int, dict[str, Any]]:
        """What every process said last."""
        entries = self.client.key_value_dir_get(f"{_ROOT}/alive/")
        return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in entries}

    def watched(self) -> dict[int, dict[str, Any]]:
        """What those said whom this process watches: process 0 watches all, the others it."""
        if self.index == 0:
            return self.others()
        milliseconds = int(_interval(self) * 1000)
        return {0: json.loads(self.client.blocking_key_value_get(_COORDINATOR, milliseconds))}

    def coordinator_is_gone(self) -> bool:
        """Whether nobody listens any more where process 0 did."""
        host, port = self.coordinator.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), _interval(self)).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # out of reach: it may come back before it is given up
        return False


_joined: _Joined | None = None


def join() -> None:
    """Joins the other processes; comes before anything else uses JAX.

    Raises:
        UserError: the environment contradicts itself, or the others did not come.
    """
    global _joined
    seconds = _number("COA_JAX_LOST_SECONDS", 60.0)
    if not 0 < seconds < math.inf:
        raise UserError(f"COA_JAX_LOST_SECONDS is {seconds}; give seconds above 0")
    explicit: dict[str, Any] = {}
    if "COA_JAX_COORDINATOR" in os.environ:
        host, _, port = os.environ["COA_JAX_COORDINATOR"].rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(
                f"COA_JAX_COORDINATOR is {os.environ['COA_JAX_COORDINATOR']!r}; give HOST:PORT of "
                "process 0"
            )
        explicit = {
            "coordinator_address": os.environ["COA_JAX_COORDINATOR"],
            "num_processes": int(_number("COA_JAX_NUM_PROCESSES")),
            "process_id": int(_number("COA_JAX_PROCESS_ID")),
        }
        if not 0 <= explicit["process_id"] < explicit["num_processes"]:
            raise UserError(
                f"COA_JAX_PROCESS_ID is {explicit['process_id']}; give 0 to "
                f"{explicit['num_processes'] - 1}, each to one process"
            )
    # JAX itself gives a silent process up later and ends the others without naming it.
    # At its end a process waits for all others, of which the first may write a large model.
    try:
        jax.distributed.initialize(
            **explicit,
            heartbeat_timeout_seconds=int(2 * seconds) + 30,
            shutdown_timeout_seconds=3600,
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot join the other processes ({reason}); outside of a cluster that JAX knows set "
            "COA_JAX_COORDINATOR, COA_JAX_NUM_PROCESSES and COA_JAX_PROCESS_ID for each of them"
        ) from error
    # The service's client has no public name.  This is the only place that takes it; Orbax does
    # the same.
    from jax._src import distributed

    state = distributed.global_state
    if state.num_processes > 1:
        _joined = _Joined(
            state.client,
            state.process_id,
            state.num_processes,
            str(state.coordinator_address),
            seconds,
        )
        _joined.tell()
        _hold_aborts()
        threads = [
            threading.Thread(target=run, args=(_joined,), daemon=True, name=run.__name__)
            for run in (_live, _watch)
        ]
        for thread in threads:
            thread.start()
        # Handlers run in reverse order, so this one before that of JAX.
        atexit.register(_finish, _joined, threads)


def _hold_aborts() -> None:
    """Lets an abort wait for 6 seconds, in which the watch can say what is the matter.

    JAX aborts a process as soon as its connection to the coordinator breaks.  The C library calls
    what handles SIGABRT, whose number is 6, with that number in the thread that aborts, and aborts
    when it returns.  Nothing of Python runs there, so that no lock can keep the process alive.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _number(name: str, default: float | None = None) -> float:
    text = os.environ.get(name)
    try:
        if text is not None:
            return float(text)
    except ValueError:
        text = repr(text)
    if default is None or text is not None:
        raise UserError(f"{name} is {text or 'not set'}: a number is needed")
    return default


def index() -> int:
    """Number of this process."""
    return 0 if _joined is None else _joined.index


def count() -> int:
    """How many processes there are."""
    return 1 if _joined is None else _joined.count


# --- working together ----------------------------------------------------------------------


def doing(what: str) -> None:
    """Notes what this process is at; the others name it when they have to wait for this one."""
    if _joined is not None:
        _joined.doing = what


def meet(what: str, seconds: float) -> None:
    """Waits until all processes are here.

    Args:
        what: names the place; all processes come to the same places in the same order.
        seconds: after which it logs for whom it waits, and again after as long.
    """
    here = _joined
    if here is None:
        return
    before, here.doing = here.doing, f"waiting at: {what}"
    here.tell()
    told = asyncio.run(exchange(what, what, seconds, "met"))
    assert set(told) == {what}, told
    here.doing = before


def _log_late(here: _Joined, what: str, waited: float, came: Collection[int]) -> None:
    """Names all processes but those that came."""
    # What ails the connection is found out by the watch, which ends the process.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        late = [
            f"process {number} ({state['name']}), which is at: {state['doing']}"
            for number, state in sorted(here.others().items())
            if number not in came
        ]
        names = " and ".join(late[:4]) + (f" and {len(late) - 4} more" if len(late) > 4 else "")
        logging.warning("%s: waiting for %.0f s for %s", what, waited, names)


async def exchange(value: Any, what: str, seconds: float, place: str = "") -> list[Any]:
    """What each process has to say, on all of them, in their order.

    It runs no program on the devices, so that a thread may do this while another is in programs of
    all processes, or in another exchange.  While it waits, signals are handled.

    Args:
        value: of this process; what JSON takes, and short.
        what: names the exchange in messages.
        seconds: after which it logs for whom it waits, and again after as long.
        place: names it for the service, by default ``what``; only one thread has those of a name.
    """
    here = _joined
    if here is None:
        return [value]
    place = f"{_ROOT}/told/{place or what}"
    turn = here.told[place] = here.told.get(place, 0) + 1
    start, logged, pause = time.monotonic(), 1, 0.01
    here.client.key_value_set(f"{place}/{turn}/{here.index}", json.dumps(value))
    while True:
        entries = here.client.key_value_dir_get(f"{place}/{turn}/")
        told = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in entries}
        if len(told) == here.count:
            break
        waited = time.monotonic() - start
        if waited > logged * seconds:
            logged += 1
            _log_late(here, what, waited, told)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.2)
    if turn > 1:  # who has said this has read all that came before
        here.client.key_value_delete(f"{place}/{turn - 1}/{here.index}")
    return [told[number] for number in range(here.count)]


def ask_all_to_stop() -> None:
    """Tells all processes that one of them has been asked to stop."""
    if _joined is not None:
        _joined.client.key_value_set(f"{_STOP}{_joined.index}", "yes", allow_overwrite=True)


def asked_to_stop() -> bool:
    """Whether a process has told all of them to stop."""
    return _joined is not None and bool(_joined.client.key_value_dir_get(_STOP))


def share(items: Sequence[T]) -> list[T]:
    """This process's part of what all of them have to do: every so many items."""
    return list(items[index() :: count()])


def gather(items: Sequence[T], what: str, seconds: float) -> list[T]:
    """The items of all processes, on all of them, in the order that `share` took them from.

    Args:
        items: of this process; what pickle takes.
        what: for messages.
        seconds: see `meet`.
    """
    if _joined is None:
        return list(items)
    from jax.experimental import multihost_utils

    payload = np.frombuffer(pickle.dumps(list(items)), np.uint8)
    meet(what, seconds)
    sizes = multihost_utils.process_allgather(np.asarray([payload.size], np.int32)).reshape(-1)
    width = max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length())
    padded = np.zeros(width, np.uint8)
    padded[: payload.size] = payload
    rows = np.asarray(multihost_utils.process_allgather(padded))
    parts = [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
    total = sum(map(len, parts))
    return [parts[at % len(parts)][at // len(parts)] for at in range(total)]


# --- noticing who is gone ------------------------------------------------------------------


def fail(error: BaseException, reason: str, code: int) -> NoReturn:
    """Ends this process because of an error, which has been printed, and tells the others.

    They end with the same exit code: what one of them cannot do is not tried again.  A process that
    went through the interpreter's end would wait there for all the others.
    """
    if _joined is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            # What fails in a program of all may be another process; then the watch ends this one.
            time.sleep(_joined.lost_seconds + 2 * _interval(_joined))
        name = f"process {_joined.index} ({socket.gethostname()}, pid {os.getpid()})"
        _say(_joined, f"{name} has failed: {reason}", code)
        if _joined.index == 0:
            time.sleep(1.0)  # the service ends with this process: let the others read that
    _exit(code)


def _finish(here: _Joined, threads: Sequence[threading.Thread]) -> None:
    here.doing = _FINISHED
    here.ending.set()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        here.tell()
    # A thread that waits in the client while the interpreter ends would abort the process.
    for thread in threads:
        thread.join(3 * _interval(here) + 1)


def _say(here: _Joined, verdict: str, code: int = EXIT_LOST) -> None:
    # The first verdict stands: a key that is there cannot be set.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        here.client.key_value_set(_VERDICT, json.dumps([here.index, verdict, code]))


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _interval(here: _Joined) -> float:
    return min(max(here.lost_seconds / 10, 0.1), 2.0)


def _live(here: _Joined) -> None:
    """Says again and again that this process lives, which may take as long as it likes."""
    while not here.ending.wait(_interval(here)):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the watch finds out why
            here.tell()


def _watch(here: _Joined) -> None:
    """Ends this process when another is gone: the main thread may be in a program that waits."""
    start = time.monotonic()
    unknown = {"beat": 0, "name": f"the coordinator at {here.coordinator}", "doing": "starting"}
    seen = {0: (unknown, start)}
    while not here.ending.is_set():
        try:
            # This wait is what the connection's end interrupts at once.
            text = here.client.blocking_key_value_get(_VERDICT, int(_interval(here) * 1000))
            by, verdict, code = json.loads(text)
            if by == here.index and code != EXIT_LOST:
                return  # that is this process, which is about to end
            _end(here, verdict, code)
        except jax.errors.JaxRuntimeError:
            pass  # there is none, or the question has not been answered
        try:
            watched = here.watched()
        except jax.errors.JaxRuntimeError:
            if here.coordinator_is_gone() and not here.ending.is_set():
                _end(here, f"process 0, the coordinator at {here.coordinator}, is gone")
            watched = {}
            here.ending.wait(0.1)  # the question may have come back at once
        now = time.monotonic()
        for number, state in watched.items():
            if number not in seen or state["beat"] != seen[number][0]["beat"]:
                seen[number] = (state, now)
        for number, (state, heard) in seen.items():
            if now - heard > here.lost_seconds and state["doing"] != _FINISHED:
                verdict = (
                    f"process {number} ({state['name']}) has not been heard from for "
                    f"{now - heard:.0f} s; its last words: {state['doing']}"
                )
                if number == 0 != here.index:
                    _end(here, verdict)  # nobody is there to whom it could be said
                _say(here, verdict)


def _end(here: _Joined, verdict: str, code: int = EXIT_LOST) -> NoReturn:
    again = "; run the same command again to continue" if code == EXIT_LOST else ""
    os.write(2, f"error: {verdict}{again}\n".encode())
    if here.index == 0:
        time.sleep(min(1.0, here.lost_seconds))  # until the others have read it too
    _exit(code)
