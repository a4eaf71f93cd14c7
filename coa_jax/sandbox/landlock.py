"""Restricts a process with Landlock, a part of Linux that needs neither root nor namespaces."""

from __future__ import annotations

import ctypes
import os
import stat

from . import kernel

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers on all architectures

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_NET_BIND_CONNECT = 0b11
_SCOPE_SOCKETS_AND_SIGNALS = 0b11
_ONLY_FOR_DIRECTORIES = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13))

MINIMUM_ABI = 3  # earlier versions cannot forbid the truncation of files
SIGNAL_SCOPE_ABI = 6


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """Returns the version of Landlock's interface in the running kernel; 0 without Landlock."""
    try:
        return kernel.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def _file_rights(version: int) -> int:
    bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    return (1 << bits) - 1


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= ~_ONLY_FOR_DIRECTORIES
        rule = _PathBeneath(rights, descriptor)
        kernel.syscall(ADD_RULE, ruleset, 1, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _allow_to_read(ruleset: int, path: str, hidden: tuple[str, ...]) -> None:
    """Allows reading a path, except the directories ``hidden`` directly below it.

    Landlock cannot take a right back. Names below the path can therefore be listed, also the names
    in ``hidden``.
    """
    rights = _EXECUTE | _READ_FILE | _READ_DIR
    if not any(os.path.dirname(directory) == path for directory in hidden):
        return _allow(ruleset, path, rights)
    _allow(ruleset, path, _READ_DIR)
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.path not in hidden:
                _allow(ruleset, entry.path, rights)


def restrict(
    readable: tuple[str, ...], hidden: tuple[str, ...], writable: str, shared_memory: bool
) -> None:
    """Restricts this process and its descendants permanently.

    The restriction covers files. It also covers TCP, and signals and abstract sockets to other
    processes, if the version of the kernel supports this. The process must have set no_new_privs.

    Args:
        readable: paths that may be read and executed.
        hidden: directories directly below a readable path that may not be read.
        writable: directory in which the process has full access.
        shared_memory: whether ``/dev/zero``, which provides shared memory, may be used.

    Raises:
        OSError: the kernel has no Landlock, or its version is too old.
    """
    version = abi()
    if version < MINIMUM_ABI:
        raise OSError(f"Landlock ABI {version} is older than {MINIMUM_ABI} (Linux 6.2)")
    rights = _file_rights(version)
    network = _NET_BIND_CONNECT if version >= 4 else 0
    scoped = _SCOPE_SOCKETS_AND_SIGNALS if version >= SIGNAL_SCOPE_ABI else 0
    attributes = _Ruleset(rights, network, scoped)
    size = 24 if version >= SIGNAL_SCOPE_ABI else 16 if version >= 4 else 8
    ruleset = kernel.syscall(
        CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    try:
        for path in readable:
            _allow_to_read(ruleset, path, hidden)
        # Full access does not include ioctl calls on devices.
        _allow(ruleset, writable, rights & ~_IOCTL_DEV)
        for device in ("/dev/null", "/dev/full", *(["/dev/zero"] if shared_memory else [])):
            _allow(ruleset, device, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & rights)
        for device in ("/dev/random", "/dev/urandom"):
            _allow(ruleset, device, _READ_FILE)
        kernel.syscall(RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
