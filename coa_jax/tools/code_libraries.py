"""Installs Python packages that programs of the tool ``code`` can import.

``python -m coa_jax.tools.code_libraries numpy sympy`` installs packages and prints their directory.
A run with ``--config.tools.code.libraries=numpy,sympy`` installs the packages when it first needs
them. pip installs the packages into a separate directory, which programs can read but not change.
On machines without a network, give a directory with installed packages instead of names.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from coa_jax.config.fields import Text
from coa_jax.errors import UserError
from coa_jax.files import durable as files
from coa_jax.sandbox.isolation import (
    Interpreter,
    Isolation,
    NoIsolationError,
    find_isolation,
    reachable,
    without_isolation,
)
from coa_jax.sandbox.limits import Limits
from coa_jax.sandbox.run import run

_VERSION = r"\s*(===|==|~=|!=|>=|<=|>|<)\s*[\w.*+!-]+\s*"
_REQUIREMENT = rf"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[\w,.-]+\])?({_VERSION}(,{_VERSION})*)?"
_PLACE = r"(/|~|\./|\.\./).*"
Library = Annotated[
    str,
    Text(
        4096,
        f"{_REQUIREMENT}|{_PLACE}",
        "a package such as numpy or numpy>=2, or the path of a directory with packages",
    ),
]
"""Type of a setting that names a package for programs, or a directory with installed packages."""
_TOLD = 40
_INSTALL_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        name: name of the distribution, such as "scikit-learn".
        version: version of the distribution, such as "1.7.2".
        module: name with which programs import the package, such as "sklearn".
    """

    name: str
    version: str
    module: str


@dataclasses.dataclass(frozen=True)
class Libraries:
    """The packages that programs can import in addition to the standard library.

    Attributes:
        directories: directories with the packages, which are added to ``sys.path`` of programs.
        packages: the requested packages, or all packages in the directories if no package was
            requested by name.
    """

    directories: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()

    def __str__(self) -> str:
        """Returns names and versions of the packages, such as "numpy 2.4.6, sympy 1.14.0"."""
        return ", ".join(f"{each.name} {each.version}" for each in self.packages[:_TOLD])

    def note(self) -> str:
        """Returns the sentence for prompts that names the packages; "" if there are no packages."""
        if not self.packages:
            return ""
        return f"It can import the standard library and these packages: {self}."


def isolation_here(backend: str = "auto", unsafe: bool = False) -> Isolation:
    """Returns the isolation in which this machine runs programs, see `find_isolation`.

    Args:
        backend: kind of isolation: "bubblewrap", "landlock", or "auto" for the best that works.
        unsafe: whether programs run without isolation, see `without_isolation`.

    Raises:
        UserError: no isolation works, or ``unsafe`` is True and the environment variable
            ``COA_JAX_ALLOW_UNSAFE_CODE=1`` is not set.
    """
    try:
        return without_isolation() if unsafe else find_isolation(backend)
    except NoIsolationError as error:
        raise UserError(str(error)) from error


def find_libraries(entries: Sequence[str], interpreter: Interpreter | None = None) -> Libraries:
    """Finds packages for programs, and installs missing packages.

    Args:
        entries: names ("numpy"), requirements ("numpy>=2"), or directories with installed packages.
            A requested package that one of the directories contains already is not installed again.
        interpreter: Python that will import the packages; None for the Python of the sandbox.

    Raises:
        UserError: an entry is neither a requirement nor a directory, programs cannot read a
            directory, or pip fails.
    """
    if not entries:
        return Libraries()
    interpreter = interpreter or isolation_here().interpreter
    directories, requirements = [], {}
    for entry in entries:
        if entry.startswith(("/", "~", "./", "../")):
            directories.append(_directory(entry))
        elif match := re.fullmatch(_REQUIREMENT, entry.strip()):
            requirements[_normal(match[1])] = entry.strip()
        else:
            raise UserError(
                f"tools.code.libraries: {entry!r} is neither a package (numpy, 'numpy>=2') nor the"
                " path of a directory with installed packages"
            )
    there = {_normal(package.name): package for package in _packages(directories)}
    missing = [text for name, text in requirements.items() if name not in there]
    if missing:
        directories.append(_installed(sorted(missing), interpreter))
        there |= {_normal(package.name): package for package in _packages(directories[-1:])}
    if empty := [text for name, text in requirements.items() if name not in there]:
        raise UserError(
            f"tools.code.libraries: {empty[0]!r} contains no module that programs can import; name "
            "the package that contains the module"
        )
    packages = [there[name] for name in requirements] if requirements else list(there.values())
    return Libraries(tuple(directories), tuple(packages))


async def try_imports(
    isolation: Isolation, limits: Limits, libraries: Libraries
) -> list[tuple[bool, str]]:
    """Tries to import each package, in a separate program in the sandbox.

    Args:
        isolation: isolation in which the programs run.
        limits: limits of each program.
        libraries: packages to import.

    Returns:
        (whether the import succeeded, message about the import) for each package.

    Raises:
        SandboxError: the sandbox failed for a reason other than the program.
    """
    job, results = isolation.job(limits, libraries.directories), []
    for package in libraries.packages:
        source = f"import time\nstart = time.time()\nimport {package.module}\n"
        result = await run(job, source + "print(f'{time.time() - start:.2f}')")
        text = f"{package.name} {package.version}"
        ok = result.reason == "exit" and result.code == 0
        last = (result.stderr.tail.strip().splitlines() or [f"stopped: {result.reason}"])[-1]
        how = f"imported in {result.stdout.head.strip()} s" if ok else f"cannot be imported: {last}"
        results.append((ok, f"{text}, {how}"))
    return results


def _directory(entry: str) -> str:
    path = os.path.realpath(os.path.expanduser(entry))
    if not os.path.isdir(path):
        raise UserError(f"tools.code.libraries: there is no directory {entry}")
    if not reachable(path):
        raise UserError(
            f"tools.code.libraries: other users cannot read {path}, and programs run as another"
            " user; move it, or run chmod o+rx on it and on the directories above it"
        )
    return path


def _packages(directories: Sequence[str]) -> Iterator[Package]:
    installed = importlib.metadata.distributions(path=list(directories))
    for distribution in sorted(installed, key=lambda one: str(one.name)):
        modules = (distribution.read_text("top_level.txt") or "").split()
        if not modules:
            files = [file.parts[0] for file in distribution.files or () if file.suffix == ".py"]
            modules = sorted({part.removesuffix(".py") for part in files})
        public = [module for module in modules if not module.startswith(("_", "."))]
        same_name = [module for module in public if _normal(module) == _normal(distribution.name)]
        if public:
            yield Package(distribution.name, distribution.version, (same_name or public)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(requirements: list[str], interpreter: Interpreter) -> str:
    """Returns the directory with some packages. pip creates the directory if it does not exist."""
    python = [interpreter.path, interpreter.version, platform.machine(), *requirements]
    key = hashlib.sha256(json.dumps(python).encode()).hexdigest()[:16]
    cache = _cache()
    target = cache / key
    if target.is_dir():
        return str(target)
    packages = " ".join(requirements)
    logging.warning("tools.code.libraries: pip installs %s for programs into %s", packages, target)
    start = time.monotonic()

    def fill(fresh: Path) -> None:
        _pip(requirements, interpreter, fresh)
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))

    try:
        files.make_folder(target, fill)
    except OSError as error:
        raise UserError(f"tools.code.libraries: {target} cannot be created: {error}") from error
    logging.warning("tools.code.libraries: installed after %.0f s", time.monotonic() - start)
    return str(target)


def _pip(requirements: list[str], interpreter: Interpreter, target: Path) -> None:
    # Environment variables for this Python must not affect the Python of the sandbox.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    options = ["install", "--target", str(target), "--quiet", "--no-input", "--prefer-binary"]
    options += ["--disable-pip-version-check", "--no-warn-script-location", *requirements]
    # The pip of the sandbox's Python is tried first, and then the pip of this Python.
    python = interpreter.path
    pips = [python, "-m", "pip"], [sys.executable, "-m", "pip", "--python", python]
    call = functools.partial(subprocess.run, capture_output=True, text=True, env=environment)
    pip = next((pip for pip in pips if call([*pip, "--version"]).returncode == 0), None)
    reason = "no pip was found"
    if pip is not None:
        try:
            call([*pip, *options], check=True, timeout=_INSTALL_S)
            return
        except subprocess.TimeoutExpired:
            reason = f"not ready after {_INSTALL_S:g} s"
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
            reason = " ".join(lines[-1:]) or error.stderr.strip()[-300:]
    raise UserError(
        f"tools.code.libraries: pip cannot install {' '.join(requirements)} for {python}: {reason}"
        " (without a network, name a directory with the packages)"
    )


def _cache() -> Path:
    """Returns a directory that this process can write and programs can read."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    places = [home, Path("/var/cache"), Path("/var/tmp")]
    for parent in places:
        cache = parent / "coa_jax" / "code"
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        if not reachable(str(existing)) or not os.access(existing, os.W_OK):
            continue
        cache.mkdir(parents=True, exist_ok=True)
        for path in (cache, cache.parent):
            path.chmod(0o755)
        if cache.stat().st_uid == os.geteuid():  # other users cannot add packages there
            return cache
    raise UserError(
        f"tools.code.libraries: none of {', '.join(map(str, places))} can hold packages that"
        " programs can read; set XDG_CACHE_HOME to a directory that other users can enter"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs ``python -m coa_jax.tools.code_libraries``, which installs packages and tries them.

    Args:
        arguments: packages or directories; None for those on the command line.

    Returns:
        The exit code: 0, 1 if a package cannot be imported, or 2 if pip fails.
    """
    parser = argparse.ArgumentParser(prog="coa_jax.tools.code_libraries", description=__doc__)
    parser.add_argument("entries", nargs="+", help="packages or directories")
    options = parser.parse_args(arguments)
    entries = [name for text in options.entries for name in split_libraries(text)]
    try:
        isolation = isolation_here()
        libraries = find_libraries(entries, isolation.interpreter)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for directory in libraries.directories:
        print(f"directory    {directory}")
    tried = asyncio.run(try_imports(isolation, Limits(), libraries))
    for ok, text in tried:
        print(f"{'package' if ok else 'FAILED':12} {text}")
    return 0 if all(ok for ok, _ in tried) else 1


def split_libraries(text: str) -> list[str]:
    """Splits a text at commas into packages and directories.

    A comma before a version comparison, as in "numpy>=2,<3", does not split the text.
    """
    return [entry for entry in re.split(r",(?![\s=~!<>])", text) if entry]


if __name__ == "__main__":
    sys.exit(main())
