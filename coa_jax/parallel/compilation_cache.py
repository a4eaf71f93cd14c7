"""Keeps compiled programs between processes, and says when programs are compiled."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

from coa_jax.files.durable import cache_folder

_DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
_DEFAULTS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(4 << 30),
}
_MISS = "/jax/compilation_cache/cache_misses"


def enable_compilation_cache(folder: Path | None = None) -> None:
    """Lets JAX keep compiled programs between processes, up to 4 GiB.

    The function sets environment variables, so it must be called before JAX is imported. It changes
    nothing if the folder cannot be created, or if ``JAX_COMPILATION_CACHE_DIR`` is set already. The
    value "" of this variable switches the cache off.

    Args:
        folder: folder that gets a subfolder with the programs for this processor; None for the
            user's cache folder.
    """
    if _DIRECTORY in os.environ:
        return
    folder = (folder or cache_folder("compiled")) / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ[_DIRECTORY] = str(folder)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def _processor() -> str:
    """Returns a name of the instructions that the processor has.

    Machines with other processors may share the folder, and programs for CPUs contain instructions
    of the processor for which they were compiled.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    digest = hashlib.blake2b("\n".join(flags).encode(), digest_size=6)
    return f"{platform.machine()}-{digest.hexdigest()}"


@functools.cache
def log_compilations() -> None:
    """Prints one line as soon as JAX has to compile a program that is not in the cache."""
    import jax

    misses: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event == _MISS and not misses:
            misses.append(event)
            folder = os.environ.get(_DIRECTORY, "")
            print(f"JAX compiles programs and keeps them in {folder}", file=sys.stderr, flush=True)

    jax.monitoring.register_event_listener(listen)
