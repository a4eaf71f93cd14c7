"""Runs a function in the sandbox, in processes that answer many calls.

The function handles what strangers wrote, such as web pages. Its process can read only the Python
interpreter, the packages that it needs, and the calls.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import select
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from coa_jax.sandbox.isolation import Isolation, reachable
from coa_jax.sandbox.limits import Job, Limits
from coa_jax.sandbox.run import SERVER, SandboxError
from coa_jax.tools import worker
from coa_jax.tools.code_libraries import find_libraries
from coa_jax.tools.worker import WorkerBusyError, Workers

_LIMITS = Limits(
    wall_s=2 * worker.LIFE_S,
    cpu_s=2 * worker.LIFE_S,
    memory_mb=worker.MEMORY >> 20,
    disk_mb=8,
    processes=4,
    open_files=64,
)
_KILL_S = 10.0
_PROGRAM = """
import json, os, types
from multiprocessing.connection import Connection

def load(name, source):
    module = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module

connection = Connection(os.dup(0))
null = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(null, stream)
try:
    function = getattr(load({module!r}, {source!r}), {name!r})
    {warm_up}
    answer = load("worker", {worker!r}).answer
except Exception as error:
    connection.send_bytes(json.dumps({{"error": f"{{type(error).__name__}}: {{error}}"}}).encode())
else:
    answer(function, connection)
"""


def isolated_workers(
    function: str, isolation: Isolation, packages: Sequence[str], warm_up: str = "pass"
) -> Workers:
    """Creates a pool of processes in the sandbox that run a function. No process is started yet.

    Args:
        function: the function as ``module:name``. The module must not import `coa_jax`.
        isolation: kind of sandbox.
        packages: installed distributions that the module imports.
        warm_up: a Python statement that a process runs at its start, such as slow imports.

    Raises:
        UserError: programs in the sandbox cannot read the packages, and pip cannot install copies.
    """
    module, _, name = function.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    program = _PROGRAM.format(
        module=module,
        name=name,
        source=Path(spec.origin).read_text(),
        worker=Path(worker.__file__).read_text(),
        warm_up=warm_up,
    )
    job = isolation.job(_LIMITS, _directories(isolation, packages))
    return Workers(function, start=functools.partial(_start, job, program))


def _directories(isolation: Isolation, packages: Sequence[str]) -> tuple[str, ...]:
    """Returns directories from which programs in the sandbox can import packages.

    These are directories of this Python, unless the sandbox needs another version of Python or
    cannot read them. Then pip installs the same versions of the packages for the sandbox.
    """
    installed = [importlib.metadata.distribution(name) for name in packages]
    places = tuple(dict.fromkeys(str(one.locate_file("")) for one in installed))
    same = isolation.interpreter.version.split(".")[:2] == list(map(str, sys.version_info[:2]))
    if same and all(map(reachable, places)):
        return places
    requirements = [f"{one.name}=={one.version}" for one in installed]
    return find_libraries(requirements, isolation.interpreter).directories


def _start(job: Job, program: str, function: str, theirs: Connection) -> _SandboxChild:
    try:
        return _SandboxChild(job, program, theirs.fileno())
    except (OSError, SandboxError) as error:
        raise WorkerBusyError(f"the process for {function} did not start: {error}") from error


class _SandboxChild:
    """A process in the sandbox, with the attributes of `worker.Child`.

    The supervisor of the sandbox kills the process when the pipe ``control`` ends. This also
    happens when the process of this object ends.
    """

    def __init__(self, job: Job, program: str, channel: int):
        """Starts the process, whose standard streams are ``channel``, a connected socket."""
        self.returncode: int | None = None
        (self._report, report), (control, self._control) = _pipe(), _pipe()
        with report, control, io.FileIO(os.memfd_create("program"), "r+") as source:
            source.write(program.encode())
            source.seek(0)
            ends = [source, control, report]
            program_fd, control_fd, report_fd = (end.fileno() for end in ends)
            SERVER.send(job.encode(), [program_fd, *[channel] * 3, control_fd, report_fd])

    def poll(self, wait_s: float = 0.0) -> int | None:
        """Returns the ``returncode`` of the process; None if it runs for ``wait_s`` seconds."""
        if self.returncode is None and select.select([self._report], [], [], wait_s)[0]:
            report = json.loads(self._report.readall() or "{}")
            code = report.get("code")
            self.returncode = 1 if code is None else 128 - code if code > 128 else code
        return self.returncode

    def kill(self) -> None:
        """Kills the process; does not wait for its end."""
        self._control.close()

    def wait(self) -> int:
        """Waits until the process has ended, but at most `_KILL_S` seconds."""
        code = self.poll(_KILL_S)
        return 1 if code is None else code


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    reads, writes = os.pipe()
    return io.FileIO(reads, "r"), io.FileIO(writes, "w")
