"""What one program may use up, and the job description that goes to the server."""

from __future__ import annotations

import dataclasses
import json

PROGRAM = "program.py"
"""Name of the file in which a program lies."""

PRIVATE_TMP = "/tmp"
"""Where a program in bubblewrap sees its scratch space."""

MEMORY = "/dev/shm"
"""Where a program under Landlock sees its scratch space, if that is a file system of its own."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budgets of one program.

    The defaults of time and memory are those of the paper's code sandbox (paper App. A).

    Attributes:
        wall_s: seconds of wall time until everything is killed.
        starved_s: seconds at most by which that is put off where the program was ready to run but
            other work had the processors.
        cpu_s: seconds of processor time for each process.
        memory_mb: MiB of address space for each process, and of memory for all processes
            together; with a control group that includes scratch space in memory.
        disk_mb: MiB of private scratch space, with a file for each 4 KiB at most.
        processes: processes and threads at a time.
        open_files: file descriptors of each process.
        output_bytes: bytes that are read from stdout and stderr together before the kill.
    """

    wall_s: float = 7.0
    cpu_s: float = 5.0
    memory_mb: int = 5120
    disk_mb: int = 64
    processes: int = 48
    open_files: int = 128
    output_bytes: int = 4 << 20
    starved_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything the server has to know to run one program.

    Attributes:
        backend: "bubblewrap", "landlock" or "none".
        interpreter: absolute path of the python that runs the program.
        readable: existing absolute paths that the program may read and execute.
        links: (target, path) of symbolic links at the top of the file system.
        import_path: directories that are added to the program's ``sys.path``.
        scratch: directory below which a private one is made where there is no private /tmp.
        bwrap: path of bubblewrap, or "".
        namespaces: whether Landlock is helped by namespaces where there are any.
        cgroup: whether a control group limits the memory where this machine lets us make one.
        limits: the budgets.
    """

    backend: str
    interpreter: str
    readable: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    import_path: tuple[str, ...]
    scratch: str
    bwrap: str
    namespaces: bool
    cgroup: bool
    limits: Limits

    def encode(self) -> bytes:
        """The job as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Job:
        """The job that ``encode`` wrote."""
        fields = json.loads(data)
        return Job(**{**fields, "limits": Limits(**fields["limits"])})


@dataclasses.dataclass(frozen=True)
class Pipes:
    """Descriptors of one job.

    Attributes:
        source: file with the program.
        stdin, stdout, stderr: the ends that the program gets.
        control: readable, or at its end, when the client gives up.
        report: where the report is written as JSON.
    """

    source: int
    stdin: int
    stdout: int
    stderr: int
    control: int
    report: int


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Where one program may write.

    Attributes:
        path: its directory; "" where only the program sees it.
        top: directory below which it may write.
        bounded: the kernel bounds its size, because it is a file system of its own.
        in_memory: its files are memory.
    """

    path: str
    top: str
    bounded: bool
    in_memory: bool
