"""Finds the isolation that this machine offers, by tests and not by version numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import attacks, landlock
from .limits import Job, Limits
from .run import SandboxError, run

BACKENDS = ("bubblewrap", "landlock")
"""Kinds of isolation, the best first."""

UNSAFE_VARIABLE = "COA_JAX_ALLOW_UNSAFE_CODE"

_PROBE_LIMITS = Limits(wall_s=10.0, cpu_s=5.0, memory_mb=512)
_TOP_LEVEL = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_DATA = ("/etc/ld.so.cache", "/usr/lib/locale/C.utf8", "/usr/share/zoneinfo")
"""Data of the C library and of the module ``zoneinfo``."""
_THIRD_PARTY = ("site-packages", "dist-packages")
_AT_A_TIME = 400
_DESCRIBE = (
    "import json, sys, sysconfig; print(json.dumps([*map(sysconfig.get_path,"
    " ('stdlib', 'platstdlib')), '%d.%d.%d' % sys.version_info[:3]]))"
)


class NoIsolationError(Exception):
    """Raised if programs cannot be isolated here; the message says what the user can do."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python interpreter that can be started under the user id of the sandboxed programs.

    Attributes:
        path: path of the executable.
        standard_library: directories of the standard library.
        version: version, such as "3.11.2".
    """

    path: str
    standard_library: tuple[str, ...]
    version: str


@dataclasses.dataclass(frozen=True)
class Isolation:
    """An isolation that was tested on this machine.

    Attributes:
        backend: kind of isolation: "bubblewrap", "landlock" or "none".
        interpreter: Python interpreter that runs the programs.
        refused: (kind of isolation, reason) of each better kind that does not work on this machine.
    """

    backend: str
    interpreter: Interpreter
    refused: tuple[tuple[str, str], ...] = ()

    def job(
        self,
        limits: Limits,
        libraries: tuple[str, ...] = (),
        namespaces: bool = True,
        cgroup: bool = True,
    ) -> Job:
        """Returns the description of a job, which runs one program.

        Args:
            limits: limits of the program.
            libraries: directories that are added to the program's ``sys.path``.
            namespaces: whether namespaces may be used in addition to Landlock.
            cgroup: whether a control group may limit the memory of the program.
        """
        places = tuple(map(os.path.realpath, libraries))
        readable, hidden, links = _file_system(self.interpreter, places)
        bwrap = shutil.which("bwrap", path=_search_path()) or ""
        settings = (places, _scratch_parent(), bwrap, namespaces, cgroup, limits)
        return Job(self.backend, self.interpreter.path, readable, hidden, links, *settings)


def find_isolation(backend: str = "auto") -> Isolation:
    """Returns the best isolation that works on this machine.

    Each kind of isolation is tested at most once per process.

    Args:
        backend: required kind of isolation, one of ``BACKENDS``; "auto" for the best that works.

    Raises:
        NoIsolationError: no isolation works, or the kind of isolation is unknown.
    """
    if backend not in ("auto", *BACKENDS):
        raise NoIsolationError(
            f"sandbox back end {backend!r} is unknown: use auto, {', '.join(BACKENDS)}"
        )
    refused: list[tuple[str, str]] = []
    for name in BACKENDS if backend == "auto" else (backend,):
        why = _why_not(name)
        if why is None:
            return Isolation(name, find_interpreter(), tuple(refused))
        refused.append((name, why))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused)
    raise NoIsolationError(
        f"no isolation available: {reasons} (install bubblewrap, or run on Linux 6.12 or newer;"
        " `coa-jax doctor` shows the details)"
    )


def without_isolation() -> Isolation:
    """Returns an `Isolation` that limits programs but does not isolate them.

    Because programs can then harm the machine, the user must consent twice: by a setting and by the
    environment variable ``COA_JAX_ALLOW_UNSAFE_CODE=1``.

    Raises:
        NoIsolationError: the environment variable is missing.
    """
    if os.environ.get(UNSAFE_VARIABLE) != "1":
        raise NoIsolationError(
            f"programs run without isolation only if unsafe=True and {UNSAFE_VARIABLE}=1 are"
            " both set"
        )
    return Isolation("none", find_interpreter())


@functools.lru_cache
def _why_not(backend: str) -> str | None:
    """Tests a kind of isolation; returns None if it works, else a short reason."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    if backend == "bubblewrap" and shutil.which("bwrap", path=_search_path()) is None:
        return "bwrap is not installed"
    if backend == "landlock" and (version := landlock.abi()) < landlock.MINIMUM_ABI:
        support = f"has ABI {version}" if version else "has none"
        return f"needs Landlock ABI {landlock.MINIMUM_ABI} (Linux 6.2), the kernel {support}"
    job = Isolation(backend, find_interpreter()).job(_PROBE_LIMITS)
    with tempfile.NamedTemporaryFile(prefix="coa_jax_probe_") as secret:
        os.chmod(secret.name, 0o644)
        try:
            # In a thread of its own, because this thread may run an event loop.
            with ThreadPoolExecutor(1) as pool:
                result = pool.submit(asyncio.run, run(job, attacks.probe(secret.name))).result()
        except SandboxError as error:
            return " ".join(str(error).split())
    if result.stdout.head != attacks.HELD:
        return f"does not hold here: {result.stdout.head[-200:]!r} {result.stderr.head[-200:]!r}"
    return None


@functools.lru_cache
def find_interpreter() -> Interpreter:
    """Finds a Python interpreter that can be started under the user id of the sandboxed programs.

    If this process is root, programs run as an unprivileged user. This user cannot enter a private
    home directory, so the Python of a virtual environment in such a directory is not used.

    Raises:
        NoIsolationError: there is no such Python interpreter.
    """
    names = [f"python3.{minor}" for minor in range(sys.version_info[1], 8, -1)]
    places = [sys.executable, os.path.join(sys.base_prefix, "bin", "python3")]
    for directory in ("/usr/bin", "/usr/local/bin", "/opt/conda/bin"):
        places += [os.path.join(directory, name) for name in ("python3", *names)]
    candidates = dict.fromkeys(os.path.realpath(candidate) for candidate in places if candidate)
    tried = list(filter(os.path.exists, candidates))
    for candidate in filter(reachable, tried):
        command = [candidate, "-I", "-S", "-c", _DESCRIBE]
        answer = subprocess.run(command, capture_output=True, text=True, env={})
        if answer.returncode != 0:
            continue
        *library, version = json.loads(answer.stdout)
        library = dict.fromkeys(map(os.path.realpath, library))
        if all(map(reachable, library)):
            return Interpreter(candidate, tuple(library), version)
    raise NoIsolationError(
        "no isolation available: no python that an unprivileged user may start among "
        f"{', '.join(tried) or 'the usual places'} (install python3 into /usr/bin)"
    )


def reachable(path: str) -> bool:
    """Returns whether sandboxed programs can read and enter a path, according to their user id.

    Programs run as an unprivileged user if this process is root, else as the current user.
    """
    if os.geteuid() != 0:
        return os.access(path, os.R_OK | os.X_OK)
    target = Path(path)
    needed = [(parent, stat.S_IXOTH) for parent in target.parents]
    needed.append((target, stat.S_IXOTH | stat.S_IROTH))
    try:
        return all(os.stat(directory).st_mode & bits == bits for directory, bits in needed)
    except OSError:
        return False


@functools.lru_cache
def _file_system(
    interpreter: Interpreter, libraries: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Finds the files that a program may read: the interpreter, and the libraries that it can load.

    Returns:
        (readable paths, hidden directories, links) as in `Job`.
    """
    for library in libraries:
        if not os.path.isdir(library) or not reachable(library):
            raise NoIsolationError(
                f"sandbox library {library!r} is not a directory that others can read"
            )
    standard = interpreter.standard_library
    hidden = [os.path.join(path, name) for path in standard for name in _THIRD_PARTY]
    hidden = [path for path in hidden if os.path.isdir(path)]
    extensions, _ = _contents(standard, hidden)
    more, outside = _contents(libraries, [])
    linked = _shared_libraries(interpreter.path, extensions + more)
    linked = [path for path in linked if reachable(os.path.dirname(path))]
    readable: list[str] = []
    for path in (interpreter.path, *standard, *_DATA, *linked, *outside, *libraries):
        inside = any(f"{path}/".startswith(f"{root}/") for root in (*readable, *libraries))
        if os.path.exists(path) and (path in libraries or not inside):
            readable.append(path)
    names = (
        os.path.join(os.path.dirname(interpreter.path), name) for name in ("python3", "python")
    )
    names = (path for path in names if os.path.realpath(path) == interpreter.path)
    links = [(os.readlink(path), path) for path in (*_TOP_LEVEL, *names) if os.path.islink(path)]
    return tuple(readable), tuple(hidden), tuple(links)


def _contents(roots: tuple[str, ...], hidden: list[str]) -> tuple[list[str], list[str]]:
    """Returns (shared libraries in some directory trees, targets of links that leave the trees)."""
    extensions, outside = [], []
    for root in roots:
        for directory, folders, files in os.walk(root):
            folders[:] = [name for name in folders if os.path.join(directory, name) not in hidden]
            for name in (*folders, *files):
                path = os.path.join(directory, name)
                if os.path.islink(path):
                    outside.append(os.path.realpath(path))
                elif ".so" in name and not {":", " "} & set(path):
                    extensions.append(path)
    return extensions, [path for path in outside if reachable(os.path.dirname(path))]


def _shared_libraries(interpreter: str, extensions: list[str]) -> list[str]:
    """Returns the paths of all shared libraries that an interpreter and its extensions load."""
    paths: dict[str, None] = {}
    for start in range(0, len(extensions) or 1, _AT_A_TIME):
        # With these variables, the dynamic linker prints the libraries instead of loading them.
        preload = ":".join(extensions[start : start + _AT_A_TIME])
        variables = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": preload}
        answer = subprocess.run(
            [interpreter, "-V"], capture_output=True, text=True, env=variables, check=False
        )
        for name in re.findall(r"(?:=>|^)\s+(/.*) \(0x", answer.stdout, re.MULTILINE):
            folder, file = os.path.split(name)
            paths[os.path.join(os.path.realpath(folder), file)] = None
    # The C library loads this library, which is in the same directory, when a thread is cancelled.
    beside = {os.path.dirname(path) for path in paths if os.path.basename(path).startswith("libc.")}
    return [*paths, *(os.path.join(folder, "libgcc_s.so.1") for folder in beside)]


def _scratch_parent() -> str:
    for directory in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if reachable(directory) and os.access(directory, os.W_OK):
            return directory
    raise NoIsolationError("the sandbox finds no directory for temporary files: set TMPDIR")


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/bin:/usr/local/bin:/bin"
