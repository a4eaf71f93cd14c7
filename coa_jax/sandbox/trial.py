"""Runs hostile programs, and checks that nothing outside the sandbox has changed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .attacks import Attack, Targets
from .limits import PROGRAM, Job
from .memory_attacks import measure
from .run import ProgramResult, SandboxError, run

_SETTLE_S = 3.0
_CONTENT = "precious"


class Scene:
    """Files and sockets outside the sandbox that hostile programs attack in a test of the sandbox.

    After a program, `damage` tells what the program has changed or reached.
    """

    def __init__(self, directories: list[Path], listeners: dict[str, socket.socket]) -> None:
        self.files = [directory / "file" for directory in directories]
        for path in self.files:
            path.write_text(_CONTENT)
            path.chmod(0o666)  # everybody may write, so that only the sandbox protects the file
        self._directories = directories
        self._listeners = listeners
        self.targets = Targets(
            files=tuple(map(str, self.files)),
            directories=tuple(map(str, (*directories, Path.home()))),
            tcp_port=listeners["tcp"].getsockname()[1],
            udp_port=listeners["udp"].getsockname()[1],
            abstract=listeners["abstract"].getsockname()[1:].decode(),
            unix=listeners["unix"].getsockname(),
            marker=f"{10**6 + secrets.randbelow(10**6)}.25",
        )

    def damage(self, result: ProgramResult) -> list[str]:
        """Describes everything that a program has changed or reached outside the sandbox.

        Args:
            result: result of the program.

        Returns:
            One description per change; [] if the program has changed and reached nothing.
        """
        traces = []
        for path, directory in zip(self.files, self._directories, strict=True):
            if not path.exists() or path.read_text() != _CONTENT:
                traces.append(f"{path} was changed")
            elif path.stat().st_mode & 0o777 != 0o666:
                traces.append(f"the mode of {path} was changed")
            ours = (path, Path(self.targets.unix))
            traces += [f"{new} was made" for new in directory.iterdir() if new not in ours]
        for name, listener in self._listeners.items():
            with contextlib.suppress(BlockingIOError):
                listener.recv(1) if name in ("udp", "unix") else listener.accept()
                traces.append(f"something arrived at the {name} listener")
        return traces + _remains(result.uid, self.targets.marker)


def _remains(uid: int, marker: str) -> list[str]:
    """Describes the processes and directories of a program that are left after three seconds."""
    end = time.monotonic() + _SETTLE_S
    while True:
        remains = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                ours = entry.stat().st_uid == uid
                program = any(part.endswith(f"/{PROGRAM}".encode()) for part in arguments)
                if marker.encode() in arguments or (ours and (program or uid != os.geteuid())):
                    remains.append(f"process {entry.name} is left: {arguments[:2]}")
        for path in Path(tempfile.gettempdir()).glob("coa_jax_*"):
            with contextlib.suppress(OSError):
                if path.stat().st_uid == uid and (path / PROGRAM).exists():
                    remains.append(f"directory {path} is left")
        if not remains or time.monotonic() > end:
            return remains
        time.sleep(0.05)


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """Creates a `Scene` for hostile programs, and removes it when the context ends."""
    with contextlib.ExitStack() as stack:
        directories = []
        for parent in (Path.home(), Path(tempfile.gettempdir())):
            directory = Path(tempfile.mkdtemp(prefix=".coa_jax_trial_", dir=parent))
            stack.callback(shutil.rmtree, directory)
            directory.chmod(0o777)
            directories.append(directory)
        abstract = f"\0coa_jax_trial_{secrets.token_hex(8)}"
        socket_path = str(directories[-1] / "socket")
        kinds: dict[str, tuple[int, int, Any]] = {
            "unix": (socket.AF_UNIX, socket.SOCK_DGRAM, socket_path),
            "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, abstract),
        }
        listeners = {}
        for name, (family, kind, address) in kinds.items():
            listener = stack.enter_context(socket.socket(family, kind))
            listener.bind(address)
            listener.setblocking(False)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            listeners[name] = listener
        os.chmod(socket_path, 0o666)
        yield Scene(directories, listeners)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The result of running a hostile program.

    Attributes:
        wrong: descriptions of everything that went wrong, such as an attack that succeeded; () if
            the program was contained.
        seconds: time in seconds from the start of the program to its end.
        over_mb: MiB by which the program exceeded its limit; 0 if the program does not report how
            much it uses.
        over_s: time in seconds for which the program continued after it had exceeded its limit.
    """

    wrong: tuple[str, ...]
    seconds: float
    over_mb: float = 0.0
    over_s: float = 0.0


async def attempt(job: Job, attack: Attack, around: Scene) -> Attempt:
    """Runs a hostile program, and checks whether it was contained.

    Args:
        job: description of the job, with `attacks.TRIAL_LIMITS`.
        attack: the hostile program.
        around: scene that the program must not change.
    """
    start = time.monotonic()
    try:
        result = await run(job, attack.source, keep=1 << 17)
    except SandboxError as error:
        return Attempt((f"the sandbox failed: {error}",), time.monotonic() - start)
    seconds = time.monotonic() - start
    faults = around.damage(result)
    over_mb = over_s = 0.0
    if attack.exceeds:
        limit = job.limits.memory_mb if attack.exceeds == "memory" else job.limits.disk_mb
        most, over_s = measure(result.stdout.head, limit, result.ended)
        over_mb = max(0.0, most - limit)
    if attack.exceeds and over_mb == 0.0:
        pass  # the program stayed within its limit, so any end is acceptable
    elif result.reason not in attack.endings:
        faults.append(f"it ended by {result.reason!r}, not by {' or '.join(attack.endings)}")
    elif result.reason == "exit" and not result.stdout.head.startswith(attack.says):
        output = result.stdout.head.strip() or result.stderr.tail.strip()
        faults.append(f"it said {output[-300:]!r}")
    after = await run(job, "print(6 * 7)")
    if after.stdout.head != "42\n":
        faults.append(f"the next program failed: {after.stderr.tail.strip()!r}")
    return Attempt(tuple(faults), seconds, over_mb, over_s)


LEAST_SHARE = 0.5
"""Part of a busy processor that `share_beside` must leave to a process outside the sandbox."""

_BUSY = """
import os, sys, time
for _ in range(44):
    try:
        if os.fork() == 0:
            break
    except OSError:
        break
os.sched_setaffinity(0, {%d})
while True:
    pass
"""
_REFERENCE = """
import os, time
os.sched_setaffinity(0, {%d})
used, end = time.process_time(), time.monotonic() + %g
while time.monotonic() < end:
    pass
print(time.process_time() - used)
"""
_SETTLED_S, _MEASURED_S, _PAIRS = 0.5, 1.0, 3


async def share_beside(job: Job) -> float:
    """Returns the share of a processor that programs leave to a busy process outside the sandbox.

    All run on one processor: the process outside, and two programs, as many as the code tool runs
    for each processor by default. Each program tries to run 45 busy processes.

    Args:
        job: description of the job that runs the programs.

    Returns:
        The processor time of the process outside, divided by its time without the programs: the
        median of three pairs of measurements.
    """
    processor = min(os.sched_getaffinity(0))
    limits = dataclasses.replace(job.limits, wall_s=60.0, cpu_s=60.0)
    job, shares = dataclasses.replace(job, limits=limits), []

    async def used() -> float:
        command = [sys.executable, "-S", "-c", _REFERENCE % (processor, _MEASURED_S)]
        reference = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        return float((await reference.communicate())[0])

    for _ in range(_PAIRS):
        alone = await used()
        calls = [asyncio.create_task(run(job, _BUSY % processor)) for _ in range(2)]
        await asyncio.sleep(_SETTLED_S)
        shares.append(await used() / alone)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return statistics.median(shares)
