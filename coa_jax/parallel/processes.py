"""The processes of a run: joining, barriers, exchange of values, and detection of lost processes.

Each process drives its own devices, engines and tools. Processes cooperate in only two ways: they
run compiled programs over all devices (also to move data, see `parallel.transfer`), and they
exchange short values in `all_gather` and `barrier`. A process that waits there handles signals, and
logs which processes are missing.

A slow process does not end a run, because rollouts may take hours. Only a missing heartbeat ends a
run: the thread `_watch` then ends every other process with a one-line message.

Process 0 is the coordinator: it hosts JAX's coordination service, through which the processes
communicate. If the coordinator hangs or is unreachable, a call to the service returns only if the
call has a deadline. Therefore `_watch` makes only calls with a deadline.

Environment variables of a process:

======================================  ===========================================================
COA_JAX_DISTRIBUTED=1                   JAX finds the processes: TPU pods, GKE, SLURM, Open MPI
COA_JAX_COORDINATOR=HOST:PORT           address of process 0, if JAX cannot find the processes
COA_JAX_NUM_PROCESSES, _PROCESS_ID      number of processes, and number of this process from 0
COA_JAX_LOST_SECONDS                    number of seconds without heartbeat after which a process
                                        counts as lost (default 60)
======================================  ===========================================================
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from absl import logging

from coa_jax.config.fields import seconds_of
from coa_jax.errors import UserError

T = TypeVar("T")

EXIT_LOST = 3
"""Exit code of a process that ends because another process is lost; the run can be resumed."""

_ROOT = "coa_jax"
_VERDICT = f"{_ROOT}/verdict"
_STOP = f"{_ROOT}/stop/"
_COORDINATOR = f"{_ROOT}/alive/0"
_FINISHED = "finished"


@dataclasses.dataclass
class _Joined:
    """The state of this process in a run that has several processes.

    Attributes:
        client: client of JAX's coordination service, a key-value store of all processes.
        index: index of this process, from 0.
        count: number of processes.
        coordinator: address of the coordination service, which process 0 hosts.
        lost_seconds: seconds without a heartbeat after which a process is regarded as lost.
        doing: current activity of this process, which the other processes can read.
        exchanges: number of exchanges so far, by their key in the coordination service.
        beat: number of heartbeats so far.
        ending: event that is set when the interpreter shuts down, which waits for all processes.
        lock: held while a heartbeat is sent, because two threads send heartbeats.
        failed: whether this process has called `fail`.
    """

    client: Any
    index: int
    count: int
    coordinator: str
    lost_seconds: float
    doing: str = "starting"
    exchanges: dict[str, int] = dataclasses.field(default_factory=dict)
    beat: int = 0
    ending: threading.Event = dataclasses.field(default_factory=threading.Event)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    failed: bool = False

    def tell(self) -> None:
        """Sends a heartbeat with the current activity."""
        with self.lock:
            self.beat += 1
            name = f"{socket.gethostname()}, pid {os.getpid()}"
            state = {"beat": self.beat, "doing": self.doing, "name": name}
            key = f"{_ROOT}/alive/{self.index}"
            self.client.key_value_set(key, json.dumps(state), allow_overwrite=True)

    def others(self) -> dict[int, dict[str, Any]]:
        """Reads the last heartbeat of every process."""
        entries = self.client.key_value_dir_get(f"{_ROOT}/alive/")
        return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in entries}

    def watched(self) -> dict[int, dict[str, Any]]:
        """Reads the heartbeat of process 0 or, in process 0, the heartbeats of all others."""
        if self.index == 0:
            return self.others()
        milliseconds = int(_interval(self) * 1000)
        return {0: json.loads(self.client.blocking_key_value_get(_COORDINATOR, milliseconds))}

    def coordinator_is_gone(self) -> bool:
        """Returns whether the address of the coordinator refuses connections."""
        host, port = self.coordinator.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), _interval(self)).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # an unreachable coordinator may return before it counts as lost
            return False
        return False


_joined: _Joined | None = None


def join() -> None:
    """Joins the other processes of the run; must be called before any other use of JAX.

    Raises:
        UserError: ``COA_JAX_COORDINATOR``, ``COA_JAX_NUM_PROCESSES``, ``COA_JAX_PROCESS_ID`` or
            ``COA_JAX_LOST_SECONDS`` is invalid, or the other processes did not join.
    """
    global _joined
    seconds = seconds_of("COA_JAX_LOST_SECONDS", 60.0)
    explicit: dict[str, Any] = {}
    if "COA_JAX_COORDINATOR" in os.environ:
        address = os.environ["COA_JAX_COORDINATOR"]
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"COA_JAX_COORDINATOR is {address!r}; give HOST:PORT of process 0")
        count, number = _number("COA_JAX_NUM_PROCESSES"), _number("COA_JAX_PROCESS_ID")
        if number >= count:
            raise UserError(
                f"COA_JAX_PROCESS_ID is {number}; give each process a number from 0 to {count - 1}"
            )
        explicit = {"coordinator_address": address, "num_processes": count, "process_id": number}
    # JAX's heartbeat timeout is the longer one, because JAX does not name the lost process. The
    # shutdown timeout is long, because process 0 may be writing a large model at the end.
    import jax

    try:
        jax.distributed.initialize(
            **explicit,
            heartbeat_timeout_seconds=int(2 * seconds) + 30,
            shutdown_timeout_seconds=3600,
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot join the other processes ({reason}); outside of a cluster that JAX knows, set "
            "COA_JAX_COORDINATOR, COA_JAX_NUM_PROCESSES and COA_JAX_PROCESS_ID for each process"
        ) from error
    # The client of the coordination service has no public name; Orbax imports it in the same way.
    from jax._src import distributed

    state = distributed.global_state
    if state.num_processes > 1:
        address, number = str(state.coordinator_address), state.process_id
        _joined = _Joined(state.client, number, state.num_processes, address, seconds)
        _joined.tell()
        _hold_aborts()
        threads = [
            threading.Thread(target=run, args=(_joined,), daemon=True, name=run.__name__)
            for run in (_live, _watch)
        ]
        for thread in threads:
            thread.start()
        # Exit handlers run in reverse order, so this handler runs before that of JAX.
        atexit.register(_finish, _joined, threads)


def _hold_aborts() -> None:
    """Delays an abort of the process by 6 seconds, so that `_watch` can print the reason.

    JAX aborts a process as soon as its connection to the coordinator breaks. Here the C function
    ``sleep`` becomes the handler of SIGABRT: the C library calls it with the signal's number, 6,
    and then aborts. No Python code runs in between, so no lock can block the abort.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _outage() -> type[Exception]:
    """Returns the class of the exceptions by which calls of the coordination service fail.

    Only a run of several processes calls this function, so other commands need not load JAX.
    """
    import jax

    return jax.errors.JaxRuntimeError


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(f"{name} is {repr(text) if text else 'not set'}: give a whole number")
    return int(text)


def index() -> int:
    """Returns the index of this process, from 0."""
    return 0 if _joined is None else _joined.index


def count() -> int:
    """Returns the number of processes of the run."""
    return 1 if _joined is None else _joined.count


@contextlib.contextmanager
def as_single_process() -> Iterator[None]:
    """Makes this process act as the only process of its run, inside a ``with`` block.

    Use it for work that may fail on one host alone: otherwise the other processes would wait for a
    failed process at the next exchange.
    """
    global _joined
    before, _joined = _joined, None
    try:
        yield
    finally:
        _joined = before


# --- working together ----------------------------------------------------------------------


def set_activity(what: str) -> None:
    """Records what this process is doing, for the logs of processes that wait for it.

    Args:
        what: description, such as "saving a checkpoint".
    """
    if _joined is not None:
        _joined.doing = what


def barrier(what: str, seconds: float) -> None:
    """Waits until all processes have called this function (a barrier).

    Args:
        what: name of the barrier; all processes must reach the same barriers in the same order.
        seconds: interval at which a waiting process logs which processes are missing.
    """
    here = _joined
    if here is None:
        return
    before, here.doing = here.doing, f"waiting at: {what}"
    here.tell()
    names = all_gather(what, what, seconds, "met")
    assert set(names) == {what}, names
    here.doing = before


def _log_late(here: _Joined, what: str, waited: float, came: Collection[int]) -> None:
    """Logs the names of missing processes; ``came`` has the indices of the other processes."""
    # `_watch` notices a lost connection, and ends this process.
    with contextlib.suppress(_outage()):
        late = [
            f"process {number} ({state['name']}), which is at: {state['doing']}"
            for number, state in sorted(here.others().items())
            if number not in came
        ]
        names = " and ".join(late[:4]) + (f" and {len(late) - 4} more" if len(late) > 4 else "")
        logging.warning("%s: waiting for %.0f s for %s", what, waited, names)


def all_gather(value: Any, what: str, seconds: float, channel: str = "") -> list[Any]:
    """Exchanges a value between all processes, see `all_gather_async` for arguments and result.

    Inside an event loop, call `all_gather_async` instead of this function.
    """
    if _joined is None:
        return [value]
    return asyncio.run(all_gather_async(value, what, seconds, channel))


async def all_gather_async(value: Any, what: str, seconds: float, channel: str = "") -> list[Any]:
    """Exchanges a value between all processes.

    The exchange runs no program on the devices. A thread may therefore call this function while
    another thread runs a multi-process program or makes another exchange. Signals such as Ctrl-C
    are handled during the wait.

    Args:
        value: value of this process, which must be a short JSON value.
        what: name of the exchange, used in messages.
        seconds: interval at which a waiting process logs which processes are missing.
        channel: key of the exchange in JAX's coordination service. Exchanges of different threads
            need different keys. If "", ``what`` is the key.

    Returns:
        The values of all processes, in the order of the processes' indices.
    """
    here = _joined
    if here is None:
        return [value]
    channel = f"{_ROOT}/told/{channel or what}"
    turn = here.exchanges[channel] = here.exchanges.get(channel, 0) + 1
    start, logged, pause = time.monotonic(), 1, 0.01
    here.client.key_value_set(f"{channel}/{turn}/{here.index}", json.dumps(value))
    while True:
        entries = here.client.key_value_dir_get(f"{channel}/{turn}/")
        values = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in entries}
        if len(values) == here.count:
            break
        waited = time.monotonic() - start
        if waited > logged * seconds:
            logged += 1
            _log_late(here, what, waited, values)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.2)
    if turn > 1:  # every process has read the previous turn before it wrote its value of this one
        here.client.key_value_delete(f"{channel}/{turn - 1}/{here.index}")
    return [values[number] for number in range(here.count)]


def ask_all_to_stop() -> None:
    """Tells all processes of the run that this process has received a request to stop."""
    if _joined is not None:
        _joined.client.key_value_set(f"{_STOP}{_joined.index}", "yes", allow_overwrite=True)


def asked_to_stop() -> bool:
    """Returns whether any process has called `ask_all_to_stop`."""
    return _joined is not None and bool(_joined.client.key_value_dir_get(_STOP))


def local_items(items: Sequence[T]) -> list[T]:
    """Returns this process's share of items: with n processes, every n-th item."""
    return list(items[index() :: count()])


# --- detection of lost processes -----------------------------------------------------------


def fail(error: BaseException, reason: str, code: int) -> NoReturn:
    """Ends all processes because of an error of this process that was already printed.

    The interpreter is not shut down, because JAX's exit handler would wait for all processes.

    Args:
        error: the error that was printed.
        reason: description of the error, which the other processes print.
        code: exit code of all processes.
    """
    if _joined is not None:
        if isinstance(error, _outage()):
            # The cause may be the loss of another process; in that case `_watch` ends this process.
            time.sleep(_joined.lost_seconds + 2 * _interval(_joined))
        name = f"process {_joined.index} ({socket.gethostname()}, pid {os.getpid()})"
        _joined.failed = True
        _say(_joined, f"{name} has failed: {reason}", code)
        if _joined.index == 0:
            time.sleep(1.0)  # the service ends with this process: let the others read the message
    _exit(code)


def _finish(here: _Joined, threads: Sequence[threading.Thread]) -> None:
    here.doing = _FINISHED
    here.ending.set()
    with contextlib.suppress(_outage()):
        here.tell()
    # A thread that is calling the service when the interpreter ends would abort the process.
    for thread in threads:
        thread.join(3 * _interval(here) + 1)


def _say(here: _Joined, verdict: str, code: int = EXIT_LOST) -> None:
    # Only the first verdict is stored, because an existing key is not overwritten.
    with contextlib.suppress(_outage()):
        here.client.key_value_set(_VERDICT, json.dumps([here.index, verdict, code]))


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _interval(here: _Joined) -> float:
    return min(max(here.lost_seconds / 10, 0.1), 2.0)


def _live(here: _Joined) -> None:
    """Sends heartbeats until the process ends."""
    while not here.ending.wait(_interval(here)):
        with contextlib.suppress(_outage()):  # `_watch` finds the reason
            here.tell()


def _watch(here: _Joined) -> None:
    """Ends this process if another is lost; the main thread may be blocked in a program."""
    start = time.monotonic()
    unknown = {"beat": 0, "name": f"the coordinator at {here.coordinator}", "doing": "starting"}
    states = {0: (unknown, start)}
    while not here.ending.is_set():
        try:
            # A lost connection interrupts this call at once.
            text = here.client.blocking_key_value_get(_VERDICT, int(_interval(here) * 1000))
            by, verdict, code = json.loads(text)
            if by == here.index and here.failed:
                return  # this process has failed itself, and is about to end
            _end(here, verdict, code)
        except _outage():
            pass  # there is no verdict, or no answer
        try:
            watched = here.watched()
        except _outage():
            if here.coordinator_is_gone() and not here.ending.is_set():
                _end(here, f"process 0, the coordinator at {here.coordinator}, is gone")
            watched = {}
            here.ending.wait(0.1)  # the call may have failed at once
        now = time.monotonic()
        for number, state in watched.items():
            if number not in states or state["beat"] != states[number][0]["beat"]:
                states[number] = (state, now)
        for number, (state, heard) in states.items():
            if now - heard > here.lost_seconds and state["doing"] != _FINISHED:
                verdict = (
                    f"process {number} ({state['name']}) has sent no heartbeat for "
                    f"{now - heard:.0f} s; its last activity: {state['doing']}"
                )
                if number == 0 != here.index:
                    _end(here, verdict)  # without the coordinator there is no place for a verdict
                _say(here, verdict)


def _end(here: _Joined, verdict: str, code: int = EXIT_LOST) -> NoReturn:
    again = "; run the same command again to continue" if code == EXIT_LOST else ""
    with contextlib.suppress(OSError):  # the reader of a pipe may be gone
        os.write(2, f"error: {verdict}{again}\n".encode())
    if here.index == 0:
        time.sleep(min(1.0, here.lost_seconds))  # until the others have read the verdict too
    _exit(code)
