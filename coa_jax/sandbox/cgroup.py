"""Limits the memory of a program with a control group (cgroup), if this machine allows one.

The kernel then counts all memory that a program uses: private and shared memory, files in memory,
page tables, pipes, sockets and the kernel's own data. The kernel kills a program at the moment when
an allocation exceeds the limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time

PREFIX = "coa_jax_"
_STALE_S = 60.0
_WEIGHT = 21  # of 100, the weight of `watch.NICE`
_REMOVE_S = 0.2


@dataclasses.dataclass(frozen=True)
class Group:
    """A control group of one program, or a parent group in which such groups are created.

    Attributes:
        path: directory of the group.
        version: 1 or 2, the version of the cgroup interface.
    """

    path: str
    version: int

    def enter(self) -> None:
        """Moves this process into the group. The process must have only one thread.

        Raises:
            OSError: the kernel refuses.
        """
        # In version 1, writing to `tasks` moves one thread without a lock of the whole machine.
        _write(self.path, "tasks" if self.version == 1 else "cgroup.procs", "0")

    def exceeded(self) -> bool:
        """Returns whether the kernel has killed a process of the group at the memory limit."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = dict(line.split() for line in _read(self.path, name).splitlines())
        return int(fields.get("oom_kill", 0)) > 0

    def held(self) -> int:
        """Returns the memory that the processes of the group use, in bytes."""
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int(_read(self.path, name))

    def kill(self) -> None:
        """Kills all processes of the group. Does nothing if the kernel does not support this."""
        if self.version == 2:
            with contextlib.suppress(OSError):  # the file exists since Linux 5.14
                _write(self.path, "cgroup.kill", "1")

    def remove(self) -> None:
        """Removes the group. All its processes must have ended."""
        end = time.monotonic() + _REMOVE_S
        while True:
            try:
                return os.rmdir(self.path)
            except OSError:  # the last process is still exiting
                if time.monotonic() > end:
                    return  # `make_group` removes the group later
            time.sleep(0.001)


def find() -> Group | None:
    """Finds a control group in which this process can create groups that limit its children.

    The function tries the control groups of this process and their parents. It forks a child for
    each test, which is safe only if this process has no other threads.

    Returns:
        The first control group in which this works; None if there is none.
    """
    for home in _candidates():
        try:
            group = make_group(home, 64 << 20)
        except OSError:
            continue
        child = os.fork()
        if child == 0:
            try:
                group.enter()
                os._exit(0)
            except OSError:
                os._exit(1)
        entered = os.waitpid(child, 0)[1] == 0
        try:
            group.exceeded()
        except (OSError, ValueError):
            entered = False
        group.remove()
        if entered:
            return home
    return None


def make_group(home: Group, memory: int) -> Group:
    """Creates a control group for a program.

    Args:
        home: control group in which the group is created.
        memory: memory limit of the group in bytes.

    Raises:
        OSError: the kernel refuses.
    """
    _remove_stale(home.path)
    group = Group(os.path.join(home.path, f"{PREFIX}{os.getpid()}"), home.version)
    with contextlib.suppress(OSError):  # an earlier process with this id may have left a group
        os.rmdir(group.path)
    os.mkdir(group.path)
    try:
        if home.version == 1:
            _write(group.path, "memory.limit_in_bytes", str(memory))
            with contextlib.suppress(FileNotFoundError):  # some kernels do not count swap
                _write(group.path, "memory.memsw.limit_in_bytes", str(memory))
        else:
            _write(group.path, "memory.max", str(memory))
            _write(group.path, "memory.oom.group", "1")
            with contextlib.suppress(FileNotFoundError):
                _write(group.path, "memory.swap.max", "0")
            # A group has one share on all processors, by default as much as that of the trainer.
            with contextlib.suppress(FileNotFoundError):  # the home does not divide processors
                _write(group.path, "cpu.weight", str(max(1, _WEIGHT // (os.cpu_count() or 1))))
    except OSError:
        os.rmdir(group.path)
        raise
    return group


def machine_memory() -> int:
    """Returns the memory in bytes of this machine, or of the container if that is less."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path, top, version in _memory_groups():
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        while path.startswith(top):
            with contextlib.suppress(OSError, ValueError):  # the top has no file; or it says "max"
                sizes.append(int(_read(path, name)))
            if path == top:
                break
            path = os.path.dirname(path)
    return min(sizes)


def _candidates() -> list[Group]:
    groups = []
    for path, top, version in _memory_groups():
        groups += [Group(parent, 2) for parent in _delegated(path, top)] if version == 2 else []
        groups += [Group(path, 1)] if version == 1 else []
    return groups


def _memory_groups() -> list[tuple[str, str, int]]:
    """Returns (path, topmost path, version) of each group that may limit this process."""
    mounts = []
    for line in _read("/proc/self", "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounts.append((kind, fields[3], fields[4]))
    groups = []
    for line in _read("/proc/self", "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for kind, root, point in mounts:
            group_path = os.path.join(point, os.path.relpath(path, root))
            if kind == "cgroup2" and controllers == "":
                groups.append((os.path.normpath(group_path), point, 2))
            elif kind == "cgroup" and "memory" in controllers.split(","):
                groups.append((group_path if os.path.isdir(group_path) else point, point, 1))
    return groups


def _delegated(path: str, top: str) -> list[str]:
    """Returns the paths of a group and its parents that give children the memory controller."""
    paths, path = [], os.path.normpath(path)
    while path.startswith(top):
        with contextlib.suppress(OSError):
            if "memory" in _read(path, "cgroup.subtree_control").split():
                paths.append(path)
        if path == top:
            break
        path = os.path.dirname(path)
    return paths


def _remove_stale(path: str) -> None:
    """Removes groups whose creator was killed before it could remove them."""
    for name in os.listdir(path):
        maker = name.removeprefix(PREFIX)
        if maker == name or os.path.exists(f"/proc/{maker}"):
            continue
        group = os.path.join(path, name)
        with contextlib.suppress(OSError):
            if time.time() - os.stat(group).st_mtime > _STALE_S:
                os.rmdir(group)


def _read(path: str, name: str) -> str:
    with open(os.path.join(path, name)) as file:
        return file.read()


def _write(path: str, name: str, value: str) -> None:
    with open(os.path.join(path, name), "w") as file:
        file.write(value)
