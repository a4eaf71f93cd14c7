"""Defines hostile programs, each of which tries an action that the sandbox must prevent.

If all attacks of a program fail, it prints ``HELD``; else it prints which attacks succeeded.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from . import supervise
from .limits import Limits
from .memory_attacks import list_memory_attacks

HELD = "HELD\n"

TRIAL_LIMITS = Limits(wall_s=2.0, cpu_s=1.0, memory_mb=256, disk_mb=32, starved_s=2.0)
"""The limits with which the hostile programs run."""

_FRAME = """
import os, sys
broken = []
def attempt(what, action):
    try:
        action()
    except (OSError, MemoryError, ImportError):
        return
    broken.append(what)
{body}
print("BROKEN: " + ", ".join(broken) if broken else "HELD")
"""

_PROBE = """
SECRET = {secret!r}
os.getuid() == 0 and broken.append("runs as root")
attempt("reads a file of another directory", lambda: open(SECRET).read())
attempt("reads /etc/passwd", lambda: open("/etc/passwd").read())
attempt("reads /usr/bin/env", lambda: open("/usr/bin/env", "rb").read())
attempt("writes outside", lambda: open("/var/tmp/coa_jax_probe", "w"))
attempt("signals a process outside", lambda: os.getppid() > 2 and os.kill(os.getppid(), 0)
        or os.getppid() <= 2 and os.kill(1 << 20, 0))
def network(kind):
    import socket
    socket.socket(socket.AF_INET, kind).connect(("127.0.0.1", 9))
attempt("opens a TCP socket", lambda: network(1))
attempt("opens a UDP socket", lambda: network(2))
import subprocess, tempfile  # an honest program needs these to work
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("x")
subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
"""

_READS = """
for path in {paths!r}:
    attempt("reads " + path, lambda path=path: open(path, "rb").read())
for path in {directories!r}:
    attempt("lists " + path, lambda path=path: os.listdir(path))
def variables(process):
    with open(f"/proc/{{process}}/environ", "rb") as file:
        if {marker!r} in file.read():
            broken.append(f"reads variables of {{process}}")
    raise OSError
for process in (os.getppid(), *range(1, 50), {caller}):
    attempt("", lambda process=process: variables(process))
"""

_WRITES = """
for path in {paths!r}:
    attempt("writes " + path, lambda path=path: open(path, "w").write("x"))
    attempt("removes " + path, lambda path=path: os.unlink(path))
    attempt("renames " + path, lambda path=path: os.rename(path, path + "2"))
    attempt("links " + path, lambda path=path: os.link(path, "here"))
    attempt("truncates " + path, lambda path=path: os.truncate(path, 0))
    attempt("changes mode of " + path, lambda path=path: os.chmod(path, 0o777))
    attempt("creates " + path + ".new", lambda path=path: open(path + ".new", "w").write("x"))
os.symlink({paths!r}[0], "link")
attempt("writes through a link", lambda: open("link", "w").write("x"))
"""

_NETWORK = """
import ctypes, socket
def tcp(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(1)
        connection.connect(address)
        connection.sendall(b"escaped")
def udp(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as connection:
        connection.sendto(b"escaped", address)
def listen():
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
    attempt("TCP to " + host, lambda: tcp(family, (host, {tcp})))
    attempt("UDP to " + host, lambda: udp(family, (host, {udp})))
attempt("UDP to the world", lambda: udp(socket.AF_INET, ("192.0.2.1", 53)))
attempt("abstract socket", lambda: tcp(socket.AF_UNIX, {abstract!r}))
def datagram(send):
    for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        try:
            pair = socket.socketpair(socket.AF_UNIX, kind)
        except OSError:
            continue
        try:
            send(pair[0])
            return
        except OSError:
            pass
    raise OSError
for path in {unix!r}, {abstract!r}:
    attempt("datagram", lambda: datagram(lambda s: s.sendto(b"escaped", path)))
    attempt("message", lambda: datagram(lambda s: s.sendmsg([b"escaped"], [], 0, path)))
    attempt("connected datagram", lambda: datagram(lambda s: (s.connect(path), s.send(b"escaped"))))
attempt("takes a name", lambda: datagram(lambda s: s.bind("\\0coa_jax_trial_name")))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
attempt("listens", listen)
attempt("netlink", lambda: socket.socket(16, 3))
"""

_KILLS = """
import resource, signal
parent = os.getppid()
if parent > 2:
    attempt("kills its parent", lambda: os.kill(parent, signal.SIGKILL))
    attempt("limits its parent", lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (0, 0)))
attempt("kills the caller", lambda: os.kill({caller}, signal.SIGKILL))
attempt("kills a group", lambda: os.killpg({caller}, signal.SIGKILL))
print("HELD" if not broken else "BROKEN: " + ", ".join(broken), flush=True)
os.kill(-1, signal.SIGKILL)  # whatever is left to kill may die
"""

_KERNEL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *numbers):
    if getattr(libc, name)(*numbers) < 0:
        raise OSError(ctypes.get_errno(), name)
attempt("ptrace", lambda: call("ptrace", 16, os.getppid(), 0, 0))
attempt("new user namespace", lambda: call("unshare", 0x10000000))
attempt("new mount namespace", lambda: call("unshare", 0x20000))
attempt("mount", lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None))
attempt("chroot", lambda: call("chroot", b"/tmp"))
attempt("shared memory", lambda: call("shmget", 4242, 4096, 0o1600))
attempt("memory file", lambda: os.memfd_create("x"))
attempt("becomes root", lambda: os.setuid(0))
attempt("gifts pages", lambda: call("vmsplice", os.pipe()[1], None, 0, 0))
attempt("ring", lambda: call("syscall", 425, 1, None))
attempt("keyring", lambda: call("syscall", 250 if os.uname().machine == "x86_64" else 219, 0, -3))
"""

_FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

_LOCKS = """
import fcntl, glob, socket
def lease(path):
    with open(path) as file:
        fcntl.fcntl(file, 1024, fcntl.F_RDLCK)
def lock(path):
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
def names(kind):
    for uid in range(60578, 61184):
        socket.socketpair(socket.AF_UNIX, kind)[0].bind(f"\\0coa_jax.sandbox.uid.{{uid}}")
for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
    attempt("takes the names of others", lambda: names(kind))
attempt("opens the locks of others", lambda: open({locks!r}, "r+"))
for path in (sys.executable, os.__file__):
    attempt("locks " + path, lambda: lock(path))
    attempt("leases " + path, lambda: lease(path))
def owner():
    fcntl.fcntl(0, fcntl.F_SETOWN, {caller})
attempt("sends signals through a pipe", owner)
"""

_PRIORITY = """
import fcntl
os.getpriority(os.PRIO_PROCESS, 0) > 0 or broken.append("runs at the priority of its caller")
attempt("raises its priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, 0))
attempt("runs in real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("leaves its class", lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)))
for name in ("oom_score_adj", "autogroup"):
    attempt("writes " + name, lambda: open(f"/proc/self/{{name}}", "w").write("-10"))
"""

_SILENT = """
import os, sys
sys.stdout.close(); sys.stderr.close()
for descriptor in range(3):
    try:
        os.close(descriptor)
    except OSError:
        pass
if os.fork() == 0:
    import time
    time.sleep(3600)
os._exit(0)
"""

_SURVIVOR = """
import os, sys
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            sleep = "import time; time.sleep(3600)"
            os.execv(sys.executable, [sys.executable, "-S", "-c", sleep, {marker!r}])
        os._exit(0)
    os.wait()
print("HELD")
"""

_INTERPRETER = """
import shutil
attempt("removes its interpreter", lambda: os.unlink(sys.executable))
attempt("writes its interpreter", lambda: open(sys.executable, "r+b"))
attempt("removes a module", lambda: os.unlink(os.__file__))
attempt("closes its interpreter", lambda: os.chmod(sys.executable, 0))
shutil.rmtree(os.path.dirname(os.__file__), ignore_errors=True)
os.path.exists(os.__file__) or broken.append("removed its library")
"""

_DEEP = """
import os
for depth in range(3000):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
print("HELD")
"""


@dataclasses.dataclass(frozen=True)
class Attack:
    """A hostile program for testing the sandbox, with the results that show containment.

    Attributes:
        name: what the program tries.
        source: Python source of the program.
        endings: values of `ProgramResult.reason` with which a contained program may end.
        says: text with which the output must begin if the program ends by itself; "" for any text.
        exceeds: "memory" or "disk" if the program tries to exceed the limit on memory or disk
            space, and reports how much it uses, see ``memory_attacks.list_memory_attacks``; else
            "". If by this report it stays within the limit, ``endings`` and ``says`` do not count.
    """

    name: str
    source: str
    endings: tuple[str, ...] = ("exit",)
    says: str = HELD
    exceeds: str = ""


@dataclasses.dataclass(frozen=True)
class Targets:
    """Files, sockets and ports outside the sandbox that hostile programs attack.

    Attributes:
        files: files that programs must not read or change.
        directories: directories that programs must not list.
        tcp_port: port of a TCP listener on the loopback device.
        udp_port: port of a UDP listener on the loopback device.
        abstract: name of an abstract Unix socket with a listener.
        unix: path of a Unix socket to which everybody may send.
        marker: argument of the processes that programs start, by which the caller recognises
            processes that outlive a program.
    """

    files: tuple[str, ...]
    directories: tuple[str, ...]
    tcp_port: int
    udp_port: int
    abstract: str
    unix: str
    marker: str


def probe(secret: str) -> str:
    """Returns the source of a short program that tries the main attacks.

    The program prints ``HELD`` if no attack succeeds.

    Args:
        secret: path of a file that the program must not read.
    """
    return _FRAME.format(body=_PROBE.format(secret=secret))


def list_attacks(targets: Targets) -> tuple[Attack, ...]:
    """Returns all hostile programs.

    They must run with ``TRIAL_LIMITS``.

    Args:
        targets: targets of the attacks.
    """
    caller = os.getpid()
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    reads = _READS.format(
        paths=("/etc/shadow", "/etc/passwd", "/usr/bin/env", __file__, *targets.files),
        directories=("/usr/share/doc", "/usr/local/bin", *targets.directories),
        marker=max(variables, key=len) or b"\xff",
        caller=caller,
    )
    network = _NETWORK.format(
        tcp=targets.tcp_port,
        udp=targets.udp_port,
        abstract="\0" + targets.abstract,
        unix=targets.unix,
    )
    programs = {
        "reads secrets": reads,
        "writes outside": _WRITES.format(paths=targets.files),
        "network": network,
        "kernel interfaces": _KERNEL,
        "deletes its interpreter": _INTERPRETER,
        "10 GB allocation": "attempt('allocates 10 GB', lambda: bytearray(10 << 30))",
        "locks of others": _LOCKS.format(locks=supervise.LOCKS, caller=caller),
        "priority": _PRIORITY,
    }
    framed = (Attack(name, _FRAME.format(body=body)) for name, body in programs.items())
    kills = _FRAME.format(body=_KILLS.format(caller=caller))
    return (
        *framed,
        Attack("kills its parent and everybody", kills),
        Attack("fork bomb", _FORK_BOMB, ("exit", "wall", "processes", "memory"), ""),
        Attack("endless output", "while True: print('x' * 999)", ("output",), ""),
        Attack("double-forked survivor", _SURVIVOR.format(marker=targets.marker)),
        Attack("endless loop", "while True: pass", ("exit", "wall"), ""),
        Attack("closes its output", _SILENT, ("exit",), ""),
        Attack("stops itself", "import os; os.kill(os.getpid(), 19)", ("wall",), ""),
        Attack("deep directories", _DEEP, ("exit", "disk", "wall"), ""),
        *(
            Attack(name, source, (kind,), "", kind)
            for name, (kind, source) in list_memory_attacks(
                TRIAL_LIMITS.memory_mb, TRIAL_LIMITS.disk_mb
            ).items()
        ),
    )
