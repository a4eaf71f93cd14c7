"""Defines the limits of a program, and the description of a job for the sandbox server."""

from __future__ import annotations

import dataclasses
import json

PROGRAM = "program.py"
"""File name under which a program is stored and run."""

PRIVATE_TMP = "/tmp"
"""Path of a program's scratch space in bubblewrap, as the program sees it."""

MEMORY = "/dev/shm"
"""Path of a program's scratch space under Landlock, if it is a separate file system."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on a program.

    The default limits on time and memory are those of the Chain-of-Agents paper (App A).

    Attributes:
        wall_s: wall time in seconds after which all processes of the program are killed.
        starved_s: maximum time in seconds that is added to ``wall_s``, for the time in which the
            program was ready to run but other processes occupied the processors.
        cpu_s: limit in seconds on the processor time of each process, which the kernel enforces. A
            second limit, on the sum over all processes, is one second higher.
        memory_mb: limit in MiB on the address space of each process, and on the memory of all
            processes together. With a control group, scratch space in memory is included.
        disk_mb: size of the private scratch space in MiB, which may contain 256 files per MiB.
        processes: maximum number of concurrent processes and threads.
        open_files: maximum number of file descriptors of each process.
        output_bytes: number of bytes of stdout and stderr together, after which the program is
            killed.
    """

    wall_s: float = 7.0
    cpu_s: float = 5.0
    memory_mb: int = 5120
    disk_mb: int = 64
    processes: int = 8
    open_files: int = 128
    output_bytes: int = 4 << 20
    starved_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """The description of a job: everything that the sandbox server must know to run a program.

    Attributes:
        backend: kind of isolation: "bubblewrap", "landlock" or "none".
        interpreter: absolute path of the Python interpreter that runs the program.
        readable: existing absolute paths that the program may read and execute.
        hidden: directories inside ``readable`` paths that the program may not read, except for
            paths that ``readable`` lists too.
        links: (target, path) of each symbolic link that the program sees in addition to the
            ``readable`` paths, such as ``/lib``.
        import_path: directories that are added to the program's ``sys.path``.
        scratch: directory in which the scratch directory is created, if the program has no private
            file system.
        bwrap: path of the program bwrap (bubblewrap); "" if it is not installed.
        namespaces: whether to combine Landlock with namespaces; no effect if the machine has none.
        cgroup: whether to limit the memory by a control group; no effect if the machine has none.
        limits: limits of the program.
    """

    backend: str
    interpreter: str
    readable: tuple[str, ...]
    hidden: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    import_path: tuple[str, ...]
    scratch: str
    bwrap: str
    namespaces: bool
    cgroup: bool
    limits: Limits

    def encode(self) -> bytes:
        """Encodes the job as JSON bytes, for the sandbox server; `decode` is the inverse."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Job:
        """Decodes a job from the JSON bytes of `encode`."""
        fields = json.loads(data)
        return Job(**{**fields, "limits": Limits(**fields["limits"])})


@dataclasses.dataclass(frozen=True)
class Pipes:
    """The file descriptors of a job, which `run.run` sends to the sandbox server.

    Attributes:
        source: file with the source of the program.
        stdin, stdout, stderr: standard streams of the program.
        control: pipe that becomes readable, or reaches its end, when the program must be killed,
            because nobody waits for its result or its output is too long.
        report: pipe for the report of `supervise.supervise`, as JSON.
    """

    source: int
    stdin: int
    stdout: int
    stderr: int
    control: int
    report: int


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The scratch space of a program, which is the directory in which the program may write.

    Attributes:
        path: path of the directory; "" if only the program can see it, as with bubblewrap.
        top: directory below which the program may write: with Landlock and a separate file system,
            the directory where this is mounted, which contains ``path``; else the same as ``path``.
        bounded: whether the directory is a separate file system, whose size the kernel limits.
        in_memory: whether the files of the directory are stored in memory.
    """

    path: str
    top: str
    bounded: bool
    in_memory: bool
