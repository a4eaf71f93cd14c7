"""Runs functions in worker processes that can be killed.

Work on untrusted input, such as parsing and algebra, may never end. A worker starts once and
answers many calls, because importing its modules takes a second. If a call takes too long or a
library crashes, only the worker is lost. A worker ends by itself if its parent process has died,
because its standard input ends, or because the timer that is set with every call kills it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

_HEAD = struct.Struct(">Q")
_START = "from coa_jax.tools import worker; worker.serve()"
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
"""Environment variables that workers get. Other variables are left out, as they may be API keys."""

_START_S = 30.0
"""Time limit in seconds for a worker to start and import its modules."""


class WorkerError(Exception):
    """Says that the function raised an exception, or that the process died."""


class WorkerTimeoutError(WorkerError):
    """Says that the call took too long, so that its process was killed."""


class WorkerBusyError(WorkerError):
    """Says that the call was not made, because no process was free or a process did not start."""


class Workers:
    """A pool of processes that run a function. Each process runs one call at a time.

    Several threads may use the same pool.
    """

    def __init__(self, function: str, count: int | None = None, memory_mb: int = 4096):
        """Creates the pool. A process starts only when a call needs it.

        Args:
            function: the function as ``module:name``. Its arguments must be picklable, and its
                result must be a JSON value.
            count: maximum number of processes; None for one per processor, but at most four.
            memory_mb: limit of the address space of each process, in MiB.
        """
        self._function, self._memory_mb = function, memory_mb
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(count or min(4, os.cpu_count() or 1)):
            self._free.put(None)

    def ask(self, *arguments: Any, timeout: float, wait: float | None = None) -> Any:
        """Calls the function in a process, and returns its result.

        Args:
            arguments: arguments of the function.
            timeout: time limit of the call in seconds.
            wait: maximum time in seconds to wait for a free process. If None, ``timeout`` limits
                the total time of waiting and of the call.

        Raises:
            WorkerBusyError: no process was free in time, or no process can be started.
            WorkerTimeoutError: the call took longer than ``timeout``.
            WorkerError: the function raised an exception, or the process died.
        """
        end = time.monotonic() + timeout
        try:
            process = self._free.get(timeout=max(timeout if wait is None else wait, 0.0))
        except queue.Empty:
            raise WorkerBusyError("no process was free in time") from None
        if wait is not None:
            end = time.monotonic() + timeout
        try:
            if process is None or not process.alive:
                process = _Process(self._function, self._memory_mb)
                end += process.start_s
            return process.ask(arguments, end - time.monotonic())
        finally:
            self._free.put(process)


class _Process:
    def __init__(self, function: str, memory_mb: int):
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        start = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, function, str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._kill = weakref.finalize(self, _kill, self._process)
        try:
            self._read(_START_S)  # the first message says that the process is ready
        except WorkerError as error:
            raise WorkerBusyError(f"the process for {function} did not start: {error}") from error
        self.start_s = time.monotonic() - start

    @property
    def alive(self) -> bool:
        return self._kill.alive and self._process.poll() is None

    def ask(self, arguments: tuple[Any, ...], timeout: float) -> Any:
        assert self._process.stdin is not None
        message = pickle.dumps((max(timeout, 0.001), arguments))
        try:
            self._process.stdin.write(_HEAD.pack(len(message)) + message)
            self._process.stdin.flush()
            answer = self._read(timeout)
        except BaseException as error:
            self._kill()
            if isinstance(error, OSError):
                raise WorkerError("the process died") from error
            raise
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def _read(self, timeout: float) -> Any:
        """Reads one answer. The process writes only answers to its standard output."""
        assert self._process.stdout is not None
        end, data, size = time.monotonic() + timeout, b"", _HEAD.size
        while len(data) < size:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self._kill()
                raise WorkerTimeoutError(f"it took longer than {timeout:.3g} seconds")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                self._kill()
                raise WorkerError("the process died")
            data += piece
            if len(data) >= _HEAD.size:
                size = _HEAD.size + _HEAD.unpack_from(data)[0]
        return json.loads(data[_HEAD.size :])


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # nobody reads the data that is not flushed
                pipe.close()
    process.wait()


def _end_with(parent: int) -> None:
    """Ends this process as soon as its parent process has ended, even during a call."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def serve() -> None:
    """Answers calls from standard input until standard input ends.

    This is the main function of a worker process.
    """
    function, memory_mb = sys.argv[1:3]
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries must not write between answers
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    limit = int(memory_mb) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)

    def reply(value: dict[str, Any]) -> None:
        message = json.dumps(value).encode()
        answers.write(_HEAD.pack(len(message)) + message)
        answers.flush()

    reply({"ready": True})
    while head := requests.read(_HEAD.size):
        timeout, arguments = pickle.loads(requests.read(_HEAD.unpack(head)[0]))
        signal.setitimer(signal.ITIMER_REAL, timeout + 1.0)  # by default the signal kills
        try:
            answer = {"value": call(*arguments)}
        except Exception as error:  # noqa: BLE001 - an exception of any kind is an answer
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(answer)
