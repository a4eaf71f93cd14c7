"""Describes the installation: its version, config files, extras and tested versions of JAX."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

from coa_jax.errors import UserError

VERSION = "0.2.0"
"""Version of coa_jax; setup.py reads this line, and the package exports it as ``__version__``."""

_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parent

ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _CHECKOUT
"""Directory that contains ``configs/``: the package of an installed wheel, or the checkout."""

CONSTRAINTS = Path(__file__).parent / "constraints"
"""Directory of the pip constraint files: tested combinations of versions, and the lowest ones."""

_EXTRA = re.compile(r"""(?P<requirement>[^;]+?)\s*;\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']""")


def requirements_of(extra: str) -> list[str]:
    """Returns the requirements of an extra as setup.py lists them.

    An example is ``["gguf>=0.19"]``. The list is empty if setup.py has no such extra, or if pip did
    not install ``coa_jax``.
    """
    import importlib.metadata  # imported here: it would double the time of `coa-jax --help`

    try:
        requirements = importlib.metadata.requires("coa_jax") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = filter(None, map(_EXTRA.fullmatch, requirements))
    return [match["requirement"] for match in matches if match["extra"] == extra]


def has_extra(extra: str) -> bool:
    """Returns whether all packages of an extra of setup.py are installed."""
    import importlib.metadata  # here for the reason given above

    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in requirements_of(extra)]
    try:
        return all(map(importlib.metadata.version, names))
    except importlib.metadata.PackageNotFoundError:
        return False


def install_hint(extra: str) -> str:
    """Returns the shell command that installs the packages of an extra, for error messages.

    In the ``.venv`` of a checkout, the command is the setup script. In any other environment, the
    command is pip with the names of the required packages, because ``coa_jax`` is not on a package
    index.

    Args:
        extra: name of an extra in setup.py.
    """
    script, requirements = _script(), requirements_of(extra)
    if not script or (requirements and Path(sys.prefix) != _CHECKOUT / ".venv"):
        return shlex.join(["pip", "install", *requirements])
    return f"{script} {shlex.quote(extra)}"


def _script() -> str:
    """Returns the command of the setup script of a checkout; "" if there is no checkout."""
    script = _CHECKOUT / "launch" / "setup_env.sh"
    if not script.is_file():
        return ""
    here = Path.cwd() == _CHECKOUT
    return shlex.join(["bash", str(script.relative_to(_CHECKOUT) if here else script)])


def missing(what: str, package: str, extra: str) -> UserError:
    """Returns the error for a feature whose package is not installed.

    Args:
        what: name of the feature. The message begins with "FEATURE needs PACKAGE".
        package: name of the missing package, or several names.
        extra: name of the extra in setup.py that contains the package.
    """
    return UserError(f"{what} needs {package}; run: {install_hint(extra)}")


def tested_versions() -> list[tuple[str, str, Path]]:
    """Returns the tested combinations of versions, the oldest first.

    Each combination is a triple (version of Python, version of JAX, constraint file), for example
    ``("3.11", "0.10.2", Path(".../constraints/jax-0.10.txt"))``.
    """
    tested = []
    for path in CONSTRAINTS.glob("jax-*.txt"):
        text = path.read_text(encoding="utf-8")
        python = re.search(r"^# Tested with Python ([\d.]+)\.$", text, re.MULTILINE)
        jax = re.search(r"^jax==(\S+)$", text, re.MULTILINE)
        if python is None or jax is None:
            raise ValueError(f"{path}: no Python or no jax")
        tested.append((python[1], jax[1], path))
    return sorted(tested, key=lambda each: _minor(each[1]))


def untested() -> str:
    """Returns a warning if the version of Python or JAX is outside the tested range; else "".

    The range goes from the oldest to the newest tested minor version, such as 3.12 and 0.11.
    Versions within the range count as tested.
    """
    import importlib.metadata  # here for the reason given above

    tested = tested_versions()
    try:
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return ""
    (old_python, old_jax, _), (new_python, new_jax, newest) = tested[0], tested[-1]
    python = "{}.{}".format(*sys.version_info)
    known_python = _minor(old_python) <= _minor(python) <= _minor(new_python)
    if known_python and _minor(old_jax) <= _minor(jax) <= _minor(new_jax):
        return ""
    file = next((path for version, _, path in tested if version == python), newest)
    advice = shlex.join(["pip", "install", "-c", str(file), "jax", "flax"])
    if not known_python:
        advice = f"take Python {old_python} to {new_python}"
    elif (script := _script()) and Path(sys.prefix) == _CHECKOUT / ".venv":
        advice = f"CONSTRAINTS={file.stem} {script}"
    return (
        f"Python {python} with jax {jax} is not tested (Python {old_python} with jax {old_jax} to "
        f"Python {new_python} with jax {new_jax} are); if something fails, {advice}"
    )


def warn_untested() -> None:
    """Prints the warning that `untested` returns to stderr, unless it is empty."""
    if text := untested():
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def config_files() -> list[Path]:
    """Returns the paths of the config files in the package, sorted and relative to `ROOT`."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / "configs").glob("*/*.py"))


def first_line(path: Path) -> str:
    """Returns the first line of the docstring of a Python file, without importing the file."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
