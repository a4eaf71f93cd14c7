"""Killable worker processes for work that may not end: parsing and algebra on untrusted input.

A worker starts once and answers many calls, because its imports take a second. A call that takes
too long, or a crash of a library, costs only the worker. A worker whose parent has died ends by
itself: its input ends, or the alarm that is set with every call kills it.
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
"""Environment variables that workers get; any other variable may be a key."""

_START_S = 30.0
"""Seconds that a worker may take to start and import its modules."""


class WorkerError(Exception):
    """The function raised an exception, or the process died."""


class WorkerTimeoutError(WorkerError):
    """The call took too long and was killed."""


class WorkerBusyError(WorkerError):
    """No process was free, or a new one did not start: the call was not made."""


class Workers:
    """Processes that run one function, each one call at a time; thread-safe."""

    def __init__(self, function: str, count: int | None = None, memory_mb: int = 4096):
        """Names the function; processes start when they are needed.

        Args:
            function: ``module:name``; its arguments must be picklable, its result must be JSON.
            count: maximum number of processes; by default one per processor and at most four.
            memory_mb: MiB of address space of each process.
        """
        self._function, self._memory_mb = function, memory_mb
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(count or min(4, os.cpu_count() or 1)):
            self._free.put(None)

    def ask(self, *arguments: Any, timeout: float, wait: float | None = None) -> Any:
        """Calls the function in a process and waits for the result.

        Args:
            arguments: arguments of the function.
            timeout: seconds for the call.
            wait: seconds to wait for a free process; None if ``timeout`` covers waiting and the
                call.

        Raises:
            WorkerBusyError: no process was free in time, or none can be started.
            WorkerTimeoutError: the call took longer.
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
            self._read(_START_S)  # its message that it is ready
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
        """Reads one answer; the process writes nothing else."""
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
            with contextlib.suppress(OSError):  # unflushed data has no reader any more
                pipe.close()
    process.wait()


def _end_with(parent: int) -> None:
    """Ends this process at any point as soon as its parent process has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def serve() -> None:
    """Answers calls on standard input until it ends: the main function of a worker."""
    function, memory_mb = sys.argv[1:3]
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries is not an answer
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
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(answer)
