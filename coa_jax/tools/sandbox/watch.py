"""Measures the resources of a running program, and reports which limit it has exceeded.

Where the kernel enforces a total (a memory control group, scratch space in memory, the process
limit of a uid), the watch only asks the kernel. Elsewhere it measures itself, often enough to kill
a program within a quarter of a second after it exceeded a limit. Totals that the kernel sums over
all processes of the program catch a program that is faster than the watch.
"""

from __future__ import annotations

import math
import os
import select
import time

from .cgroup import Group
from .limits import PRIVATE_TMP, Limits, Scratch

_FIRST_LOOK_S = 0.005
_COUNTING_S, _ASKING_S = 0.02, 0.1  # longest pause between checks: measuring, or asking the kernel
_SHARE_OF_CPU = 20  # checks take one in this many seconds, within the pauses above
_PRECISE_S = 0.05
_SPARE_PROCESSES = 4  # those of the sandbox itself
_TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Watches the child processes of this process, which belong to one program."""

    def __init__(self, limits: Limits, scratch: Scratch, group: Group | None) -> None:
        """Starts to watch.

        Args:
            limits: limits of the program.
            scratch: scratch space of the program.
            group: memory control group of the program; None without one.
        """
        self._limits, self._scratch, self._group = limits, scratch, group
        self._start = _written([], scratch.in_memory)
        self._net = 0  # bytes written and not deleted, at the last check
        self._gross = 0  # bytes written, at the last check
        counting = group is None or not scratch.bounded
        self._longest_pause = _COUNTING_S if counting else _ASKING_S

    def wait(self, child: int, control: int) -> str:
        """Waits for the first reason to end: "exit", "cancelled", or the name of a limit.

        Args:
            child: process whose end is the end of the program.
            control: descriptor that becomes readable, or reaches its end, when the caller gives up.
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
                left = max(0.0, min(pause, end - time.monotonic()))
                ready = [descriptor for descriptor, _ in poll.poll(left * 1000 + 1)]
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
        """Returns the name of a limit that the program has exceeded, or ""."""
        processes = descendants(os.getpid())
        if self._group is not None:
            if self._group.exceeded():
                return "memory"
        elif _holds_more(processes, self._limits.memory_mb << 20):
            return "memory"
        threads = [_numbers(process, "stat", (17,))[0] for process in processes]
        if sum(threads) > self._limits.processes + _SPARE_PROCESSES:
            return "processes"
        return self._look_at_files(processes)

    def last_look(self) -> str:
        """Like ``look``, for the time after all processes have ended and were reaped."""
        if self._group is not None and self._group.exceeded():
            return "memory"
        return self._look_at_files([])

    def _look_at_files(self, processes: list[int]) -> str:
        limit = self._limits.disk_mb << 20
        if self._scratch.bounded:
            # Empty files take kernel memory but no space of the file system.
            hidden = not self._scratch.path and _private_files(processes, limit) > limit >> 12
            return "disk" if hidden else ""
        if _disk_usage(self._scratch.path, limit) > limit:
            return "disk"
        gross, net = _written(processes, self._scratch.in_memory)
        gross, net = gross - self._start[0], net - self._start[1]
        # Files may be deleted, or open without a name. The program can hold at most the bytes
        # written and not deleted at the last check, plus all bytes written since.
        held = max(net, self._net + gross - self._gross)
        if gross >= self._gross:  # otherwise a process is just ending and its bytes are missing
            self._net, self._gross = net, gross
        return "disk" if held > limit else ""

    def _starved_s(self) -> float:
        """Returns the seconds in which the program was ready, but others had the processors."""
        waited = used = 0.0
        for process in descendants(os.getpid()):
            waited = max(waited, _numbers(process, "schedstat", (1,))[0] / 1e9)
            used += sum(_numbers(process, "stat", (11, 12, 13, 14))) / _TICKS
        return max(0.0, waited - used)  # its own processes do not count as others


def process_ids() -> list[int]:
    """Returns all processes of the machine that this process can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[int]:
    """Returns the processes below ``root`` now; a process that is just starting may be missing."""
    found: list[int] = []
    queue = [root]
    while queue:
        process = queue.pop()
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children") as file:
                    below = list(map(int, file.read().split()))
                found += below
                queue += below
        except FileNotFoundError:
            if process == root:
                return every_descendant(root)  # a kernel without lists of children
        except OSError:
            continue
    return found


def every_descendant(root: int) -> list[int]:
    """Finds the processes below ``root`` from the parent of each process of the machine."""
    children: dict[int, list[int]] = {}
    for process in process_ids():
        parent = _numbers(process, "stat", (1,))[0]
        children.setdefault(parent, []).append(process)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.pop(queue.pop(), [])
        found += below
        queue += below
    return found


def _numbers(process: int, name: str, places: tuple[int, ...]) -> list[int]:
    """Reads numbers of a file below /proc/PID, by position after the process name.

    The numbers are zeros if the file is unreadable.
    """
    try:
        with open(f"/proc/{process}/{name}", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return [int(fields[place]) for place in places]
    except (OSError, IndexError):
        return [0] * len(places)


def _holds_more(processes: list[int], limit: int) -> bool:
    """Returns whether processes together hold more than ``limit`` bytes.

    A process holds its private memory, including swapped memory, its page tables, and a full buffer
    for each open descriptor, which may be a socket. Anonymous shared memory does not occur: where
    this watch measures, the system call filter forbids it.
    """
    private = {process: _private(process) for process in processes}
    bound = sum(private.values()) + _socket_bytes() * sum(map(_descriptors, processes))
    if bound <= limit:
        return False
    # Pages shared since a fork, and sockets, may have been counted twice.
    end = time.monotonic() + _PRECISE_S
    total, sockets = 0, set[str]()
    for process in sorted(private, key=private.__getitem__, reverse=True):
        if time.monotonic() > end:
            total += private[process]
            continue
        total += _proportional(process, private[process])
        sockets |= _socket_names(process)
    return total + _socket_bytes() * len(sockets) > limit


def _private(process: int) -> int:
    wanted = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
    return _kilobytes(process, "status", wanted)


def _proportional(process: int, most: int) -> int:
    """Returns private memory, where a page of n processes counts 1/n for each."""
    wanted = (b"Pss_Anon", b"SwapPss", b"Private_Hugetlb", b"Shared_Hugetlb")
    return min(most, _kilobytes(process, "smaps_rollup", wanted)) or most


def _kilobytes(process: int | str, name: str, wanted: tuple[bytes, ...]) -> int:
    """Sums lines of a file below /proc/PID, in bytes; 0 if the file cannot be read."""
    total = 0
    try:
        with open(f"/proc/{process}/{name}", "rb") as file:
            for line in file:
                label, _, value = line.partition(b":")
                if label in wanted:
                    total += int(value.split()[0]) << 10
    except OSError:
        return 0
    return total


def _descriptors(process: int) -> int:
    try:
        path = f"/proc/{process}/fd"
        return os.stat(path).st_size or len(os.listdir(path))  # st_size since Linux 6.2
    except OSError:
        return 0


def _socket_names(process: int) -> set[str]:
    names = set()
    try:
        for entry in os.scandir(f"/proc/{process}/fd"):
            name = os.readlink(entry.path)
            if name.startswith("socket:"):
                names.add(name)
    except OSError:
        pass  # it has ended
    return names


def _socket_bytes() -> int:
    """Returns the maximum memory of a socket: its buffer, which a program cannot enlarge, and the
    last message that was accepted before the buffer was full.
    """
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return 2 * int(file.read())
    except OSError:
        return 2 * 212992


def _private_files(processes: list[int], limit: int) -> int:
    """Counts files in the private /tmp that processes see.

    A process that is still being isolated sees other file systems; they are larger than ``limit``
    bytes and do not count.
    """
    ours, most = os.stat(PRIVATE_TMP).st_dev, 0
    for process in processes:
        path = f"/proc/{process}/root{PRIVATE_TMP}"
        try:
            if os.stat(path).st_dev != ours:
                space = os.statvfs(path)
                if space.f_blocks * space.f_frsize <= 2 * limit:
                    most = max(most, space.f_files - space.f_ffree)
        except OSError:
            continue  # it has ended, or has no /tmp yet
    return most


def _disk_usage(directory: str, limit: int) -> float:
    """Returns the bytes below a directory, counted until they exceed ``limit``.

    A file without content counts as one block. The result is infinite if a directory is unreadable.
    """
    total = 0
    queue = [directory]
    while queue and total <= limit:
        place = queue.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
                    if total > limit:
                        break
        except FileNotFoundError:
            continue  # was just removed
        except PermissionError:
            if os.stat(place).st_mode & 0o300 == 0o300:
                return math.inf  # the program can write here, but hides the content
        except OSError:
            return math.inf
    return total


def _written(processes: list[int], in_memory: bool) -> tuple[int, int]:
    """Returns (bytes written, bytes of them not deleted) by processes and reaped children.

    Children reaped by this process count too. The result is infinite if a process hides the
    numbers.
    """
    gross = taken_back = 0
    names: list[int | str] = ["self", *processes]
    for process in names:
        try:
            with open(f"/proc/{process}/io") as file:
                figures = dict(line.split(": ") for line in file)
        except PermissionError:
            if _kilobytes(process, "status", (b"VmSize",)):  # otherwise it is just ending
                return 1 << 62, 1 << 62
        except OSError:
            continue  # it has ended, or the kernel does not count
        # Writes to memory do not count as written to a device.
        gross += int(figures["wchar" if in_memory else "write_bytes"])
        taken_back += 0 if in_memory else int(figures["cancelled_write_bytes"])
    return gross, gross - taken_back
