"""Implements code sessions, in which a program can use variables of earlier programs.

No process is kept alive between calls. Each call runs all earlier programs of the trajectory again,
without their output, and then the new program, in one new sandbox. This has several advantages:

* Isolation and limits are the same as for a single program.
* Nothing remains when a trajectory ends or a run is killed.
* A trajectory that is sampled again, on another machine or after a restart, gets the same results,
  if its programs are deterministic. The module `random` is seeded, but the clock is not fixed.
"""

from __future__ import annotations

import dataclasses
import json

from coa_jax.protocol import parse_code
from coa_jax.sandbox.limits import Limits
from coa_jax.tools.base import ToolContext, own_calls

FORGOTTEN = "What this program did is not remembered; variables are those of before it."

_LONGEST_S = 60.0
"""Time limit in wall seconds for a call with all earlier programs. A higher limit of a single
program takes precedence.
"""

# This source runs in the sandbox, with any version of Python. The programs run in a separate
# module, so that they do not see this code. In tracebacks, each program is a file of its own.
_DRIVER = """\
import sys

def run(programs, cpu_s, wall_s, starved_s):
    import atexit, builtins, fcntl, linecache, os, random, resource, signal, tempfile, time
    import traceback, types

    module = types.ModuleType("__main__")
    module.__builtins__ = builtins
    sys.modules["__main__"] = module

    def execute(number, name):
        source = programs[number][0]
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        random.seed(number)
        try:
            exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        finally:
            if "threading" in sys.modules:
                threads = sys.modules["threading"]
                for thread in threads.enumerate():
                    if thread is not threads.main_thread() and not thread.daemon:
                        thread.join()

    def stay(code):
        if os.getpid() != here:
            leave(code)
        raise SystemExit(code)

    def report(kind, error, trace):
        while trace is not None and trace.tb_frame.f_globals is globals_here:
            trace = trace.tb_next
        if isinstance(error, SyntaxError) and error.filename in linecache.cache:
            # Else it is a line of this file, which has that name on the disk.
            error.text = linecache.getline(error.filename, error.lineno or 0) or error.text
        errors.write("".join(traceback.format_exception(kind, error, trace)))
        errors.flush()

    def keep(number):
        # A high number, which the program does not use; processes that it starts do not inherit it.
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, limit - 8)

    def guarded_close(number):
        if number not in kept:
            close(number)

    def guarded_range(low, high):
        for number in range(max(low, 0), min(high, limit)):
            try:
                guarded_close(number)
            except OSError:
                pass

    def connect(reads, writes, complains):
        # Restore the streams: the program before may have closed or replaced them.
        for number, end in enumerate((reads, writes, complains)):
            os.dup2(end, number)
        options = {"encoding": "utf-8", "closefd": False}
        sys.stdin = open(0, errors="replace", **options)
        sys.stdout = open(1, "w", errors="surrogateescape", **options)
        sys.stderr = open(2, "w", 1, errors="backslashreplace", **options)

    def flush():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass

    def waited():
        try:
            with read("/proc/self/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0  # the sandbox hides this file

    def end_late(number, frame):
        # Time in which the program waits for a processor does not count.  Python runs this handler
        # only between bytecodes: during a long call of C code, the limit on processor time and the
        # limit of all programs together apply instead.
        left = end + min(waited() - before, starved_s) - now()
        if left > 0:
            wait(signal.ITIMER_REAL, left)
        else:
            handle(number, signal.SIG_DFL)
            send(number)

    # The programs may replace these functions.
    read, now, wait = open, time.monotonic, signal.setitimer
    handle, send = signal.signal, signal.raise_signal
    globals_here, here, leave = globals(), os.getpid(), os._exit
    os._exit = stay  # it would end later programs too
    sys.excepthook = report
    limit, close = resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.close
    kept = [keep(number) for number in range(3)]
    errors = open(kept[2], "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    os.close, os.closerange = guarded_close, guarded_range
    for number, (source, given) in enumerate(programs[:-1], 1):
        with tempfile.TemporaryFile() as reads, tempfile.TemporaryFile() as writes:
            reads.write(given.encode("utf-8", "replace"))
            reads.seek(0)
            connect(reads.fileno(), writes.fileno(), writes.fileno())
        try:
            execute(number - 1, "program_%d.py" % number)
        except BaseException:
            pass
        if os.getpid() != here:  # a fork that came to the end of its program
            leave(0)
        try:
            atexit._run_exitfuncs()
        except BaseException:
            pass
        flush()
        connect(*kept)
    os._exit = leave
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime + cpu_s + 0.999)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
    before, end = waited(), now() + wall_s
    if starved_s and before and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        handle(signal.SIGALRM, end_late)
    wait(signal.ITIMER_REAL, wall_s)
    execute(len(programs) - 1, "program.py")
"""


@dataclasses.dataclass(frozen=True)
class Continued:
    """A new program combined with the earlier programs of its session.

    Attributes:
        source: Python source that runs all programs.
        limits: limits for all programs together.
        remembered: number of earlier programs that run again before the new program.
    """

    source: str
    limits: Limits
    remembered: int


def continued(source: str, name: str, context: ToolContext, limits: Limits) -> Continued:
    """Builds a source that runs the earlier programs of a trajectory and then a new program.

    An earlier program is included if it exited, even with an exception. A program that was stopped
    at a limit or ended by a signal (for example after a stack overflow) is left out.

    Args:
        source: the new program.
        name: tag of the tool.
        context: context of the call, with the earlier programs.
        limits: limits of each program.
    """
    earlier = []
    for arguments, outcome in own_calls(name, context):
        parsed = parse_code(arguments)
        if parsed is not None and outcome in ("ok", "error"):
            earlier.append((parsed[0], parsed[1] or ""))
    number = 1 + len(earlier)
    wall_s = min(number * limits.wall_s, longest_s(limits.wall_s))
    all_limits = dataclasses.replace(limits, wall_s=wall_s, cpu_s=number * limits.cpu_s)
    programs = [*earlier, (source, "")]
    data = json.dumps([programs, limits.cpu_s, limits.wall_s, limits.starved_s])
    driver = f"{_DRIVER}\nimport json\nrun(*json.loads({data!r}))\n"
    return Continued(driver, all_limits, len(earlier))


def longest_s(wall_s: float) -> float:
    """Returns the longest time that a call in a session can take, in wall seconds.

    A call in a session runs the earlier programs again, and then the new program.

    Args:
        wall_s: time limit of a single program in wall seconds.
    """
    return max(wall_s, _LONGEST_S)
