"""Implements the supervisor of a program, which starts, watches and kills the program.

The supervisor also removes everything that the program leaves behind, and writes a report.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import resource
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

from . import cgroup, confine, kernel
from .limits import MEMORY, PROGRAM, Job, Pipes, Scratch
from .memory_pool import MemoryPool
from .watch import ProcessWatch, every_descendant, process_ids

# systemd's table of user ids lists this range as unused. It also exists in rootless containers.
UIDS = range(60578, 61184)

LOCKS = f"{'/run' if os.access('/run', os.W_OK) else '/tmp'}/coa_jax.sandbox.uids"
"""Lock file that only root can open. Byte N is locked while a program has the user id N."""

_SWEEP_S = 5.0
_REMOVAL_S = 2.0
"""Seconds that a report waits for the removal of files; a program may make very many."""


def supervise(job: Job, pipes: Pipes, home: cgroup.Group | None, pool: MemoryPool) -> None:
    """Runs a program to its end, and writes the report as JSON.

    The report has these keys:

    * ``reason``: why the program ended: "exit" (by itself or by a signal); a limit of `Limits`:
      "wall", "memory", "disk" or "processes"; "pool" (all programs together used too much memory,
      see `MemoryPool`); "cancelled" (see `Pipes.control`); or "fault" (the program could not be
      run).
    * ``code``: exit code, or 128 + number of the signal that ended the program. At the limit on
      processor time, the signal is SIGXCPU.
    * ``cpu_s``: processor time in seconds.
    * ``uid``: user id of the program.
    * ``directory``: path of the scratch space; "" if only the program could see it.
    * ``clean``: whether no process and no file of the program is left.
    * ``ended``: time at which all processes had ended, on the clock of ``time.monotonic``.
    * ``totals``: how the limits on all memory and all files were enforced, as text.
    * ``error``: explains the reason "fault" or "pool"; else "".

    Args:
        job: description of the job.
        pipes: file descriptors of the job.
        home: control group in which a group for the program can be created; None if there is none.
        pool: limits the memory of all programs of the server together.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    report: dict[str, Any] = {"reason": "fault", "code": None, "clean": True}
    report |= {"error": "", "directory": "", "uid": os.geteuid(), "totals": "", "cpu_s": 0.0}
    uid, scratch, group = None, Scratch("", "", True, True), None
    try:
        uid = claim_uid()
        if uid is not None:
            report["uid"] = uid
            for end in (pipes.stdin, pipes.stdout, pipes.stderr):
                os.fchown(end, uid, uid)  # so that the program can open /dev/stdin
        if home is not None and job.cgroup:
            group = cgroup.make_group(home, job.limits.memory_mb << 20)
        isolated = job.backend == "landlock" and job.namespaces and _new_namespaces()
        scratch = _scratch(job, pipes, uid, isolated)
        report["directory"] = scratch.path
        memory = f"cgroup v{group.version}" if group else "a watch"
        files = "a file system of their own" if scratch.bounded else "a watch"
        report["totals"] = f"memory by {memory}, files by {files}"
        report |= _run(job, pipes, uid, scratch, group, isolated, pool)
    except OSError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    finally:
        swept = _sweep(uid, group)
        removed = _remove(scratch, _REMOVAL_S) if swept else False
        report["clean"] = swept and removed is not False and report["clean"]
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The kernel leaves out killed processes of a namespace, whose time the watch has seen.
        report["cpu_s"] = max(report["cpu_s"], usage.ru_utime + usage.ru_stime)
        if group is not None:
            group.remove()
        os.write(pipes.report, json.dumps(report).encode())
        if removed is None:  # the answer does not wait for a slow file system
            os.close(pipes.report)
            _remove(scratch)


def claim_uid() -> int | None:
    """Reserves and returns a user id that no other program uses.

    The kernel counts the processes of a user id separately, and a program cannot access the
    processes of another user id. The kernel releases the reservation when this process ends.

    Returns:
        The user id; None if this process is not root.

    Raises:
        OSError: no user id is free, or another user owns the lock file.
    """
    if os.geteuid() != 0:
        return None
    locks = os.open(LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    info = os.fstat(locks)
    if info.st_uid != 0 or stat.S_IMODE(info.st_mode) & 0o077 or not stat.S_ISREG(info.st_mode):
        raise OSError(f"{LOCKS} must be a file that only root can open; remove it")
    # The search starts at different user ids, so that the next program rarely gets the user id of
    # an earlier program, which may have left something behind.
    first = os.getpid() % len(UIDS)
    for uid in (*UIDS[first:], *UIDS[:first]):
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, uid)
        except OSError:
            continue
        return uid
    raise OSError(f"all {len(UIDS)} sandbox uids are in use")


def _run(
    job: Job,
    pipes: Pipes,
    uid: int | None,
    scratch: Scratch,
    group: cgroup.Group | None,
    isolated: bool,
    pool: MemoryPool,
) -> dict[str, object]:
    failure_read, failure_write = os.pipe2(os.O_CLOEXEC)
    started_read, started_write = os.pipe2(os.O_CLOEXEC)
    # The kernel limits the number of processes of a user id. A program without a user id of its own
    # shares this number with its caller, so that `watch` must enforce the limit.
    count = job.limits.processes + 2 + (0 if uid is not None else _tasks_of(os.geteuid()))
    helpers = 2 if job.backend == "bubblewrap" else int(isolated)
    watch = ProcessWatch(job.limits, scratch, group, pool, helpers)

    def told(error: Exception) -> None:
        os.write(failure_write, f"{type(error).__name__}: {error}".encode())

    def program() -> None:
        try:
            confine.become_program(
                job, pipes, uid, scratch, count, started_write, shared_memory=group is not None
            )
        except Exception as error:
            told(error)

    child = os.fork()
    if child == 0:
        try:
            if group is not None:
                group.enter()
            if isolated:
                _be_init(program, keep=failure_write)
            program()
        except OSError as problem:
            told(problem)
        finally:
            os._exit(127)
    for end in (failure_write, started_write, pipes.stdin, pipes.stdout, pipes.stderr):
        os.close(end)
    reason = watch.wait(child, pipes.control)
    _kill([child])  # the id is not reused, because the process is a zombie until the wait below
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 128 - status if status < 0 else status
    clean = _sweep(uid, group)
    ended = time.monotonic()
    report = {"clean": clean, "ended": ended, "cpu_s": watch.cpu_s}
    if reason == "cpu":  # as if the kernel had ended the program at its limit for one process
        return {**report, "reason": "exit", "code": 128 + signal.SIGXCPU}
    if reason == "exit":
        reason = watch.last_look() or reason
    error = os.read(failure_read, 4096).decode() if clean else ""
    wrapped = clean and reason == "exit" and job.backend == "bubblewrap"
    # If bubblewrap does not report the exit code of the program, the program has not started.
    if wrapped and b"exit-code" not in os.read(started_read, 4096):
        error = error or "bubblewrap did not start the program"
    if error:
        reason = "fault"
    if reason == "pool":
        error = f"all programs together held more than {pool.limit >> 20} MiB, this one the most"
    return {**report, "reason": reason, "code": code, "error": error}


def _new_namespaces() -> bool:
    """Creates new namespaces for the children of this process; returns whether this succeeded.

    This process itself gets a new mount namespace, in which it may mount file systems.
    """
    user, group = os.geteuid(), os.getegid()
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNS
    if user != 0:
        flags |= kernel.CLONE_NEWUSER
    try:
        kernel.unshare(flags)
    except OSError:
        return False
    if user != 0:  # without these maps, no file can be created in a new file system
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return True


def _be_init(program: Callable[[], None], keep: int) -> None:
    """Runs as the first process of a namespace, and starts the program as its child.

    This process reaps all processes, and ends with the exit code of the program. The kernel then
    kills every process that is left in the namespace.

    Args:
        program: function that becomes the program.
        keep: file descriptor that stays open.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    main = os.fork()
    if main == 0:
        try:
            program()
        finally:
            os._exit(127)
    os.closerange(0, keep)
    os.closerange(keep, 1024)
    while True:
        process, status = os.wait()
        if process == main:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _tasks_of(uid: int) -> int:
    count = 0
    for process in process_ids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process}").st_uid == uid:
                count += len(os.listdir(f"/proc/{process}/task"))
    return count


def _sweep(uid: int | None, group: cgroup.Group | None) -> bool:
    """Kills and reaps all descendants of this process.

    This process is a subreaper: orphans become its children. Therefore no descendant is left when
    no child is left.

    Returns:
        Whether no descendant is left; False if some are left after five seconds.
    """
    end = time.monotonic() + _SWEEP_S
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > end:
            return False
        if group is not None:
            group.kill()
        _kill(every_descendant(os.getpid()))
        if uid is not None:
            _kill_all_of(uid)
        time.sleep(0.001)


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        # New children are forbidden first, so that a fork bomb cannot be faster than the signals.
        # This fails for processes that have ended or belong to another user.
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(process, resource.RLIMIT_NPROC, (0, 0))
        with contextlib.suppress(OSError):  # a higher priority lets the process end sooner
            os.setpriority(os.PRIO_PROCESS, process, 0)
            with open(f"/proc/{process}/autogroup", "w") as file:
                file.write("0")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _kill_all_of(uid: int) -> None:
    """Kills all processes of a user id with a single system call, which avoids races."""
    helper = os.fork()
    if helper == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


def _scratch(job: Job, pipes: Pipes, uid: int | None, isolated: bool) -> Scratch:
    """Creates a scratch directory with the source of the program.

    With bubblewrap no directory is created, because bubblewrap provides one in memory.
    """
    if job.backend == "bubblewrap":
        return Scratch("", "", bounded=True, in_memory=True)
    bounded = isolated and _mount_memory(job.limits.disk_mb)
    if bounded:
        directory = f"{MEMORY}/coa_jax"
        os.mkdir(directory, 0o700)
    else:
        directory = tempfile.mkdtemp(prefix="coa_jax_", dir=job.scratch)
    path = os.path.join(directory, PROGRAM)
    with open(pipes.source, "rb", closefd=False) as source, open(path, "wb") as copy:
        shutil.copyfileobj(source, copy)
    if uid is not None:
        os.chown(path, uid, uid)
        os.chown(directory, uid, uid)
    top = MEMORY if bounded else directory
    return Scratch(directory, top, bounded, bounded or kernel.is_memory(directory))


def _mount_memory(size_mb: int) -> bool:
    """Mounts a file system in memory at ``MEMORY``, which only this process and its children see.

    Args:
        size_mb: size of the file system in MiB.

    Returns:
        Whether the file system was mounted.
    """
    options = f"size={size_mb}m,nr_inodes={size_mb << 8},mode=1777"
    try:
        kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("coa_jax", MEMORY, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    except OSError:
        return False
    return True


def _remove(scratch: Scratch, seconds: float = math.inf) -> bool | None:
    """Removes the scratch directory, with any depth and modes.

    Directories are moved to the top before they are removed, so that no path of a deep tree exceeds
    the maximum length of a path.

    Returns:
        True if nothing is left, False if something cannot be removed, None if ``seconds`` have
        passed; another call continues.
    """
    end = time.monotonic() + seconds
    directory = scratch.path
    if scratch.bounded:
        return True  # the kernel removes the file system with the last process that sees it
    token = os.path.basename(directory)
    try:
        names = _without_files(directory)
        while names:
            if time.monotonic() > end:
                return None
            path = os.path.join(directory, names.pop())
            with contextlib.suppress(OSError):
                os.rmdir(path)  # most are empty, and a program may make very many
                continue
            os.chmod(path, 0o700)
            for name in _without_files(path):
                inner = os.path.join(path, name)
                with contextlib.suppress(OSError):
                    os.rmdir(inner)
                    continue
                os.chmod(inner, 0o700)  # moving a directory needs write permission in it
                names.append(f"{token}.{len(names)}.{os.stat(inner).st_ino}")
                os.rename(inner, os.path.join(directory, names[-1]))
            os.rmdir(path)
        os.rmdir(directory)
    except OSError:
        return False
    return True


def _without_files(directory: str) -> list[str]:
    """Removes all files of a directory, and returns the names of its directories."""
    names = []
    with os.scandir(directory) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
            else:
                os.unlink(entry.path)
    return names
