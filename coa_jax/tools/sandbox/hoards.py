"""Defines hostile programs that try to exceed the limit on memory or on scratch space.

After every few MiB, a program prints how much it uses, and the time. From this output the caller
computes by how much the limit was exceeded, and for how long the program then continued.
"""

from __future__ import annotations

import dataclasses

_FRAME = """
import array, ctypes, mmap, os, socket, sys, tempfile, time
STEP = 4
CHUNK = b"x" * (STEP << 20)
kept = []
def held(megabytes):
    line = f"held {{os.getpid()}} {{megabytes}} {{time.monotonic()}}\\n"
    os.write(1, line.encode())
def hoard(most):
{body}
def grow():
    try:
        hoard({most})
    except (OSError, MemoryError, ValueError) as error:
        print("refused", type(error).__name__, file=sys.stderr)
        held(0)
        kept.clear()
        return
    time.sleep({linger})
for _ in range({processes} - 1):
    try:
        child = os.fork()
    except OSError:
        break
    if not child:
        grow()
        os._exit(0)
grow()
"""

_PRIVATE = """
    for megabytes in range(STEP, most + 1, STEP):
        kept.append(bytearray(b"x") * (STEP << 20))
        held(megabytes)
"""
_SHARED = """
    for megabytes in range(STEP, most + 1, STEP):
        kept.append(mmap.mmap(-1, STEP << 20))
        kept[-1].write(CHUNK)
        held(megabytes)
"""
_UNMAPPED = """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    zero = os.open("/dev/zero", os.O_RDWR)
    for megabytes in range(STEP, most + 1, STEP):
        # Of a shared object the pages stay as long as one of them is mapped.
        place = libc.mmap(None, ctypes.c_size_t(STEP << 20), 3, 1, zero, ctypes.c_long(0))
        if place in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memset(place, 1, STEP << 20)
        libc.munmap(ctypes.c_void_p(place + 4096), ctypes.c_size_t((STEP << 20) - 4096))
        held(megabytes)
"""
_SOCKETS = """
    total = 0
    while total < most << 20:
        pair = socket.socketpair()
        kept.append(pair)
        for end in pair:
            end.setblocking(False)
            try:
                while True:
                    total += end.send(CHUNK[: 1 << 16])
            except BlockingIOError:
                pass
        held(total / 2**20)
"""
_PIPES = """
    total = 0
    while total < most << 20:
        pipe = os.pipe()
        try:
            import fcntl
            fcntl.fcntl(pipe[1], 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(pipe[1], False)
        total += os.write(pipe[1], CHUNK)
        held(total / 2**20)
"""
_FILES = """
    for megabytes in range(STEP, most + 1, STEP):
        with open(f"file.{os.getpid()}.{megabytes}", "wb") as file:
            file.write(CHUNK)
        held(megabytes)
"""
_GONE = (
    _FILES
    + """
    for megabytes in range(STEP, most + 1, STEP):
        os.unlink(f"file.{os.getpid()}.{megabytes}")
    held(0)
"""
)
_NAMED_MEMORY = """
    for megabytes in range(STEP, most + 1, STEP):
        with open(f"/dev/shm/file.{os.getpid()}.{megabytes}", "wb") as file:
            file.write(CHUNK)
        held(megabytes)
"""
_NAMELESS = """
    for megabytes in range(STEP, most + 1, STEP):
        kept.append(tempfile.TemporaryFile(dir="."))
        kept[-1].write(CHUNK)
        held(megabytes)
"""
_MAPPED = """
    for megabytes in range(STEP, most + 1, STEP):
        with open("mapped", "w+b") as file:
            file.truncate(STEP << 20)
            whole = mmap.mmap(file.fileno(), STEP << 20)
        os.unlink("mapped")
        whole.write(CHUNK)
        kept.append(whole)
        held(megabytes)
"""
_SENT = """
    here, there = socket.socketpair()
    kept.append((here, there))
    for megabytes in range(STEP, most + 1, STEP):
        with tempfile.TemporaryFile(dir=".") as file:
            file.write(CHUNK)
            file.flush()
            socket.send_fds(here, [b"x"], [file.fileno()])
        held(megabytes)
"""
_EMPTY = """
    for number in range(most << 8):
        open(f"{os.getpid()}.{number}", "w").close()
        if number % 1024 == 1023:
            held((number + 1) / 256)
"""


@dataclasses.dataclass(frozen=True)
class Hoard:
    """A program that tries to exceed a limit, and reports how much it uses.

    Attributes:
        source: Python source of the program.
        kind: limit that the program tries to exceed, "memory" or "disk".
    """

    source: str
    kind: str


def hoards(memory_mb: int, disk_mb: int) -> dict[str, Hoard]:
    """Returns programs that try to use several times as much memory or disk as the limits allow.

    Args:
        memory_mb: memory limit in MiB.
        disk_mb: size of the scratch space in MiB.

    Returns:
        Name of a method -> program that tries this method.
    """

    def of(kind: str, body: str, processes: int = 4, linger: float = 60.0) -> Hoard:
        most = (3 * memory_mb if kind == "memory" else 8 * disk_mb) // processes
        source = _FRAME.format(body=body, most=most, processes=processes, linger=linger)
        return Hoard(source, kind)

    return {
        "memory in many processes": of("memory", _PRIVATE),
        "shared memory": of("memory", _SHARED),
        "shared memory that is hardly mapped": of("memory", _UNMAPPED),
        "memory in sockets": of("memory", _SOCKETS, 16),
        "memory in pipes": of("memory", _PIPES, 16),
        "fills the disk": of("disk", _FILES, 1),
        "fills the disk and ends": of("disk", _FILES, 4, 0.0),
        "fills the disk, removes that and ends": of("disk", _GONE, 1, 0.0),
        "files in /dev/shm": of("disk", _NAMED_MEMORY),
        "files without a name": of("disk", _NAMELESS),
        "files that are only mapped": of("disk", _MAPPED, 1),
        "files that are only in a socket": of("disk", _SENT),
        "empty files": of("disk", _EMPTY),
    }


def measure(said: str, limit: float, ended: float) -> tuple[float, float]:
    """Measures, from the output of a program of `hoards`, how far the program exceeded its limit.

    Args:
        said: standard output of the program.
        limit: limit in MiB that the program tries to exceed.
        ended: time at which all processes of the program had ended, on the clock of
            ``time.monotonic``.

    Returns:
        (largest amount that the program used in MiB, time in seconds from the moment when the
        program exceeded the limit until its end).
    """
    total = most = 0.0
    passed = ended
    last: dict[str, float] = {}
    lines = [line.split() for line in said.splitlines() if line.startswith("held ")]
    for _, process, megabytes, moment in sorted(lines, key=lambda line: float(line[3])):
        total += float(megabytes) - last.get(process, 0.0)
        last[process] = float(megabytes)
        most = max(most, total)
        if total > limit:
            passed = min(passed, float(moment))
    return most, ended - passed
