"""Sends programs to the sandbox server and collects their results, asynchronously."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import functools
import io
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from .limits import PRIVATE_TMP, Job

GRACE_S = 6.0
"""Time in seconds after ``wall_s`` that the server has to kill the program and clean up."""


class SandboxError(Exception):
    """Raised if the sandbox fails for a reason other than the program."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """What is kept of a program's output stream: its beginning, its end and its length.

    Attributes:
        head: first characters of the stream.
        tail: last characters of the stream. They overlap ``head`` if the stream is short.
        length: number of characters of the whole stream.
    """

    head: str
    tail: str
    length: int

    def clip(self, room: int) -> str:
        """Returns the stream as text; if it is too long, a notice replaces its middle.

        Args:
            room: maximum number of characters without the notice. It must not be larger than the
                number of characters that were kept at each end.
        """
        if self.length <= room:
            return self.head[: self.length]
        front = room // 2
        back = self.tail[len(self.tail) - (room - front) :]
        left_out = self.length - room
        return f"{self.head[:front]}\n[... {left_out} characters left out ...]\n{back}"

    def rename(self, old: str, new: str) -> Captured:
        """Returns the stream with the text ``old`` replaced by ``new``."""
        if old not in self.head and old not in self.tail:
            return self
        head, tail = self.head.replace(old, new), self.tail.replace(old, new)
        complete = self.length <= len(self.head)
        return Captured(head, tail, len(head) if complete else self.length)


@dataclasses.dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    Attributes:
        stdout, stderr: output of the program.
        reason: why the program ended: "exit" (by itself or by a signal), or the limit of `Limits`
            at which it was stopped: "wall", "memory", "disk", "processes" or "output". At the limit
            on processor time, it is "exit" and ``code`` is 128 + SIGXCPU.
        code: exit code, or 128 + number of the signal that ended the program; None if ``reason`` is
            not "exit".
        cpu_s: processor time of the program and its sandbox, in seconds.
        uid: user id of the program.
        ended: time at which all processes of the program had ended, on the clock of
            ``time.monotonic``.
        totals: how the limits on all memory and all files were enforced, such as "memory by cgroup
            v2, files by a watch".
    """

    stdout: Captured
    stderr: Captured
    reason: str
    code: int | None
    cpu_s: float
    uid: int
    ended: float = 0.0
    totals: str = ""


class _Reader(asyncio.Protocol):
    """Reads a pipe to its end, and keeps only the beginning and the end of the text."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head, self._tail, self._length = "", "", 0
        self.flood: Flood | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if self.flood is not None:
            data = self.flood.admit(data)
        self._add(self._decoder.decode(data))

    def connection_lost(self, error: Exception | None) -> None:
        self._add(self._decoder.decode(b"", final=True))
        if not self.closed.done():
            self.closed.set_result(None)

    def _add(self, text: str) -> None:
        self._length += len(text)
        if len(self._head) < self._keep:
            self._head += text[: self._keep - len(self._head)]
        self._tail = (self._tail + text[-self._keep :])[-self._keep :]

    def captured(self) -> Captured:
        return Captured(self._head, self._tail, self._length)


class _Feeder(asyncio.BaseProtocol):
    """Closes the program's standard input, unless the program has closed it."""

    lost = False

    def stop(self, writer: asyncio.WriteTransport) -> None:
        if not self.lost:
            writer.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True


class Flood:
    """Counts the bytes of a program's output, and has the program killed at the limit.

    Output after the limit is dropped.
    """

    def __init__(self, budget: int, give_up: int) -> None:
        self._left = budget
        self._give_up = give_up
        self.passed = False

    def admit(self, data: bytes) -> bytes:
        """Returns the beginning of a program's output that is still within the limit on its size.

        The first byte over the limit sets ``passed`` and has the program killed.

        Args:
            data: the next bytes of the output.
        """
        admitted = data[: self._left]
        self._left -= len(admitted)
        if len(admitted) < len(data) and not self.passed:
            self.passed = True
            os.write(self._give_up, b"!")
        return admitted


class SandboxServer:
    """The connection of this process to its sandbox server, a small process that runs programs.

    The server is started when it is first needed, and restarted if it has died.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._close: weakref.finalize | None = None
        self.process_id = 0

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The server is loaded outside the package and without site-packages, to start quickly.
        start = (
            "import importlib, sys; sys.path.append(sys.argv[1])\n"
            "importlib.import_module(f'{sys.argv[2]}.server').serve(int(sys.argv[3]))"
        )
        folder = Path(__file__).resolve().parent
        words = [str(folder.parent), folder.name, str(theirs.fileno())]
        command = [sys.executable, "-I", "-S", "-B", "-c", start, *words]
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                start_new_session=True,  # Ctrl-C must reach only the caller, which stops the server
            )
        self._socket, self.process_id = ours, process.pid
        self._close = weakref.finalize(self, _stop, ours, process)

    def send(self, message: bytes, descriptors: list[int]) -> None:
        """Sends a job to the server.

        Args:
            message: the encoded job.
            descriptors: file descriptors of the job.

        Raises:
            SandboxError: the server cannot be reached, even after a restart.
        """
        with self._lock:
            for attempt in (1, 2):
                try:
                    if self._socket is None:
                        self._start()
                    assert self._socket is not None
                    socket.send_fds(self._socket, [message], descriptors)
                    return
                except OSError as error:
                    self._stop()
                    if attempt == 2:
                        raise SandboxError(f"the sandbox server is gone: {error}") from error

    def _stop(self) -> None:
        if self._close is not None:
            self._close()
        self._socket, self._close = None, None


def _stop(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()


SERVER = SandboxServer()


class _NoReportError(SandboxError):
    """Says that the server or the supervisor was killed."""


async def run(
    job: Job,
    source: str,
    stdin: str = "",
    keep: int = 1 << 16,
    streams: tuple[int, int] | None = None,
) -> ProgramResult:
    """Runs a program in the sandbox, and returns its result.

    If this coroutine is cancelled, the program and all its processes are killed.

    Args:
        job: description of the job.
        source: Python source of the program.
        stdin: text on the program's standard input.
        keep: number of characters that are kept at the beginning and at the end of each output
            stream.
        streams: file descriptors that become the program's standard input and standard output, for
            example to connect two programs. They are closed here. ``stdin`` then has no effect, and
            the result contains no standard output.

    Raises:
        SandboxError: the sandbox could not run the program, or could not clean up after it.
    """
    try:
        return await _run_once(job, source, stdin, keep, streams)
    except _NoReportError:
        if streams is not None:
            raise
        # A program in the sandbox has no side effects, so it can run again with a new server.
        return await _run_once(job, source, stdin, keep)


async def _run_once(
    job: Job, source: str, stdin: str, keep: int, streams: tuple[int, int] | None = None
) -> ProgramResult:
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:  # an end that is closed already may be closed again

        def opened(descriptor: int, mode: str) -> io.FileIO:
            return stack.enter_context(io.FileIO(descriptor, mode))

        def pipe() -> tuple[io.FileIO, io.FileIO]:
            reads, writes = os.pipe()
            return opened(reads, "r"), opened(writes, "w")

        program = opened(os.memfd_create("program"), "r+")
        program.write(source.encode("utf-8", "replace"))
        program.seek(0)
        input_read, input_write = pipe()
        control_read, control_write = pipe()  # its end kills a program that is still running
        readers, outputs = [], []
        for size in (keep, keep, 1 << 16):
            reads, writes = pipe()
            transport, reader = await loop.connect_read_pipe(
                functools.partial(_Reader, size), reads
            )
            stack.callback(transport.close)
            readers.append(reader)
            outputs.append(writes)
        out, error, report = readers
        out.flood = error.flood = Flood(job.limits.output_bytes, control_write.fileno())

        stdin_end, stdout_end = input_read, outputs[0]
        if streams is not None:
            stdin_end, stdout_end = opened(streams[0], "r"), opened(streams[1], "w")
        theirs = [program, stdin_end, stdout_end, outputs[1], control_read, outputs[2]]
        SERVER.send(job.encode(), [end.fileno() for end in theirs])
        for end in (*theirs, input_read, outputs[0]):
            end.close()
        writer, feeder = await loop.connect_write_pipe(_Feeder, input_write)
        stack.callback(feeder.stop, writer)
        writer.write(stdin.encode("utf-8", "replace"))
        writer.write_eof()

        patience = job.limits.wall_s + job.limits.starved_s + GRACE_S
        done, _ = await asyncio.wait([report.closed], timeout=patience)
        if not done:
            raise SandboxError(f"the sandbox server gave no report within {patience:g} s")
        await asyncio.wait([out.closed, error.closed], timeout=1.0)
        return _result(report.captured().head, out, error)


def _result(report: str, out: _Reader, error: _Reader) -> ProgramResult:
    if not report:
        raise _NoReportError("the sandbox server ended without a report")
    fields = json.loads(report)
    reason = fields["reason"]
    if reason == "fault":
        text = f"{fields['error']} {error.captured().head[:500]}".strip()
        raise SandboxError(f"the program could not be confined: {text}")
    if reason == "pool":
        raise SandboxError(fields["error"])
    if not fields["clean"]:
        raise SandboxError("the program left something behind that could not be removed")
    assert out.flood is not None
    if out.flood.passed:
        reason = "output"
    code = fields["code"] if reason == "exit" else None
    streams = [reader.captured() for reader in (out, error)]
    if fields["directory"]:  # a random name, which would make the output nondeterministic
        streams = [stream.rename(fields["directory"], PRIVATE_TMP) for stream in streams]
    usage = (fields[name] for name in ("cpu_s", "uid", "ended", "totals"))
    return ProgramResult(streams[0], streams[1], reason, code, *usage)
