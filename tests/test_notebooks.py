"""The notebooks run, and are stored with outputs that are small."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from packaging.requirements import Requirement

from coa_jax.data.trajectory import Trajectory
from coa_jax.run.run_dir import RunDir

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))

_SPEC = importlib.util.spec_from_file_location(
    "notebook_run_files", Path(__file__).parent / "report" / "run_files.py"
)
assert _SPEC is not None and _SPEC.loader is not None
run_files = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(run_files)


_SCRIPT = importlib.util.spec_from_file_location(
    "execute_notebooks", REPOSITORY / "notebooks" / "execute.py"
)
assert _SCRIPT is not None and _SCRIPT.loader is not None
execute_script = importlib.util.module_from_spec(_SCRIPT)
_SCRIPT.loader.exec_module(execute_script)


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


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook) -> list:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def pages_of(outputs) -> str:
    """The HTML of all outputs."""
    return "".join(o.data.get("text/html", "") for o in outputs if "data" in o)


def test_there_is_a_notebook_for_each_audience():
    names = ["explore_run", "function_tool", "inside_a_rollout", "own_environment", "own_loop"]
    names.append("train_policy")
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_small_outputs_and_without_faults(path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 300_000
    counts = [cell.execution_count for cell in code_cells(notebook)]
    # All cells were executed in their order, or none was.
    assert counts in ([*range(1, len(counts) + 1)], [None] * len(counts))
    for output in outputs_of(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr"
        assert "image/png" not in output.get("data", {})


def first_cell(notebook, monkeypatch, **variables) -> tuple[dict, list]:
    """The variables after the first cell where coa_jax is missing, and the magic commands."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("COA_JAX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    called: list = []
    names: dict = {"magic": lambda *words: called.append(words)}
    source = code_cells(notebook)[0].source
    exec(re.sub(r"^( *)%(\w+) (.*)$", r"\1magic('\2', r'\3')", source, flags=re.MULTILINE), names)
    return names, called


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_itself_from_the_address_of_the_repository(path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    stored = nbformat.writes(notebook)
    execute_script.with_address(notebook, path.stem, execute_script.REPOSITORY)
    assert nbformat.writes(notebook) == stored, "run python notebooks/execute.py"
    if not execute_script.REPOSITORY:
        with pytest.raises(SystemExit, match="set COA_JAX"):
            first_cell(notebook, monkeypatch)

    execute_script.with_address(notebook, path.stem, "https://github.com/someone/coa_jax")
    names, called = first_cell(notebook, monkeypatch)
    assert Requirement(names["package"]).url == "git+https://github.com/someone/coa_jax"
    assert called[0] == ("pip", 'install --quiet "{package}"')
    link = f"colab.research.google.com/github/someone/coa_jax/blob/main/notebooks/{path.name})"
    assert notebook.cells[0].source.count(link) == 1
    names, _ = first_cell(notebook, monkeypatch, COA_JAX="coa_jax-0.1.0-py3-none-any.whl")
    assert names["package"].startswith("coa_jax-0.1.0-py3-none-any.whl[")
    execute_script.with_address(notebook, path.stem, execute_script.REPOSITORY)
    assert nbformat.writes(notebook) == stored


def test_the_readme_has_the_badge_of_ci_once_the_repository_has_an_address():
    readme = (REPOSITORY / "README.md").read_text()
    assert execute_script.with_badge(readme, execute_script.REPOSITORY) == readme
    badged = execute_script.with_badge(readme, "https://github.com/someone/coa_jax")
    ci = "https://github.com/someone/coa_jax/actions/workflows/ci.yml"
    title, text = readme.split("\n\n", 1)
    assert badged == f"{title}\n\n[![CI]({ci}/badge.svg)]({ci})\n\n{text}"
    assert execute_script.with_badge(badged, "https://github.com/someone/coa_jax") == badged
    assert (REPOSITORY / ".github" / "workflows" / Path(ci).name).is_file()


def execute(name: str, monkeypatch, seconds: int = 300) -> list:
    """The outputs of a notebook."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.delenv("COA_JAX", raising=False)
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
    folder = {"metadata": {"path": str(REPOSITORY / "notebooks")}}
    NotebookClient(notebook, timeout=seconds, resources=folder).execute()
    outputs = outputs_of(notebook)
    assert not [o for o in outputs if o.output_type == "error"]
    return outputs


def explore(run: Path, monkeypatch) -> list:
    """The outputs of explore_run.ipynb on the directory of a run."""
    monkeypatch.setenv("COA_JAX_RUN", str(run))
    outputs = execute("explore_run", monkeypatch)
    assert not [o for o in outputs if o.get("name") == "stderr"]
    return outputs


def printed(outputs) -> str:
    return "".join(o.text for o in outputs if o.get("name") == "stdout")


def test_explore_run_walks_through_a_run(tmp_path, monkeypatch):
    outputs = explore(write_run(tmp_path / "a run"), monkeypatch)
    pages, said = pages_of(outputs), printed(outputs)
    assert sum("image/svg+xml" in o.data for o in outputs if "data" in o) == 3
    assert "evaluated: teacher, base, sft, rl" in said
    assert "0.750" in pages and "0.690 to 0.810" in pages
    assert "from left to right: base, sft, rl" in said
    assert "What is half of the area of" in pages
    # Two of the eight questions are wrong, and no page that was read has their answer.
    assert "read the answer, wrote another" in said
    assert "<td>wiki_search</td><td>8</td>" in pages
    # Text of tools is shown and not obeyed.
    assert "&lt;script&gt;document.title" in pages
    assert "<script>" not in pages and "<img" not in pages


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["summary.json", "metrics.jsonl", "traces.jsonl"])
def test_explore_run_shows_what_a_stage_of_its_own_wrote(tmp_path, monkeypatch, missing):
    run = write_run(tmp_path / "run")
    (run / missing).unlink()
    pages = pages_of(explore(run, monkeypatch))
    assert ("0.690 to 0.810" in pages) == (missing != "summary.json")
    # Without results the notebook does not know which policy is the last one.
    assert ("wiki_search</td><td>8</td>" in pages) == (missing == "metrics.jsonl")


def test_a_run_that_is_not_there_is_an_error_and_no_page_of_zeros(tmp_path, monkeypatch):
    with pytest.raises(CellExecutionError, match="no such run directory; pass the --workdir"):
        explore(tmp_path / "rn", monkeypatch)


def test_an_evaluation_of_any_name_is_shown_and_one_that_nobody_graded_says_so(
    tmp_path, monkeypatch
):
    with RunDir(tmp_path) as run:
        graded = run_files.block(0.5, 200)
        run.summary({"ours": graded, "theirs": {**graded, "pass_at_1": None, "n": 0}})
    pages = pages_of(explore(tmp_path, monkeypatch))
    assert "<td>ours</td>" in pages and "not graded" in pages


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("train_policy", "difference +"),
        ("function_tool", "in the last three"),
        ("own_environment", "step 2: reward"),
        ("inside_a_rollout", "tokens are targets"),
    ],
)
def test_a_notebook_that_trains_runs_to_its_end(monkeypatch, name, told):
    assert told in printed(execute(name, monkeypatch, seconds=3000))


@pytest.mark.slow
def test_the_loop_of_the_notebook_learns(monkeypatch):
    text = printed(execute("own_loop", monkeypatch, seconds=3000))
    first, last = map(float, re.findall(r"(\d+\.\d) ", text))
    assert last > 3 * first > 0
