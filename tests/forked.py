"""Programs in forks of a process that has imported JAX and the package.

A program that trains loads modules for four seconds before it does anything. Here one process loads
the modules for all tests of a pytest process, and forks for each program. A fork
has a number, a folder, an environment, signals and an exit code of its own. A test of how a program
starts, or of what it imports, starts a process with `subprocess` instead.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

# Modules of commands are left out: Python warns if such a module was imported before it runs.
PRELOADED = (
    *("jax", "optax", "grain", "orbax.checkpoint", "transformers.models.auto.tokenization_auto"),
    *("httpx", "openai", "coa_jax.tools.make"),
    *(
        "coa_jax.train.rl",
        "coa_jax.train.sft",
        "coa_jax.evaluation.run",
        "coa_jax.evaluation.held_out",
    ),
)


def run(
    words: Sequence[str | Path],
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    """Does what `subprocess.run` does with ``[sys.executable, *words]``.

    Args:
        words: ``-m MODULE ARGUMENT ...`` or ``-c CODE ARGUMENT ...``.
        cwd: folder in which the program runs.
        env: its environment; that of this process if None.
        timeout: seconds after which the program is killed, and the test fails.
        text: what the program reads from stdin.

    Returns:
        The exit code, stdout and stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        read, out, err = (Path(folder) / name for name in ("in", "out", "err"))
        read.write_text(text)
        process = start(words, cwd, env, out, err, read)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{words} took more than {timeout} s: {err.read_text()}")
        texts = (path.read_bytes().decode(errors="replace") for path in (out, err))
        return subprocess.CompletedProcess(list(words), process.exitcode, *texts)


def start(
    words: Sequence[str | Path],
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    out: str | Path = os.devnull,
    err: str | Path = os.devnull,
    read: str | Path = os.devnull,
) -> BaseProcess:
    """Starts a program as `run` does; its streams are the files ``out``, ``err`` and ``read``."""
    texts = [os.fspath(word) for word in words]
    given = dict(os.environ if env is None else env)
    process = _context().Process(
        target=_program,
        args=(texts, os.path.abspath(cwd), given, [str(read), str(out), str(err)]),
        daemon=True,
    )
    process.start()
    return process


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    return context


# --- in the fork ---------------------------------------------------------------------------


def _program(words: list[str], cwd: str, env: dict[str, str], streams: list[str]) -> NoReturn:
    for number, path in enumerate(streams):
        with open(path, "w" if number else "r") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    multiprocessing.current_process().daemon = False  # it may have children
    os.chdir(cwd)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    _set_what_jax_read(before)
    random.seed()
    code = _exit_code(words)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _set_what_jax_read(before: Mapping[str, str]) -> None:
    """Sets what JAX takes from the environment when it is imported."""
    import jax

    for name, value in jax.config.values.items():
        text = os.environ.get(name.upper())
        if text is not None and text != before.get(name.upper()):
            is_true = text.lower() in ("1", "true", "yes", "on")
            given = {bool: is_true, int: text}.get(type(value), text)
            jax.config.update(name, int(given) if type(value) is int else given)


def _exit_code(words: list[str]) -> int:
    """Runs what ``python WORDS`` runs, and returns the exit code that Python would have."""
    kind, what, *arguments = words
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd() if kind == "-m" else ""]
    sys.path[:0] = [*here, *filter(None, folders)]
    try:
        if kind == "-m":
            sys.argv = [what, *arguments]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            module = types.ModuleType("__main__")
            sys.modules["__main__"], sys.argv = module, ["-c", *arguments]
            exec(compile(what, "<string>", "exec"), vars(module))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
