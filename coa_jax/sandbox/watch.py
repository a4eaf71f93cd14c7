"""Measures the resources of a running program, and reports which limit the program has exceeded.

If the kernel enforces a limit (by a memory control group, a separate file system, or the process
limit of a user id), the watch only asks the kernel. Other resources are measured so often that a
program is killed within a quarter of a second after it has exceeded a limit. If a program exceeds a
limit and ends before the next measurement, totals that the kernel counts over all its processes
show this.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import time

from .cgroup import Group
from .limits import PRIVATE_TMP, Limits, Scratch
from .memory_pool import MemoryPool

SESSION_PARTS = max(1, (os.cpu_count() or 1) // 2)
"""Divisor of the share of a session, for kernels that divide processors among sessions (autogroup).

The session of the trainer then has one share on all processors together.
"""

NICE = 7
"""Priority of a program with one thread: a fifth of the usual share of a processor."""

_FIRST_LOOK_S = 0.005
# Longest pause between two checks in seconds, if the watch measures or only asks the kernel.
_COUNTING_S, _ASKING_S = 0.02, 0.1
_SHARE_OF_CPU = 20  # checks take at most 1/20 of the time, as far as these pauses allow
_PRECISE_S = 0.05
_SPARE_PROCESSES = 4  # number of processes of the sandbox itself
_CPU_MARGIN_S = 1.0  # the kernel's own limit for a single process comes first
_TICKS = os.sysconf("SC_CLK_TCK")
# In /proc/PID/stat: session, processor time of the process (user, system) and of its children that
# have ended, number of threads, and start.
_STAT = (3, 11, 12, 13, 14, 17, 19)


class ProcessWatch:
    """Watches the processes of a program, and reports when a limit is exceeded.

    The processes must be descendants of this process.
    """

    def __init__(
        self,
        limits: Limits,
        scratch: Scratch,
        group: Group | None,
        pool: MemoryPool | None = None,
        helpers: int = 0,
    ) -> None:
        """Creates the watch of a program that has not started yet.

        Args:
            limits: limits of the program.
            scratch: scratch space of the program.
            group: memory control group of the program; None if it has none.
            pool: memory of all programs of the server; None if it has no limit.
            helpers: number of processes of the sandbox itself among the descendants.
        """
        self._pool, self._helpers = pool, helpers
        self._most_threads = 1
        self._used: dict[tuple[int, int], int] = {}  # (process, its start) -> clock ticks
        self.cpu_s = 0.0  # processor time of the program at the last look
        self._limits, self._scratch, self._group = limits, scratch, group
        self._start = _written([], scratch.in_memory)
        self._net = 0  # number of bytes written and not deleted, at the last check
        self._gross = 0  # number of bytes written, at the last check
        counting = group is None or not scratch.bounded
        self._longest_pause = _COUNTING_S if counting else _ASKING_S

    def wait(self, child: int, control: int) -> str:
        """Waits until the program has ended or must be killed.

        Args:
            child: id of the process whose end is the end of the program.
            control: file descriptor that becomes readable, or reaches its end, when the caller
                gives up.

        Returns:
            "exit" if the program has ended, "cancelled" if the caller has given up, or the name of
            the limit that the program has exceeded: "wall", "cpu", "memory", "disk", "processes" or
            "pool" (the memory of all programs together).
        """
        start = time.monotonic()
        end = start + self._limits.wall_s
        handle = os.pidfd_open(child)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.register(control, select.POLLIN | select.POLLHUP)
        pause = _FIRST_LOOK_S
        try:
            while True:
                pause_s = max(0.0, min(pause, end - time.monotonic()))
                ready = [descriptor for descriptor, _ in poll.poll(pause_s * 1000 + 1)]
                if handle in ready:
                    return self.look() or "exit"
                if ready:
                    return "cancelled"
                now = time.monotonic()
                if now >= end:
                    starved = min(self._starved_s(), self._limits.starved_s)
                    end = start + self._limits.wall_s + starved
                    if now >= end:
                        return "wall"
                if reason := self.look():
                    return reason
                cost = _SHARE_OF_CPU * (time.monotonic() - now)
                pause = min(2 * pause, self._longest_pause)
                pause = max(pause, min(cost, _ASKING_S))
        finally:
            os.close(handle)

    def look(self) -> str:
        """Measures the program once; returns the name of a limit that it has exceeded, else ""."""
        processes, limit = descendants(os.getpid()), self._limits.memory_mb << 20
        if self._group is not None:
            if self._group.exceeded():
                return "memory"
            held = self._group.held()
        else:
            held = _memory(processes, limit)
            if held > limit:
                return "memory"
        if self._pool is not None and self._pool.must_end(held):
            # Without a control group, the first figure may count shared pages more than once.
            if self._group is None:
                held = _memory(processes, 0)
            if self._pool.must_end(held):
                return "pool"
        return self._look_at_processes(processes) or self._look_at_files(processes)

    def _look_at_processes(self, processes: list[int]) -> str:
        threads, sessions = -self._helpers, set[int]()
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        counted = (reaped.ru_utime + reaped.ru_stime) * _TICKS
        for process in processes:
            session, user, system, *ended, tasks, start = _numbers(process, "stat", _STAT)
            threads += tasks
            sessions.add(session)
            counted += user + system + sum(ended)
            self._used[process, start] = user + system
        if threads > self._limits.processes + _SPARE_PROCESSES - self._helpers:
            return "processes"
        self._most_threads = max(self._most_threads, threads)
        if self._most_threads > 1:
            sessions_of_program = max(1, len(sessions) - (self._helpers > 0))
            give_way(processes, self._most_threads, sessions_of_program)
        # The kernel does not count children that nobody waited for; the sum over the processes that
        # were seen misses the time after the last look at them.
        self.cpu_s = max(counted, sum(self._used.values())) / _TICKS
        return "cpu" if self.cpu_s > math.ceil(self._limits.cpu_s) + _CPU_MARGIN_S else ""

    def last_look(self) -> str:
        """Returns the name of a limit that the ended program had exceeded; "" if there is none.

        Call this method after all processes of the program have ended.
        """
        if self._group is not None and self._group.exceeded():
            return "memory"
        return self._look_at_files([])

    def _look_at_files(self, processes: list[int]) -> str:
        limit = self._limits.disk_mb << 20
        if self._scratch.bounded:
            # Empty files take memory of the kernel, but no space in the file system.
            hidden = not self._scratch.path and _private_files(processes, limit) > limit >> 12
            return "disk" if hidden else ""
        if _disk_usage(self._scratch.path, limit) > limit:
            return "disk"
        gross, net = _written(processes, self._scratch.in_memory)
        gross, net = gross - self._start[0], net - self._start[1]
        # A file may be deleted but still open. Therefore the program may use as many bytes as were
        # written and not deleted at the last check, plus all bytes that were written since.
        held = max(net, self._net + gross - self._gross)
        if gross >= self._gross:  # while a process ends, its bytes may be missing
            self._net, self._gross = net, gross
        return "disk" if held > limit else ""

    def _starved_s(self) -> float:
        """Returns the time in seconds for which the program waited for processors.

        Only the time for which processes outside the program occupied the processors counts.
        """
        waited = ran_s = used = 0.0
        for process in descendants(os.getpid()):
            ran, delay = (number / 1e9 for number in _numbers(process, "schedstat", (0, 1)))
            used += sum(_numbers(process, "stat", (11, 12, 13, 14))) / _TICKS
            if delay > waited:
                waited, ran_s = delay, ran
        # While a process waits, only the other processes of the program can occupy processors.
        return max(0.0, waited - max(0.0, used - ran_s))


def process_ids() -> list[int]:
    """Returns the ids of all processes in ``/proc``, that is, of all that this process can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[int]:
    """Returns the ids of all descendants of a process, from the kernel's lists of children.

    A process that was just created may be missing.
    """
    processes = [root]
    for process in processes:  # the list grows meanwhile
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children") as file:
                    processes += map(int, file.read().split())
        except FileNotFoundError:
            if process == root:
                return every_descendant(root)  # a kernel without lists of children
        except OSError:
            continue
    return processes[1:]


def every_descendant(root: int) -> list[int]:
    """Returns the ids of all descendants of a process, by reading the parent of every process.

    This takes longer than `descendants`, but works on every kernel.
    """
    children: dict[int, list[int]] = {}
    for process in process_ids():
        parent = _numbers(process, "stat", (1,))[0]
        children.setdefault(parent, []).append(process)
    processes = [root]
    for process in processes:  # the list grows meanwhile
        processes += children.pop(process, [])
    return processes[1:]


def _numbers(process: int, name: str, places: tuple[int, ...]) -> list[int]:
    """Reads numbers from a file in /proc/PID. If the file cannot be read, the numbers are 0.

    Args:
        process: id of the process.
        name: name of the file.
        places: positions of the numbers, counted from the field after the name of the process.
    """
    try:
        with open(f"/proc/{process}/{name}", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return [int(fields[index]) for index in places]
    except (OSError, IndexError):
        return [0] * len(places)


def give_way(processes: list[int], threads: int, sessions: int) -> None:
    """Lowers the priority of a program's processes, so that all together get the time of one.

    `NICE` says how much of a processor's time this is.

    Args:
        processes: ids of the processes.
        threads: number of threads of all processes together. Each thread gets the priority for its
            part of the program's time.
        sessions: number of sessions of the processes. If the kernel divides processors among
            sessions (autogroup), the priorities of threads have no effect outside their session.
            The function therefore also sets the priority of each session.
    """
    nice = max(priority(threads), os.getpriority(os.PRIO_PROCESS, 0))
    of_session = priority(sessions * SESSION_PARTS)
    for process in processes:
        with contextlib.suppress(OSError):  # the process may have ended
            for task in os.listdir(f"/proc/{process}/task"):
                os.setpriority(os.PRIO_PROCESS, int(task), nice)
            with open(f"/proc/{process}/autogroup", "w") as file:
                file.write(str(of_session))


def priority(parts: int) -> int:
    """Returns the priority with which ``parts`` threads share the processor time of one program.

    One thread gets `NICE`. More than two threads get the lowest priority, with which they together
    have even less time. Priorities count on each processor separately. In a container that competes
    with others, the kernel divides the container's share among the processors that it uses.
    Programs on other processors therefore still take time from the trainer.
    """
    return NICE if parts == 1 else NICE + 3 if parts == 2 else 19  # a step is a factor of 1.25


def _memory(processes: list[int], limit: int) -> int:
    """Returns the memory of some processes in bytes, or an upper bound of at most ``limit``.

    The memory of a process consists of its private memory (also if swapped), its page tables, and a
    full buffer for each open file descriptor, because each descriptor may be a socket. Anonymous
    shared memory is not measured: if this watch measures memory, the system call filter forbids
    such memory.
    """
    lines = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
    private = {process: _kilobytes(process, "status", lines) for process in processes}
    bound = sum(private.values()) + _socket_bytes() * sum(map(_descriptors, processes))
    if bound <= limit:
        return bound
    # This bound may count pages that are shared since a fork, and sockets, more than once.
    end = time.monotonic() + _PRECISE_S
    total, sockets = 0, set[str]()
    shares = (b"Pss_Anon", b"SwapPss", b"Private_Hugetlb", b"Shared_Hugetlb")
    for process in sorted(private, key=private.__getitem__, reverse=True):
        most = private[process]
        if time.monotonic() > end:
            total += most
            continue
        # A page of n processes counts 1/n.
        total += min(most, _kilobytes(process, "smaps_rollup", shares)) or most
        sockets |= _socket_names(process)
    return total + _socket_bytes() * len(sockets)


def _kilobytes(process: int | str, name: str, labels: tuple[bytes, ...]) -> int:
    """Sums some lines of a file in /proc/PID, in bytes; 0 if the file cannot be read."""
    total = 0
    try:
        with open(f"/proc/{process}/{name}", "rb") as file:
            for line in file:
                label, _, value = line.partition(b":")
                if label in labels:
                    total += int(value.split()[0]) << 10
    except OSError:
        return 0
    return total


def _descriptors(process: int) -> int:
    try:
        path = f"/proc/{process}/fd"
        return os.stat(path).st_size or len(os.listdir(path))  # st_size is 0 before Linux 6.2
    except OSError:
        return 0


def _socket_names(process: int) -> set[str]:
    names = set()
    with contextlib.suppress(OSError):  # the process may have ended
        for entry in os.scandir(f"/proc/{process}/fd"):
            names.add(os.readlink(entry.path))
    return {name for name in names if name.startswith("socket:")}


def _socket_bytes() -> int:
    """Returns the maximum memory of a socket in bytes.

    This is the size of its buffer, which a program cannot enlarge, and the size of the last message
    that was accepted before the buffer was full.
    """
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return 2 * int(file.read())
    except OSError:
        return 2 * 212992


def _private_files(processes: list[int], limit: int) -> int:
    """Returns the number of files in the private /tmp of some processes.

    A process whose isolation is not complete sees other file systems. These are recognised by their
    size, which is much larger than ``limit`` bytes, and are not counted.
    """
    ours, most = os.stat(PRIVATE_TMP).st_dev, 0
    for process in processes:
        path = f"/proc/{process}/root{PRIVATE_TMP}"
        with contextlib.suppress(OSError):  # the process may have ended, or have no /tmp yet
            if os.stat(path).st_dev != ours:
                space = os.statvfs(path)
                if space.f_blocks * space.f_frsize <= 2 * limit:
                    most = max(most, space.f_files - space.f_ffree)
    return most


def _disk_usage(directory: str, limit: int) -> float:
    """Returns the number of bytes of all files in a directory tree.

    Counting stops when the number exceeds ``limit``. An empty file counts as 4096 bytes. The result
    is infinite if a directory cannot be read.
    """
    total = 0
    queue = [directory]
    while queue and total <= limit:
        folder = queue.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
                    if total > limit:
                        break
        except FileNotFoundError:
            continue  # the directory was removed meanwhile
        except PermissionError:
            if os.stat(folder).st_mode & 0o300 == 0o300:
                return math.inf  # the program can write here, but hides the content
        except OSError:
            return math.inf
    return total


def _written(processes: list[int], in_memory: bool) -> tuple[int, int]:
    """Returns (number of bytes written, number of these bytes that were not deleted).

    The numbers include the given processes, and all children that this process has reaped. They are
    very large if a process hides its numbers.

    Args:
        processes: ids of the processes.
        in_memory: whether the files are stored in memory.
    """
    gross = taken_back = 0
    names: list[int | str] = ["self", *processes]
    for process in names:
        try:
            with open(f"/proc/{process}/io") as file:
                figures = dict(line.split(": ") for line in file)
        except PermissionError:
            if _kilobytes(process, "status", (b"VmSize",)):  # no memory: the process is ending
                return 1 << 62, 1 << 62
        except OSError:
            continue  # the process has ended, or the kernel does not count bytes
        # `write_bytes` does not include writes to files in memory.
        gross += int(figures["wchar" if in_memory else "write_bytes"])
        taken_back += 0 if in_memory else int(figures["cancelled_write_bytes"])
    return gross, gross - taken_back
