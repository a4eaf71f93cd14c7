"""Defines hostile programs that try to exceed the limit on memory or on scratch space.

After every few MiB, a program prints how much it uses, and the time. From this output the caller
computes by how much the limit was exceeded, and for how long the program then continued.
"""

from __future__ import annotations

_FRAME = """
import array, ctypes, fcntl, mmap, os, socket, sys, tempfile, time
STEP = 4
CHUNK = b"x" * (STEP << 20)
kept, most = [], {most}
def held(megabytes):
    line = f"held {{os.getpid()}} {{megabytes}} {{time.monotonic()}}\\n"
    os.write(1, line.encode())
def steps():
    for megabytes in range(STEP, most + 1, STEP):
        yield megabytes
        held(megabytes)
def hoard():
{body}
def grow():
    try:
        hoard()
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
    for _ in steps():
        kept.append(bytearray(b"x") * (STEP << 20))
"""
_SHARED = """
    for _ in steps():
        kept.append(mmap.mmap(-1, STEP << 20))
        kept[-1].write(CHUNK)
"""
_UNMAPPED = """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    zero = os.open("/dev/zero", os.O_RDWR)
    for _ in steps():
        # Of a shared object the pages stay as long as one of them is mapped.
        place = libc.mmap(None, ctypes.c_size_t(STEP << 20), 3, 1, zero, ctypes.c_long(0))
        if place in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memset(place, 1, STEP << 20)
        libc.munmap(ctypes.c_void_p(place + 4096), ctypes.c_size_t((STEP << 20) - 4096))
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
            fcntl.fcntl(pipe[1], 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(pipe[1], False)
        total += os.write(pipe[1], CHUNK)
        held(total / 2**20)
"""
_FILES = """
    for megabytes in steps():
        with open(f"{folder}file.{{os.getpid()}}.{{megabytes}}", "wb") as file:
            file.write(CHUNK)
"""
_GONE = (
    _FILES
    + """
    for megabytes in range(STEP, most + 1, STEP):
        os.unlink(f"file.{{os.getpid()}}.{{megabytes}}")
    held(0)
"""
)
_NAMELESS = """
    for _ in steps():
        kept.append(tempfile.TemporaryFile(dir="."))
        kept[-1].write(CHUNK)
"""
_MAPPED = """
    for _ in steps():
        with open("mapped", "w+b") as file:
            file.truncate(STEP << 20)
            whole = mmap.mmap(file.fileno(), STEP << 20)
        os.unlink("mapped")
        whole.write(CHUNK)
        kept.append(whole)
"""
_SENT = """
    here, there = socket.socketpair()
    kept.append((here, there))
    for _ in steps():
        with tempfile.TemporaryFile(dir=".") as file:
            file.write(CHUNK)
            file.flush()
            socket.send_fds(here, [b"x"], [file.fileno()])
"""
_EMPTY = """
    for number in range(most << 8):
        open(f"{os.getpid()}.{number}", "w").close()
        if number % 1024 == 1023:
            held((number + 1) / 256)
"""


def list_memory_attacks(memory_mb: int, disk_mb: int) -> dict[str, tuple[str, str]]:
    """Returns programs that try to use several times as much memory or disk as the limits allow.

    Args:
        memory_mb: memory limit in MiB.
        disk_mb: size of the scratch space in MiB.

    Returns:
        Name of a method -> (limit that the program tries to exceed, "memory" or "disk"; Python
        source of the program).
    """

    def of(kind: str, body: str, processes: int = 4, linger: float = 60.0) -> tuple[str, str]:
        most = (3 * memory_mb if kind == "memory" else 8 * disk_mb) // processes
        return kind, _FRAME.format(body=body, most=most, processes=processes, linger=linger)

    here, shared = _FILES.format(folder=""), _FILES.format(folder="/dev/shm/")
    return {
        "memory in many processes": of("memory", _PRIVATE),
        "shared memory": of("memory", _SHARED),
        "shared memory that is hardly mapped": of("memory", _UNMAPPED),
        "memory in sockets": of("memory", _SOCKETS, 8),
        "memory in pipes": of("memory", _PIPES, 8),
        "fills the disk": of("disk", here, 1),
        "fills the disk and ends": of("disk", here, 4, 0.0),
        "fills the disk, removes that and ends": of("disk", _GONE.format(folder=""), 1, 0.0),
        "files in /dev/shm": of("disk", shared),
        "files without a name": of("disk", _NAMELESS),
        "files that are only mapped": of("disk", _MAPPED, 1),
        "files that are only in a socket": of("disk", _SENT),
        "empty files": of("disk", _EMPTY),
    }


def measure(said: str, limit: float, ended: float) -> tuple[float, float]:
    """Returns how much a program of `list_memory_attacks` used, and for how long beyond its limit.

    Args:
        said: standard output of the program.
        limit: limit in MiB that the program tries to exceed.
        ended: time at which all processes of the program had ended, on the clock of
            ``time.monotonic``.

    Returns:
        (largest amount that the program used in MiB, time in seconds from the moment when the
        program exceeded the limit until its end).
    """
    total, most, passed = 0.0, 0.0, ended
    last: dict[str, float] = {}
    lines = [line.split() for line in said.splitlines() if line.startswith("held ")]
    for _, process, megabytes, moment in sorted(lines, key=lambda line: float(line[3])):
        total += float(megabytes) - last.get(process, 0.0)
        last[process] = float(megabytes)
        most = max(most, total)
        if total > limit:
            passed = min(passed, float(moment))
    return most, ended - passed
