"""Runs functions in worker processes that can be killed.

Work on untrusted input, such as parsing and algebra, may never end. A worker starts once and
answers many calls, because importing its modules takes a second. If a call takes too long or a
library crashes, only the worker is lost. If the parent process dies, its workers end by themselves:
an idle worker because its connection ends, and a busy worker because one of its threads checks once
a second whether the parent process is alive. If this thread cannot run, the timer that is set with
every call kills the worker.

The workers of this module are not isolated; those of `coa_jax.tools.isolated` run in the sandbox.
Their programs contain the source of this module, which therefore uses only the standard library.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

_START = "from coa_jax.tools import worker; worker.serve()"
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
"""Environment variables that workers get. Other variables are left out, as they may be API keys."""

MEMORY = 4 << 30
"""Limit of the address space of a worker in bytes."""

_LARGEST = 64 << 20
"""Maximum size of an answer in bytes."""

_START_S = 30.0
"""Time limit in seconds for a worker to start and import its modules."""

_IDLE_S = 600.0
"""Time in seconds after which an idle worker ends. The pool uses none that may be about to end."""

LIFE_S = 3000.0
"""Age in seconds from which the pool replaces a worker by a new one."""


class WorkerError(Exception):
    """Raised if a call in a worker process fails: the function raised, or the process died."""


class WorkerTimeoutError(WorkerError):
    """Raised if a call in a worker process took too long; the process was killed."""


class WorkerBusyError(WorkerError):
    """Raised if a call has no result because worker processes or the machine were too busy.

    No process was free, a process did not start, or the result did not arrive in time.
    """


class Child(Protocol):
    """The interface of a worker process, which `Workers` uses; ``subprocess.Popen`` has it too.

    Attributes:
        returncode: exit code, or minus the number of the signal that ended the process; None while
            the process runs.
    """

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class Workers:
    """A pool of worker processes that all run the same function.

    A worker process handles one call at a time. Several threads may use the same pool.
    """

    def __init__(
        self,
        function: str,
        count: int | None = None,
        start: Callable[[str, Connection], Child] | None = None,
    ):
        """Creates the pool. A process starts only when a call needs it.

        Args:
            function: the function as ``module:name``. Its arguments must be picklable, and its
                result must be a JSON value.
            count: maximum number of processes; None for one per processor, but at most four.
            start: function that starts a process. Its arguments are ``function`` and the process's
                end of the connection. None for a process of the current user without isolation.
        """
        self._function, self._start = function, start or _start
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(count or min(4, os.cpu_count() or 1)):
            self._free.put(None)

    def ask(self, *arguments: Any, timeout: float, wait: float | None = None) -> Any:
        """Calls the function in a process, and returns its result.

        Args:
            arguments: values with which the function is called.
            timeout: limit on the processor time of the call in seconds. This limit does not depend
                on the load of the machine.
            wait: limit on the wall time in seconds for a free process and the result together; None
                for ``timeout``.

        Raises:
            WorkerBusyError: no process was free in time, no process can be started, or the result
                did not arrive within ``wait`` (if ``wait`` is not None).
            WorkerTimeoutError: the call used more processor time than ``timeout``, or ``wait`` is
                None and the result did not arrive in time.
            WorkerError: the function raised an exception, or the process died.
        """
        seconds = timeout if wait is None else wait
        end = time.monotonic() + seconds
        try:
            process = self._free.get(timeout=seconds)
        except queue.Empty:
            raise WorkerBusyError(f"no process was free within {seconds:.3g} seconds") from None
        try:
            if process is None or not process.alive:
                process = None  # ends the old process
                process = _Process(self._function, self._start)
                end += process.start_s
            try:
                return process.ask(arguments, timeout, end - time.monotonic())
            except WorkerBusyError as error:
                if wait is None:
                    message = f"it took longer than {timeout:.3g} seconds"
                    raise WorkerTimeoutError(message) from error
                # Not the seconds that were left when the process was free.
                raise WorkerBusyError(f"no result came within {wait:.3g} seconds") from error
        finally:
            self._free.put(process)


def _start(function: str, theirs: Connection) -> Child:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", _START, function, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


class _Process:
    def __init__(self, function: str, start: Callable[[str, Connection], Child]):
        self._born = time.monotonic()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = start(function, theirs)
        self._kill = weakref.finalize(self, _kill, self._process, self._connection)
        try:
            ready = self._answer(_START_S)  # the first message says that the process is ready
            if "error" in ready:
                raise WorkerError(ready["error"])
        except WorkerError as error:
            raise WorkerBusyError(f"the process for {function} did not start: {error}") from error
        self._used = time.monotonic()
        self.start_s = self._used - self._born

    @property
    def alive(self) -> bool:
        now = time.monotonic()
        fresh = now < self._used + _IDLE_S / 2 and now < self._born + LIFE_S
        return fresh and self._kill.alive and self._process.poll() is None

    def ask(self, arguments: tuple[Any, ...], timeout: float, wait: float) -> Any:
        answer = self._answer(max(wait, 0.001), (max(timeout, 0.001), arguments))
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def _answer(self, wait: float, request: Any = None) -> Any:
        """Sends a request, unless it is None, and reads an answer.

        Answers are JSON, because unpickling what a worker sends would not be safe.
        """
        end = time.monotonic() + wait
        watchdog = threading.Timer(wait, self._process.kill)
        watchdog.daemon = True  # must not delay the end of this process
        watchdog.start()
        try:
            if request is not None:
                self._connection.send(request)
            answer = json.loads(self._connection.recv_bytes(_LARGEST))
            self._used = time.monotonic()
            return answer
        except BaseException as error:
            if isinstance(error, EOFError):  # the process is ending, and its own signal says why
                patience = time.monotonic() + 1.0
                while self._process.poll() is None and time.monotonic() < patience:
                    time.sleep(0.01)
            self._kill()
            if not isinstance(error, EOFError | OSError):
                raise
            if self._process.returncode == -signal.SIGPROF and request is not None:
                message = f"it took more than {request[0]:.3g} seconds of processor time"
                raise WorkerTimeoutError(message) from None
            if time.monotonic() >= end:
                raise WorkerBusyError(f"no result came within {wait:.3g} seconds") from None
            raise WorkerError("the process died") from error
        finally:
            watchdog.cancel()


def _kill(process: Child, connection: Connection) -> None:
    process.kill()
    connection.close()
    process.wait()


def _end_with(parent: int) -> None:
    """Ends this process as soon as its parent process has ended, even during a call."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def serve() -> None:
    """Answers calls from the parent process until the connection ends.

    This is the main function of a worker process without isolation.
    """
    function, descriptor = sys.argv[1:3]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    module, _, name = function.partition(":")
    answer(getattr(importlib.import_module(module), name), Connection(int(descriptor)))


def answer(function: Callable[..., Any], connection: Connection) -> None:
    """Answers calls of a function until the connection ends, or no call came for `_IDLE_S`."""
    # The parent process may ignore or block the signal of the timer below.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    connection.send_bytes(b"{}")
    while connection.poll(_IDLE_S):
        try:
            timeout, arguments = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, timeout)  # counts processor time; the signal kills
        try:
            result = {"value": function(*arguments)}
        except Exception as error:  # noqa: BLE001 - an exception of any kind is an answer
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(result).encode())
