"""Runs notebooks and stores their outputs, without messages on standard error.

    python notebooks/execute.py train_policy own_environment

`COA_JAX_RUN` names the run that explore_run and inside_a_rollout show. Without names, the script
only writes the address of the repository into all notebooks and the README: the button that opens
a notebook in Colab, what its first cell installs, and the badge of CI.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent

REPOSITORY = ""
"""Address of the repository, such as ``https://github.com/OWNER/NAME``; "" until it has one."""

_EXTRAS = {"explore_run": "notebook"}
_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_BUTTON = re.compile(r"\[!\[(?:Open in Colab|CI)\].*\n\n")

_FIRST_CELL = """\
import importlib.util
import os

# What pip installs if coa_jax is missing, as in Colab: the address of the repository, or a wheel.
COA_JAX = os.environ.get("COA_JAX", "ADDRESS")

if importlib.util.find_spec("coa_jax") is None:
    if not COA_JAX:
        raise SystemExit("coa_jax is missing: set COA_JAX, for example to git+https://HOST/NAME")
    named = f"coa_jax[EXTRAS] @ {COA_JAX}"
    package = named if "://" in COA_JAX else f"{COA_JAX}[EXTRAS]"
    %pip install --quiet "{package}"

%config InlineBackend.figure_formats = ["svg"]"""


def execute(path: Path) -> None:
    """Runs a notebook and writes its outputs into the file."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    nbformat.write(notebook, path)


def with_address(notebook: nbformat.NotebookNode, name: str, repository: str) -> None:
    """Writes the address of the repository into a notebook, see `REPOSITORY`."""
    title, first = notebook.cells[0], notebook.cells[1]
    place = repository.removeprefix("https://github.com/")
    opened = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}.ipynb"
    button = f"[![Open in Colab]({_BADGE})]({opened})"
    title.source = with_button(title.source, button if repository else "")
    extras = _EXTRAS.get(name, "demo,notebook")
    address = f"git+{repository}" if repository else ""
    first.source = _FIRST_CELL.replace("EXTRAS", extras).replace("ADDRESS", address)


def with_button(text: str, button: str) -> str:
    """Returns a document with a button, or none for "", below its title."""
    heading, _, rest = _BUTTON.sub("", text).partition("\n\n")
    return "\n\n".join([heading, button, rest] if button else [heading, rest])


def with_badge(readme: str, repository: str) -> str:
    """Returns the README with the badge of CI, see `REPOSITORY`."""
    ci = f"{repository}/actions/workflows/ci.yml"
    return with_button(readme, f"[![CI]({ci}/badge.svg)]({ci})" if repository else "")


if __name__ == "__main__":
    readme = FOLDER.parent / "README.md"
    readme.write_text(with_badge(readme.read_text(), REPOSITORY))
    for name in sys.argv[1:] or [path.stem for path in FOLDER.glob("*.ipynb")]:
        path = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        with_address(notebook, name, REPOSITORY)
        nbformat.write(notebook, path)
        if sys.argv[1:]:
            execute(path)
