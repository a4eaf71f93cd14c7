"""The limits of one program, and the job description that goes to the server."""

from __future__ import annotations

import dataclasses
import json

PROGRAM = "program.py"
"""File name of a program."""

PRIVATE_TMP = "/tmp"
"""Path at which a program in bubblewrap sees its scratch space."""

MEMORY = "/dev/shm"
"""Path at which a program under Landlock sees its scratch space, if that is a separate file
system.
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one program.

    The default time and memory limits are those of the paper's code sandbox (paper App. A).

    Attributes:
        wall_s: seconds of wall time until everything is killed.
        starved_s: maximum number of seconds added to ``wall_s`` for the time in which the program
            was ready to run but other processes had the processors.
        cpu_s: seconds of processor time for each process.
        memory_mb: MiB of address space for each process, and of memory for all processes together.
            With a control group this includes scratch space in memory.
        disk_mb: MiB of private scratch space, with at most one file per 4 KiB.
        processes: concurrent processes and threads.
        open_files: file descriptors of each process.
        output_bytes: bytes of stdout and stderr together, after which the program is killed.
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
    """All data that the server needs to run one program.

    Attributes:
        backend: "bubblewrap", "landlock" or "none".
        interpreter: absolute path of the Python that runs the program.
        readable: existing absolute paths that the program may read and execute.
        links: (target, path) of symbolic links at the top of the file system.
        import_path: directories added to the program's ``sys.path``.
        scratch: parent of the private scratch directory, where there is no private /tmp.
        bwrap: path of bubblewrap, or "".
        namespaces: whether Landlock is combined with namespaces if they are available.
        cgroup: whether a control group limits the memory if this machine allows one.
        limits: limits of the program.
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
        """Encodes the job as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Job:
        """Decodes a job from ``encode``."""
        fields = json.loads(data)
        return Job(**{**fields, "limits": Limits(**fields["limits"])})


@dataclasses.dataclass(frozen=True)
class Pipes:
    """Descriptors of one job.

    Attributes:
        source: file with the program.
        stdin, stdout, stderr: the ends that the program gets.
        control: becomes readable, or reaches its end, when the client gives up.
        report: receives the report as JSON.
    """

    source: int
    stdin: int
    stdout: int
    stderr: int
    control: int
    report: int


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The directory where one program may write.

    Attributes:
        path: the directory; "" if only the program sees it.
        top: directory below which the program may write.
        bounded: whether the kernel limits its size, because it is a separate file system.
        in_memory: whether its files are stored in memory.
    """

    path: str
    top: str
    bounded: bool
    in_memory: bool
