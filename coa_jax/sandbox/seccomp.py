"""Forbids system calls by a BPF filter, on x86_64 and aarch64.

A forbidden system call returns EPERM, so that a harmless library can use another way instead of
crashing. A system call that is newer than the tables of this module returns ENOSYS, as on an older
kernel. A system call with the calling convention of another architecture kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from . import kernel

# Name -> (number on x86_64, number on aarch64). -1 means that the architecture has no such call.
FORBIDDEN = {
    # Sockets. Programs may only use pairs of connected streams (socketpair).
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    "setsockopt": (54, 208),  # larger buffers
    # Other processes: reading, tracing and controlling them.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
    # Namespaces and file systems.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "open_tree": (428, 428), "move_mount": (429, 429),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "mknod": (133, -1), "mknodat": (259, 33),
    # The machine.
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116),
    "vhangup": (153, 58), "personality": (135, 92), "iopl": (172, -1), "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    # Large or much-abused kernel interfaces.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # Memory that no limit of the process counts, or that outlives the process.
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # Locks on files that several programs share.
    "flock": (73, 32),
}  # fmt: skip

# Landlock does not control these calls. A program could use them to damage files of its user, or to
# fill the disk without being noticed.
METADATA = {
    "truncate": (76, 45), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1),
    "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "inotify_init": (253, -1), "inotify_init1": (294, 26),
    "fallocate": (285, 47),  # disk space that does not count as written
}  # fmt: skip

# These calls are forbidden only if neither a separate user id nor Landlock's signal scope protects
# other processes.
SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip

CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKETPAIR = (53, 199)
PRLIMIT64 = (302, 261)
SCHED_SETAFFINITY = (203, 122)
IOCTL = (16, 29)
FCNTL = (72, 25)
PRCTL = (157, 167)
MMAP = (9, 222)
NEWEST = 462  # mseal, Linux 6.10

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000
_CLONE_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that clone takes
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AND = 0x54
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_SHARED_AND_ANONYMOUS = 0x21
# These ioctls type into a terminal, paste into a console, and choose who receives a signal.
_IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902)
# F_SETOWN, F_SETSIG and F_SETOWN_EX choose who receives which signal. F_SETLEASE delays other
# processes that open a file. F_NOTIFY watches directories. F_SETPIPE_SZ enlarges a pipe's buffer.
_FCNTLS = (8, 10, 15, 1024, 1026, 1031)
_PRCTLS = (4,)  # PR_SET_DUMPABLE would hide a process from `watch`


def number(name: str) -> int:
    """Returns the number of a system call of ``FORBIDDEN`` on this machine.

    Raises:
        OSError: the architecture is neither x86_64 nor aarch64.
    """
    return FORBIDDEN[name][_architecture(os.uname().machine)[0]]


def _architecture(machine: str) -> tuple[int, int]:
    """Returns (index in the pairs of numbers, number of the architecture in a filter's input)."""
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    return _ARCHITECTURES[machine]


def compile_filter(
    metadata: bool, signals: bool, shared_memory: bool, machine: str | None = None
) -> bytes:
    """Assembles a filter that makes the kernel refuse the system calls in ``FORBIDDEN``.

    Args:
        metadata: whether to forbid changes of the modes, owners, times and attributes of files too.
        signals: whether to forbid sending signals too.
        shared_memory: whether to allow anonymous shared memory. It should be allowed only with a
            control group, because nothing else counts such memory.
        machine: architecture, "x86_64" or "aarch64"; None for the architecture of this machine.

    Returns:
        The filter as an array of ``struct sock_filter``.

    Raises:
        OSError: the architecture is neither x86_64 nor aarch64.
    """
    column, audit_arch = _architecture(machine or os.uname().machine)
    allow, refuse = (_RETURN, _ALLOW), (_RETURN, _ERRNO | errno.EPERM)
    missing = (_RETURN, _ERRNO | errno.ENOSYS)

    def argument(index: int) -> tuple[int, int]:
        return _LOAD, 16 + 8 * index  # the low half, because both architectures are little endian

    # An instruction is (operation, operand), for a jump with the numbers of instructions to skip
    # if the comparison is true and if it is false.
    code: list[tuple[int, ...]] = [
        (_LOAD, 4),
        (_EQUAL, audit_arch, 1, 0),
        (_RETURN, _KILL),
        (_LOAD, 0),
        (_GREATER, _X32_BIT - 1, 0, 1),
        (_RETURN, _KILL),
        (_GREATER, NEWEST, 0, 1),
        missing,
    ]

    def case(call: tuple[int, int], *answer: tuple[int, ...]) -> None:
        """Adds instructions to the filter that only run for one system call.

        Args:
            call: number of the system call on x86_64 and on aarch64.
            answer: the instructions, which allow or refuse the call.
        """
        code.extend([(_EQUAL, call[column], 0, len(answer)), *answer])

    forbidden = FORBIDDEN | (METADATA if metadata else {}) | (SIGNALS if signals else {})
    for call in forbidden.values():
        if call[column] >= 0:
            case(call, refuse)
    # A filter cannot read the flags of clone3, which are in memory. libc then uses clone.
    case(CLONE3, missing)
    case(CLONE, argument(0), (_ANY_BIT, _CLONE_NAMESPACES, 0, 1), refuse, allow)
    stream = ((_AND, _SOCK_TYPE), (_EQUAL, _SOCK_STREAM, 0, 1))
    case(SOCKETPAIR, argument(0), (_EQUAL, _AF_UNIX, 0, 4), argument(1), *stream, allow, refuse)
    for call in (PRLIMIT64, SCHED_SETAFFINITY):  # a process may change only its own limits
        case(call, argument(0), (_EQUAL, 0, 0, 1), allow, refuse)
    for call, index, values in ((IOCTL, 1, _IOCTLS), (FCNTL, 1, _FCNTLS), (PRCTL, 0, _PRCTLS)):
        jumps = [(_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
        case(call, argument(index), *jumps, allow, refuse)
    if not shared_memory:
        shared = ((_AND, _SHARED_AND_ANONYMOUS), (_EQUAL, _SHARED_AND_ANONYMOUS, 0, 1))
        case(MMAP, argument(3), *shared, refuse)
    code.append(allow)
    rows = ((*instruction, 0, 0)[:4] for instruction in code)
    return b"".join(
        struct.pack("=HBBI", operation, true, false, operand)
        for operation, operand, true, false in rows
    )


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(code: bytes) -> None:
    """Installs a filter in this process permanently. The process must have set no_new_privs.

    Args:
        code: filter, as `compile_filter` returns it.

    Raises:
        OSError: the kernel refuses the filter.
    """
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.addressof(program))
