"""Makes system calls that Python's standard library does not offer."""

from __future__ import annotations

import ctypes
import os
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 14, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, action: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")
    return result


def prctl(option: int, argument: int, second: int = 0) -> None:
    """Calls ``prctl(2)``, which changes a property of this process.

    Args:
        option: number of the property, such as `PR_SET_PDEATHSIG`.
        argument: first argument of the option.
        second: second argument of the option.

    Raises:
        OSError: the call fails.
    """
    rest = (ctypes.c_ulong(0), ctypes.c_ulong(0))
    result = _libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(second), *rest)
    _check(result, f"prctl {option}")


def unshare(flags: int) -> None:
    """Calls ``unshare(2)``, which moves this process into new namespaces.

    Args:
        flags: ``CLONE_NEW...`` flags of the namespaces.

    Raises:
        OSError: the call fails.
    """
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Calls ``mount(2)``, which mounts a file system or changes a mount.

    Args:
        source, target, kind, flags, options: arguments of the system call.

    Raises:
        OSError: the call fails.
    """
    texts = [text.encode() for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {target}")


def is_memory(path: str) -> bool:
    """Returns whether files at a path are stored in memory (tmpfs or ramfs).

    Raises:
        OSError: the path does not exist.
    """
    answer = ctypes.create_string_buffer(256)  # struct statfs; its first field is the type
    _check(_libc.statfs(path.encode(), answer), f"statfs {path}")
    return ctypes.c_long.from_buffer(answer).value in (0x01021994, 0x858458F6)


def syscall(number: int, *arguments: Any) -> int:
    """Makes a raw system call.

    Args:
        number: number of the system call.
        arguments: arguments of the call, each an integer or a ctypes value.

    Raises:
        OSError: the call fails.
    """
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")
