"""Confines a fork of the supervisor, and replaces it by the program. No step can be undone."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal

from . import kernel, landlock, seccomp
from .limits import PRIVATE_TMP, PROGRAM, Job, Limits, Pipes, Scratch
from .watch import NICE, SESSION_PARTS, priority

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
    """Confines this process and replaces it by the program.

    If a step fails, the function raises an exception. Otherwise it never returns.

    Args:
        job: description of the job.
        pipes: file descriptors of the job.
        uid: unprivileged user id and group id for the program; None to keep the current ids.
        scratch: directory in which the program may write.
        count: maximum number of processes that the user id may have.
        started: file descriptor on which bubblewrap reports that the program has started.
        shared_memory: whether the program may use anonymous shared memory. This is allowed only if
            the kernel counts such memory.
    """
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # If the machine runs out of memory, the kernel must kill this process, and not the trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    _set_limits(job.limits, count)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif os.geteuid() == 0 and job.backend != "none":
        raise OSError("a program never runs as root")
    # This call must follow the change of the user id, which would clear the setting.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o077)

    if job.backend == "bubblewrap":
        rules = os.memfd_create("filter", 0)
        os.write(rules, seccomp.compile_filter(False, False, shared_memory))
        os.lseek(rules, 0, os.SEEK_SET)
        _set_streams(pipes, keep=(pipes.source, rules, started))
        _give_way()
        _exec_bubblewrap(job, pipes.source, rules, started, shared_memory)
    os.chdir(scratch.path)
    _set_streams(pipes, keep=())
    if job.backend == "landlock":
        scoped = landlock.abi() >= landlock.SIGNAL_SCOPE_ABI
        code = seccomp.compile_filter(True, uid is None and not scoped, shared_memory)
        _give_way()
        landlock.restrict(job.readable, job.hidden, scratch.top, shared_memory)
        seccomp.install(code)
    elif job.backend != "none":
        raise ValueError(f"unknown isolation {job.backend!r}")
    command = _command(job, os.path.join(scratch.path, PROGRAM))
    os.execve(job.interpreter, command, environment(job, scratch.path))


def environment(job: Job, directory: str) -> dict[str, str]:
    """Returns the environment variables of a program; those of this process are not among them.

    Args:
        job: description of the job.
        directory: scratch directory of the program, as the program sees it.
    """
    variables = {
        "PATH": os.path.dirname(job.interpreter),
        "HOME": directory,
        "TMPDIR": directory,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
    }
    if job.import_path:
        variables["PYTHONPATH"] = os.pathsep.join(job.import_path)
    return variables


def _command(job: Job, program: str) -> list[str]:
    # -S and -s leave out site-packages, which halves the start-up time. -B writes no byte code.
    return [job.interpreter, "-S", "-s", "-B", program]


def _give_way() -> None:
    """Lowers the priority of this process. The program cannot raise the priority again."""
    # The watch lowers the priority further if the program starts several threads.
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        kernel.syscall(seccomp.number("ioprio_set"), 1, 0, _IDLE_IO)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(priority(SESSION_PARTS)))


def _set_limits(limits: Limits, count: int) -> None:
    seconds = math.ceil(limits.cpu_s)
    memory = limits.memory_mb << 20
    limit_pairs = {
        # At the soft limit the program gets SIGXCPU. If it ignores the signal, the hard limit ends
        # the program.
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
    for limit, (soft, hard) in limit_pairs.items():
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:  # the limits of the caller cannot be exceeded
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))


def _set_streams(pipes: Pipes, keep: tuple[int, ...]) -> None:
    """Makes the pipes the standard streams. Other descriptors except ``keep`` close at exec."""
    for number, end in enumerate((pipes.stdin, pipes.stdout, pipes.stderr)):
        os.dup2(end, number)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # the descriptor that listed the directory
                os.set_inheritable(descriptor, descriptor in keep)


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
    # Named shared memory is placed in the scratch space, so that the same limit covers it.
    arguments += ["--symlink", PRIVATE_TMP, "/dev/shm"]
    for path in job.readable:  # after the scratch space, because a library may be in /tmp
        arguments += ["--ro-bind", path, path]
        for directory in job.hidden:  # before the next path, which may be a library in this place
            if os.path.dirname(directory) == path:
                arguments += ["--size", "4096", "--tmpfs", directory]
    for target, path in job.links:
        arguments += ["--symlink", target, path]
    program = f"{PRIVATE_TMP}/{PROGRAM}"
    arguments += ["--file", str(source), program, "--chdir", PRIVATE_TMP]
    # All of these become read-only. The file system at / is in memory and has no size limit,
    # and through /proc a program could exempt itself from the kernel's out-of-memory killer.
    for path in ("/proc", *job.hidden, "/"):
        arguments += ["--remount-ro", path]
    arguments += ["--json-status-fd", str(started)]
    arguments += ["--seccomp", str(rules), "--", *_command(job, program)]
    os.execve(job.bwrap, arguments, {})
