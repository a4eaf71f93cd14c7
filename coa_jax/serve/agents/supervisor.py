"""A supervisor process, which runs one program and in the end kills its whole process tree.

The supervisor kills the process tree when the program exits, when the supervisor receives SIGTERM,
or when the process that started the supervisor is gone.

    python -m coa_jax.serve.agents.supervisor OWNER PROGRAM ARGUMENT...

OWNER is the id of the process that started the supervisor. The exit code is the result of `run`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time

from coa_jax.sandbox import kernel
from coa_jax.sandbox.watch import every_descendant

_LOOK_S = 0.2
_SWEEP_S = 5.0


def run(owner: int, command: list[str]) -> int:
    """Runs a program until it exits, and then kills the processes that the program has left.

    Args:
        owner: id of the process that started this process. If it ends before the program, the
            function kills the program and its processes, and ends this process.
        command: the program and its arguments.

    Returns:
        The exit code of the program; 128 plus the number of the signal if a signal ended the
        program; or 127 if the program cannot be started.
    """
    _prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: _end())
    try:
        # If SIGKILL ends this process, the kernel kills the program, too.
        end_with_me = functools.partial(_prctl, kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        program = subprocess.Popen(command, preexec_fn=end_with_me)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    code = program.wait()
    _sweep()
    return 128 - code if code < 0 else code


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # prctl exists only on Linux
        kernel.prctl(option, value)


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_LOOK_S)
    _end()


def _end() -> None:
    _sweep()
    os._exit(128 + signal.SIGTERM)


def _sweep() -> None:
    """Kills every descendant. This process is a subreaper, so orphans become its children."""
    end = time.monotonic() + _SWEEP_S
    while (below := every_descendant(os.getpid())) and time.monotonic() < end:
        for process in below:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
