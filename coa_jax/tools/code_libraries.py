"""Python packages that programs of the code tool can import.

``python -m coa_jax.tools.code_libraries numpy sympy`` installs packages and prints their directory.
A run with ``--config.tools.code_libraries=numpy,sympy`` installs them on first use. pip installs
into a separate directory, which programs can read but not change. On machines without a network, a
directory of installed packages can replace the names.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
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

from coa_jax import files
from coa_jax.bounds import Text
from coa_jax.errors import UserError
from coa_jax.tools.sandbox.isolation import (
    Interpreter,
    Isolation,
    find_interpreter,
    find_isolation,
    reachable,
)
from coa_jax.tools.sandbox.limits import Limits
from coa_jax.tools.sandbox.run import run

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
"""A package for programs, or a directory with installed packages."""
_TOLD = 40
_INSTALL_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        name: name of the distribution, e.g. "scikit-learn".
        version: version, e.g. "1.7.2".
        module: import name, e.g. "sklearn".
    """

    name: str
    version: str
    module: str


@dataclasses.dataclass(frozen=True)
class Libraries:
    """Packages for programs.

    Attributes:
        directories: directories of the packages, which are added to ``sys.path`` of programs.
        packages: the requested packages; all installed packages if only directories were given.
    """

    directories: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()

    def __str__(self) -> str:
        """Lists names and versions, e.g. "numpy 2.4.6, sympy 1.14.0"."""
        told = [f"{package.name} {package.version}" for package in self.packages[:_TOLD]]
        return ", ".join(told)

    def note(self) -> str:
        """The sentence about the packages for the prompt; "" without packages."""
        if not self.packages:
            return ""
        return f"It can import the standard library and these packages: {self}."


def find_libraries(wanted: Sequence[str], interpreter: Interpreter | None = None) -> Libraries:
    """Finds the packages, and installs missing ones first.

    Args:
        wanted: names ("numpy"), requirements ("numpy>=2") or existing directories with installed
            packages. A package in one of the directories is not installed again.
        interpreter: the Python that will import them; by default the sandbox's.

    Raises:
        UserError: an entry is neither, programs cannot read a directory, or pip fails.
    """
    if not wanted:
        return Libraries()
    interpreter = interpreter or find_interpreter()
    directories, requirements = [], {}
    for entry in wanted:
        if entry.startswith(("/", "~", "./", "../")):
            directories.append(_directory(entry))
        elif match := re.fullmatch(_REQUIREMENT, entry.strip()):
            requirements[_normal(match[1])] = entry.strip()
        else:
            raise UserError(
                f"tools.code_libraries: {entry!r} is neither a package (numpy, 'numpy>=2') nor the"
                " path of a directory with installed packages"
            )
    there = {_normal(package.name): package for package in _packages(directories)}
    missing = [text for name, text in requirements.items() if name not in there]
    if missing:
        directories.append(_installed(sorted(missing), interpreter))
        there |= {_normal(package.name): package for package in _packages(directories[-1:])}
    packages = [there[name] for name in requirements] if requirements else list(there.values())
    return Libraries(tuple(directories), tuple(packages))


async def try_imports(
    isolation: Isolation, limits: Limits, libraries: Libraries
) -> list[tuple[bool, str]]:
    """Imports each package in a program of its own.

    Args:
        isolation: the sandbox.
        limits: limits of each program.
        libraries: the packages.

    Returns:
        (whether the import succeeded, message) of each package.

    Raises:
        SandboxError: the sandbox does not work.
    """
    job, found = isolation.job(limits, libraries.directories), []
    for package in libraries.packages:
        source = f"import time\nstart = time.time()\nimport {package.module}\n"
        result = await run(job, source + "print(f'{time.time() - start:.2f}')")
        text = f"{package.name} {package.version}"
        if result.reason == "exit" and result.code == 0:
            found.append((True, f"{text}, imported in {result.stdout.head.strip()} s"))
            continue
        last = (result.stderr.tail.strip().splitlines() or [f"stopped: {result.reason}"])[-1]
        found.append((False, f"{text}, cannot be imported: {last}"))
    return found


def _directory(entry: str) -> str:
    path = os.path.realpath(os.path.expanduser(entry))
    if not os.path.isdir(path):
        raise UserError(f"tools.code_libraries: there is no directory {entry}")
    if not reachable(path):
        raise UserError(
            f"tools.code_libraries: other users cannot read {path}, and programs run as one;"
            " move it, or chmod o+rx it and the directories above it"
        )
    return path


def _packages(directories: Sequence[str]) -> Iterator[Package]:
    for found in sorted(
        importlib.metadata.distributions(path=list(directories)), key=lambda one: str(one.name)
    ):
        modules = (found.read_text("top_level.txt") or "").split()
        if not modules:
            files = [file.parts[0] for file in found.files or () if file.suffix == ".py"]
            modules = sorted({part.removesuffix(".py") for part in files})
        public = [module for module in modules if not module.startswith(("_", "."))]
        named = [module for module in public if _normal(module) == _normal(found.name)]
        if public:
            yield Package(found.name, found.version, (named or public)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(requirements: list[str], interpreter: Interpreter) -> str:
    """Returns the directory with the requirements; runs pip if the directory does not exist."""
    python = [interpreter.path, interpreter.version, platform.machine(), *requirements]
    key = hashlib.sha256(json.dumps(python).encode()).hexdigest()[:16]
    cache = _cache()
    target = cache / key
    if target.is_dir():
        return str(target)
    wanted = " ".join(requirements)
    logging.warning("code_libraries: pip installs %s for programs into %s", wanted, target)
    start = time.monotonic()

    def fill(fresh: Path) -> None:
        _pip(requirements, interpreter, fresh)
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))

    try:
        files.make_folder(target, fill)
    except OSError as error:
        raise UserError(f"tools.code_libraries: {target} cannot be made: {error}") from error
    logging.warning("code_libraries: installed after %.0f s", time.monotonic() - start)
    return str(target)


def _pip(requirements: list[str], interpreter: Interpreter, target: Path) -> None:
    # The settings of this Python must not affect the other one.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    options = ["install", "--target", str(target), "--quiet", "--no-input", "--prefer-binary"]
    options += ["--disable-pip-version-check", "--no-warn-script-location", *requirements]
    said = "no pip was found"
    # Use the interpreter's own pip, or our pip on behalf of that interpreter.
    for pip in (
        [interpreter.path, "-m", "pip"],
        [sys.executable, "-m", "pip", "--python", interpreter.path],
    ):
        if subprocess.run([*pip, "--version"], capture_output=True, env=environment).returncode:
            continue
        try:
            result = subprocess.run(
                [*pip, *options],
                capture_output=True,
                text=True,
                env=environment,
                timeout=_INSTALL_S,
            )
        except subprocess.TimeoutExpired:
            said = f"not ready after {_INSTALL_S:g} s"
            break
        if result.returncode == 0:
            return
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        said = " ".join(lines[-1:]) or result.stderr.strip()[-300:]
        break
    raise UserError(
        f"tools.code_libraries: pip cannot install {' '.join(requirements)} for"
        f" {interpreter.path}: {said} (without a network, name a directory with the packages)"
    )


def _cache() -> Path:
    """Returns a directory that this process can write and programs can read."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    places = [home, Path("/var/cache"), Path("/var/tmp")]
    for place in places:
        cache = place / "coa_jax" / "code"
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        if not reachable(str(existing)) or not os.access(existing, os.W_OK):
            continue
        cache.mkdir(parents=True, exist_ok=True)
        for path in (cache, cache.parent):
            path.chmod(0o755)
        if cache.stat().st_uid == os.geteuid():  # other users cannot add packages there
            return cache
    raise UserError(
        f"tools.code_libraries: none of {', '.join(map(str, places))} can hold packages that"
        " programs can read; set XDG_CACHE_HOME to a directory that other users can enter"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="coa_jax.tools.code_libraries", description=__doc__)
    parser.add_argument("wanted", nargs="+", help="packages or directories")
    options = parser.parse_args(arguments)
    wanted = [name for text in options.wanted for name in split_libraries(text)]
    try:
        isolation = find_isolation()
        libraries = find_libraries(wanted, isolation.interpreter)
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
    """Splits entries at commas; a comma before a version comparison belongs to its requirement."""
    return [entry for entry in re.split(r",(?![\s=~!<>])", text) if entry]


if __name__ == "__main__":
    sys.exit(main())
