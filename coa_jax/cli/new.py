"""Creates a folder with the template of an extension: a module, a test and a README.

    coa-jax new reward brief      brief/brief.py, brief/test_brief.py and brief/README.md

The kinds of extensions are tool, reward, tasks, environment, advantage, loss, reader and format;
each has a folder in `templates`. docs/extending.md describes the parameters of each kind.
"""

from __future__ import annotations

import importlib.util
import io
import keyword
import re
import sys
import tokenize
from pathlib import Path

from coa_jax.config.overrides import suggest
from coa_jax.errors import UserError
from coa_jax.run.command import run_main

TEMPLATES = Path(__file__).parent / "templates"
"""Directory with a folder for each kind of extension.

A folder contains the files of the extension, with NAME in place of its name, and the options of
a run of ``coa-jax rl``, or the whole command. ``extension.md`` is the template of every extension's
README.
"""


def kinds() -> list[str]:
    """Returns the kinds of extensions that have templates."""
    return sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir())


def write_new(kind: str, name: str) -> list[Path]:
    """Creates the folder of a new extension; returns the paths of the files in the folder.

    Args:
        kind: kind of the extension, one of `kinds`.
        name: name of the folder, of the module in the folder, and of the function or class in the
            module.

    Raises:
        UserError: the kind is unknown, the name is not a valid module name, or the folder exists.
    """
    if kind not in kinds():
        raise UserError(f"there is no kind {kind!r}{suggest(kind, kinds())}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", name) or keyword.iskeyword(name):
        raise UserError(
            f"{name!r} cannot name a module; give a small letter, then small letters, digits and _"
        )
    if name in sys.stdlib_module_names or name in ("coa_jax", "jax", "numpy", "NAME"):
        raise UserError(f"{name} is the name of another module; choose another")
    target = Path(name)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists; choose another name, or remove it")
    templates = {
        path.name: path.read_text(encoding="utf-8") for path in sorted((TEMPLATES / kind).iterdir())
    }
    if any(name in _names(text) for file, text in templates.items() if ".py" in file):
        raise UserError(f"the new module uses the name {name} for something else; choose another")
    texts = {file: text.replace("NAME", name) for file, text in templates.items()}
    options = texts.pop("options.txt").splitlines()
    if not options[0].startswith("coa-jax "):
        options.insert(0, f"coa-jax rl --config=configs/rl/tiny.py --workdir=runs/{name}")
    summary = texts["NAME.py.txt"].partition('"""')[2].partition('"""')[0].strip()
    readme = (TEMPLATES / "extension.md").read_text(encoding="utf-8")
    texts["README.md"] = readme.format(name=name, what=summary, options=" \\\n    ".join(options))
    target.mkdir()
    written = []
    for file, text in texts.items():
        written.append(target / file.removesuffix(".txt").replace("NAME", name))
        written[-1].write_text(text, encoding="utf-8")
    return written


def _names(code: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def main(argv: list[str]) -> None:
    """Runs ``coa-jax new``: creates the folder of an extension."""
    if len(argv) != 3:
        raise UserError(f"give a kind and a name: coa-jax new {'|'.join(kinds())} NAME")
    for path in write_new(argv[1], argv[2]):
        print(path)
    if importlib.util.find_spec("pytest") is None:
        print("the test needs pytest: pip install pytest", file=sys.stderr)


if __name__ == "__main__":
    run_main(main, positional=True)
