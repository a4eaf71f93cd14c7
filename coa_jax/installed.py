"""How this package is installed: where its configs are, and how to add the packages of an extra."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

from coa_jax.errors import UserError

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent

ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _CHECKOUT
"""Directory that holds ``configs/``: the package if it came as a wheel, else the checkout."""

_EXTRA = re.compile(r"""(?P<requirement>[^;]+?)\s*;\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']""")


def requirements_of(extra: str) -> list[str]:
    """Returns the requirements of an extra as setup.py lists them, e.g. ``["gguf>=0.19"]``.

    The list is empty if the package was not installed by pip or has no such extra.
    """
    import importlib.metadata  # here: it would double the time of `coa-jax --help`

    try:
        requirements = importlib.metadata.requires("coa_jax") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = filter(None, map(_EXTRA.fullmatch, requirements))
    return [match["requirement"] for match in matches if match["extra"] == extra]


def install_hint(extra: str) -> str:
    """Returns the shell command that installs the packages of an extra, for error messages.

    The environment ``.venv`` of a checkout is completed by the script that made it.  Any other
    environment gets the requirements by name, because ``coa_jax`` is on no package index.

    Args:
        extra: name of an extra in setup.py.
    """
    script, requirements = _CHECKOUT / "launch" / "setup_env.sh", requirements_of(extra)
    if not script.is_file() or (requirements and Path(sys.prefix) != _CHECKOUT / ".venv"):
        return shlex.join(["pip", "install", *requirements])
    here = Path.cwd() == _CHECKOUT
    return shlex.join(["bash", str(script.relative_to(_CHECKOUT) if here else script), extra])


def missing(what: str, package: str, extra: str) -> UserError:
    """Returns the error for a feature whose package is not installed.

    Args:
        what: the feature, as the subject of "needs".
        package: name of the package, or several names.
        extra: the extra in setup.py that brings the package.
    """
    return UserError(f"{what} needs {package}; run: {install_hint(extra)}")


def config_files() -> list[Path]:
    """Returns the config files of the package, relative to `ROOT`, sorted."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / "configs").glob("*/*.py"))


def first_line(path: Path) -> str:
    """Returns the first line of the docstring of a Python file, without importing the file."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
