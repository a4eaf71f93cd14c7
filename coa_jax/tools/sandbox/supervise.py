"""The life of one program, seen from its supervisor: start, watch, kill, clean up, report."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable

from . import confine, kernel
from .limits import PROGRAM, Job, Limits, Pipes

# systemd's table of uids lists this range as unused; it also exists in rootless containers.
UIDS = range(60578, 61184)

_SWEEP_S = 5.0
_WATCH_MIN_S, _WATCH_MAX_S = 0.02, 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")


def supervise(job: Job, pipes: Pipes) -> None:
    """Runs one program to its end and writes the report.

    The report has ``reason`` ("exit", "wall", "memory", "disk", "processes", "cancelled" or
    "fault"), ``code`` (exit code, 128 + number for a signal), ``cpu_s``, ``uid``,
    ``directory`` (scratch space, "" if it was in memory), ``clean`` (nothing is left)
    and ``error`` (why there was a fault).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    report: dict[str, object] = {"reason": "fault", "code": None, "clean": True}
    report |= {"error": "", "directory": ""}
    lock, uid = claim_uid()
    report["uid"] = os.geteuid() if uid is None else uid
    directory = ""
    try:
        directory = _scratch_directory(job, pipes, uid)
        report["directory"] = directory
        report |= _run(job, pipes, uid, directory)
    except OSError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    finally:
        report["clean"] = _sweep(uid) and _remove(directory) and report["clean"]
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        report["cpu_s"] = usage.ru_utime + usage.ru_stime
        if lock is not None:
            lock.close()
        os.write(pipes.report, json.dumps(report).encode())


def claim_uid() -> tuple[socket.socket | None, int | None]:
    """A uid that no other program has, and the lock that says so; (None, None) unless root.

    The lock is an abstract socket: the kernel frees it with the process.  With a uid of its
    own a program has a process count of its own and cannot touch its neighbours.
    """
    if os.geteuid() != 0:
        return None, None
    # Not the first free one: the next call shall not meet what an earlier one might have left.
    first = os.getpid() % len(UIDS)
    for uid in (*UIDS[first:], *UIDS[:first]):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0coa_jax.sandbox.uid.{uid}")
        except OSError:
            lock.close()
            continue
        return lock, uid
    raise OSError(f"all {len(UIDS)} sandbox uids are in use")


def _run(job: Job, pipes: Pipes, uid: int | None, directory: str) -> dict[str, object]:
    failure_read, failure_write = os.pipe2(os.O_CLOEXEC)
    started_read, started_write = os.pipe2(os.O_CLOEXEC)
    isolated = job.backend == "landlock" and job.namespaces and _new_namespaces()
    limits = job.limits
    # The kernel counts the processes of a uid.  Without a uid of its own the program shares
    # that count with its caller, and the watch below is what bounds it.
    count = limits.processes + 2 + (0 if uid is not None else _tasks_of(os.geteuid()))

    def program() -> None:
        try:
            confine.become_program(job, pipes, uid, directory, count, started_write)
        except Exception as error:
            os.write(failure_write, f"{type(error).__name__}: {error}".encode())

    child = os.fork()
    if child == 0:
        try:
            if isolated:
                _be_init(program, keep=failure_write)
            program()
        finally:
            os._exit(127)
    for end in (failure_write, started_write, pipes.stdin, pipes.stdout, pipes.stderr):
        os.close(end)
    reason = _watch(child, pipes.control, limits, directory)
    os.kill(child, signal.SIGKILL)  # a zombie until the wait below, so never a stranger
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 128 - status if status < 0 else status
    clean = _sweep(uid)
    error = os.read(failure_read, 4096).decode() if clean else ""
    wrapped = clean and reason == "exit" and job.backend == "bubblewrap"
    # Its exit code is the program's only if it says so; else it failed on the way there.
    if wrapped and b"exit-code" not in os.read(started_read, 4096):
        error = error or "bubblewrap did not start the program"
    if error:
        reason = "fault"
    return {"reason": reason, "code": code, "clean": clean, "error": error}


def _new_namespaces() -> bool:
    """Whether the children of this process will live in a process namespace of their own."""
    wanted = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    if os.geteuid() != 0:
        wanted |= kernel.CLONE_NEWUSER
    try:
        kernel.unshare(wanted)
    except OSError:
        return False
    return True


def _be_init(program: Callable[[], None], keep: int) -> None:
    """First process of a namespace: starts the program, reaps, ends with its exit code.

    When it ends the kernel kills every process that is left in the namespace.
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


def _watch(child: int, control: int, limits: Limits, directory: str) -> str:
    """Waits for the first reason to end: "exit", "cancelled", or the name of a limit."""
    end = time.monotonic() + limits.wall_s
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLIN | select.POLLHUP)
    pause = _WATCH_MIN_S
    try:
        while True:
            wait = max(0.0, min(pause, end - time.monotonic()))
            ready = [descriptor for descriptor, _ in poll.poll(wait * 1000 + 1)]
            if handle in ready:
                return "exit"
            if ready:
                return "cancelled"
            start = time.monotonic()
            if start >= end:
                return "wall"
            processes = descendants(os.getpid())
            if sum(map(_resident, processes)) > limits.memory_mb << 20:
                return "memory"
            if len(processes) > limits.processes + 4:
                return "processes"
            if directory and _disk_usage(directory) > limits.disk_mb << 20:
                return "disk"
            # Looking costs time too: never more than a twentieth of a processor.
            cost = 20 * (time.monotonic() - start)
            pause = max(cost, min(2 * pause, _WATCH_MAX_S))
    finally:
        os.close(handle)


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[int]:
    """Processes below ``root``, by the parent that /proc names."""
    children: dict[int, list[int]] = {}
    for process in _process_ids():
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(process)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.pop(queue.pop(), [])
        found += below
        queue += below
    return found


def _resident(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0
    # Shared pages are the interpreter and its libraries, counted for nobody.
    return (int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0


def _tasks_of(uid: int) -> int:
    count = 0
    for process in _process_ids():
        try:
            if os.stat(f"/proc/{process}").st_uid == uid:
                count += len(os.listdir(f"/proc/{process}/task"))
        except OSError:
            continue
    return count


def _disk_usage(directory: str) -> float:
    """Bytes below a directory; infinite where it is too deep to look at.

    An empty file counts as a block, so the limit bounds their number too.
    """
    total = 0
    queue = [directory]
    while queue:
        try:
            with os.scandir(queue.pop()) as entries:
                for entry in entries:
                    total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
        except (FileNotFoundError, PermissionError):
            continue  # just removed, or closed to the program as well
        except OSError:
            return math.inf
    return total


def _sweep(uid: int | None) -> bool:
    """Kills and reaps every descendant; False if one is left after some seconds.

    Orphans become children of this process (it is their subreaper), so no child left means
    that nothing is left.
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
        _kill(descendants(os.getpid()))
        if uid is not None:
            _kill_all_of(uid)
        time.sleep(0.001)


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        # First no more children, so that a fork bomb cannot outrun the kills.  The process may
        # be gone, or not ours to limit: then the signal decides.
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(process, resource.RLIMIT_NPROC, (0, 0))
        try:
            os.kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _kill_all_of(uid: int) -> None:
    """One kill for all processes of a uid, which no race can escape."""
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


def _scratch_directory(job: Job, pipes: Pipes, uid: int | None) -> str:
    """A private directory with the program in it; bubblewrap makes its own in memory."""
    if job.backend == "bubblewrap":
        return ""
    directory = tempfile.mkdtemp(prefix="coa_jax_", dir=job.scratch)
    path = os.path.join(directory, PROGRAM)
    with open(pipes.source, "rb", closefd=False) as source, open(path, "wb") as copy:
        shutil.copyfileobj(source, copy)
    if uid is not None:
        os.chown(path, uid, uid)
        os.chown(directory, uid, uid)
    return directory


def _remove(directory: str) -> bool:
    """Removes a tree whatever its depth and modes; False if something is left.

    Directories are first moved up to the top, so no path gets longer than the system allows.
    """
    if not directory:
        return True
    token = os.path.basename(directory)
    try:
        names = os.listdir(directory)
        while names:
            path = os.path.join(directory, names.pop())
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                for entry in list(entries):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)  # moving a directory writes into it
                    names.append(f"{token}.{len(names)}.{entry.inode()}")
                    os.rename(entry.path, os.path.join(directory, names[-1]))
            os.rmdir(path)
        os.rmdir(directory)
    except OSError:
        return False
    return True
