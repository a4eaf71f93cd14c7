"""Turns a fork of the supervisor into the confined program, in irreversible steps."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal

from . import kernel, landlock, seccomp
from .limits import PRIVATE_TMP, PROGRAM, Job, Limits, Pipes, Scratch

_NICE = 5  # a third of the usual CPU share; with less, honest programs time out
_IDLE_IO = 3 << 13


def become_program(
    job: Job,
    pipes: Pipes,
    uid: int | None,
    scratch: Scratch,
    count: int,
    started: int,
    shared_memory: bool,
) -> None:
    """Confines this process and replaces it by the program; returns only by an exception.

    Args:
        job: the program and its limits.
        pipes: descriptors of the job.
        uid: unprivileged uid and gid to switch to; None to keep the current ones.
        scratch: directory where the program may write.
        count: limit of processes for the uid.
        started: descriptor on which bubblewrap reports that the program started.
        shared_memory: whether the kernel counts anonymous shared memory, so that the program may
            use it.
    """
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # When memory runs out, the kernel should kill this process first, never the trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    _set_limits(job.limits, count)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif os.geteuid() == 0 and job.backend != "none":
        raise OSError("a program never runs as root")
    # After the change of uid, which clears this setting.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o077)

    if job.backend == "bubblewrap":
        rules = os.memfd_create("filter", 0)
        os.write(rules, seccomp.compile_filter(False, False, shared_memory))
        os.lseek(rules, 0, os.SEEK_SET)
        _enter(pipes, keep=(pipes.source, rules, started))
        _give_way()
        _exec_bubblewrap(job, pipes.source, rules, started, shared_memory)
    os.chdir(scratch.path)
    _enter(pipes, keep=())
    if job.backend == "landlock":
        scoped = landlock.abi() >= landlock.SIGNAL_SCOPE_ABI
        code = seccomp.compile_filter(True, uid is None and not scoped, shared_memory)
        _give_way()
        landlock.restrict(job.readable, scratch.top, shared_memory)
        seccomp.install(code)
    elif job.backend != "none":
        raise ValueError(f"unknown isolation {job.backend!r}")
    program = os.path.join(scratch.path, PROGRAM)
    os.execve(job.interpreter, _command(job, program), environment(job, scratch.path))


def environment(job: Job, directory: str) -> dict[str, str]:
    """Returns all variables that a program sees: the same for each call and each machine."""
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": directory,
        "TMPDIR": directory,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if job.import_path:
        variables["PYTHONPATH"] = os.pathsep.join(job.import_path)
    return variables


def _command(job: Job, program: str) -> list[str]:
    # No site-packages (-S, -s), which halves the start-up time, and no byte code (-B).
    return [job.interpreter, "-S", "-s", "-B", program]


def _give_way() -> None:
    """Lowers the priority of this process; the program cannot undo that."""
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        kernel.syscall(seccomp.number("ioprio_set"), 1, 0, _IDLE_IO)
    # Where the kernel shares processors among sessions, the priority of a single process has no
    # effect.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(_NICE))


def _set_limits(limits: Limits, count: int) -> None:
    seconds = math.ceil(limits.cpu_s)
    memory = limits.memory_mb << 20
    wanted = {
        # The soft limit ends the program with SIGXCPU, the hard one if it ignores that.
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (limits.disk_mb << 20, limits.disk_mb << 20),
        resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
        resource.RLIMIT_NPROC: (count, count),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_SIGPENDING: (1024, 1024),
    }
    for limit, (soft, hard) in wanted.items():
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:  # the caller may have limits itself
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))


def _enter(pipes: Pipes, keep: tuple[int, ...]) -> None:
    """Moves the pipes to descriptors 0, 1, 2; of all others only ``keep`` survive exec."""
    for number, end in enumerate((pipes.stdin, pipes.stdout, pipes.stderr)):
        os.dup2(end, number)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in keep:
            try:
                os.set_inheritable(descriptor, False)
            except OSError:
                continue  # the descriptor that listed the directory
    for descriptor in keep:
        os.set_inheritable(descriptor, True)


def _exec_bubblewrap(job: Job, source: int, rules: int, started: int, shared_memory: bool) -> None:
    size = str(job.limits.disk_mb << 20)
    arguments = [job.bwrap, "--unshare-all", "--die-with-parent", "--new-session"]
    arguments += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    for name, value in environment(job, PRIVATE_TMP).items():
        arguments += ["--setenv", name, value]
    arguments += ["--proc", "/proc", "--size", size, "--tmpfs", PRIVATE_TMP]
    for device in ("null", "full", "random", "urandom", *(["zero"] if shared_memory else [])):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        arguments += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    arguments += ["--symlink", "/proc/self/fd", "/dev/fd"]
    # Named shared memory lies in the scratch space, so that one limit covers both.
    arguments += ["--symlink", PRIVATE_TMP, "/dev/shm"]
    for path in job.readable:  # after the scratch space, since a library may be below /tmp
        arguments += ["--ro-bind", path, path]
    for target, path in job.links:
        arguments += ["--symlink", target, path]
    program = f"{PRIVATE_TMP}/{PROGRAM}"
    arguments += ["--file", str(source), program, "--chdir", PRIVATE_TMP]
    # The rest of the new root is memory without a limit, and through /proc a program could exempt
    # itself from the kernel's out-of-memory killer: both become read-only.
    arguments += ["--remount-ro", "/proc", "--remount-ro", "/"]
    arguments += ["--json-status-fd", str(started)]
    arguments += ["--seccomp", str(rules), "--", *_command(job, program)]
    os.execve(job.bwrap, arguments, {})
