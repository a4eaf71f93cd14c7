"""Runs notebooks and stores their outputs, without messages on standard error.

    python notebooks/execute.py train_policy own_environment

`COA_JAX_RUN` names the run that explore_run and inside_a_rollout show.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def execute(path: Path) -> None:
    """Runs a notebook and writes its outputs into the file."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(FOLDER / f"{name}.ipynb")
