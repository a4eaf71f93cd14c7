"""The notebooks run on the directory of a run, and are stored without outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from coa_jax.run_dir import RunDir
from coa_jax.trajectory import Trajectory

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))

_SPEC = importlib.util.spec_from_file_location(
    "notebook_run_files", Path(__file__).parent / "report" / "run_files.py"
)
assert _SPEC is not None and _SPEC.loader is not None
run_files = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(run_files)


def write_run(root: Path) -> Path:
    """A run directory as the entry points write it; three of four stages have trajectories."""
    with RunDir(root) as run:
        for row in run_files.metric_rows():
            scalars = {k: v for k, v in row.items() if k not in ("step", "phase")}
            scalars = {k: float("nan") if v is None else v for k, v in scalars.items()}
            run.metrics(row["step"], row["phase"], **scalars)
        rates = {"teacher": 1.0, "base": 0.0, "sft": 0.5, "rl": 0.75}
        run.summary({stage: run_files.block(rate, 200) for stage, rate in rates.items()})
        for stage in ("base", "sft", "rl"):
            episodes: list[Trajectory] = [
                run_files.episode(
                    place, stage, k / len(run_files.PLACES) < rates[stage],
                    task_id=str(k), metadata={"stage": stage, "hops": 1 + k % 3},
                )
                for k, place in enumerate(run_files.PLACES)
            ]  # fmt: skip
            run.traces(1, f"evaluate-{stage}", [t.to_json() for t in episodes])
    return root


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS] == ["explore_run.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def execute(run: Path, monkeypatch) -> list:
    """The outputs of the notebook on a run directory."""
    monkeypatch.setenv("COA_JAX_RUN", str(run))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = nbformat.read(REPOSITORY / "notebooks" / "explore_run.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(REPOSITORY / "notebooks")}}
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    return outputs


def test_explore_run_shows_a_run(tmp_path, monkeypatch):
    outputs = execute(write_run(tmp_path / "a run"), monkeypatch)
    pages = "".join(o.data.get("text/html", "") for o in outputs if "data" in o)
    assert sum("image/png" in o.data for o in outputs if "data" in o) == 4
    assert "0.750" in pages and "0.690 to 0.810" in pages
    assert "What is half of the area of" in pages
    assert "base: wrong" in pages and "rl: right" in pages
    assert "wiki_search</td><td>8</td>" in pages
    # Text of tools is shown and not obeyed.
    assert "&lt;script&gt;document.title" in pages
    assert "<script>" not in pages and "<img" not in pages


@pytest.mark.parametrize("missing", [("summary.json",), ("metrics.jsonl",), ("traces.jsonl",)])
def test_explore_run_shows_what_a_stage_of_its_own_wrote(tmp_path, monkeypatch, missing):
    run = write_run(tmp_path / "run")
    for name in missing:
        (run / name).unlink()
    outputs = execute(run, monkeypatch)
    pages = "".join(o.data.get("text/html", "") for o in outputs if "data" in o)
    assert ("0.690 to 0.810" in pages) == ("summary.json" not in missing)
    assert ("wiki_search</td><td>8</td>" in pages) == ("traces.jsonl" not in missing)


def test_explore_run_shows_an_evaluation_under_a_name_of_its_own(tmp_path, monkeypatch):
    with RunDir(tmp_path) as run:
        run.summary({"ours": run_files.block(0.5, 200)})
    outputs = execute(tmp_path, monkeypatch)
    assert "<td>ours</td>" in "".join(o.data.get("text/html", "") for o in outputs if "data" in o)


def test_a_run_that_is_not_there_is_an_error_and_no_page_of_zeros(tmp_path, monkeypatch):
    with pytest.raises(CellExecutionError, match="holds no run; set COA_JAX_RUN"):
        execute(tmp_path / "rn", monkeypatch)


def test_an_evaluation_that_nobody_graded_is_shown_as_such(tmp_path, monkeypatch):
    with RunDir(tmp_path) as run:
        run.summary({"ours": {**run_files.block(0.5, 200), "pass_at_1": None, "n": 0}})
    outputs = execute(tmp_path, monkeypatch)
    assert "not graded" in "".join(o.data.get("text/html", "") for o in outputs if "data" in o)
