"""The table of claims: figures come from result files alone, and what is missing says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from coa_jax.evaluation.sample import TaskSamples
from coa_jax.evaluation.scaling import scaling
from coa_jax.paper import claims
from coa_jax.paper.claims import Folders
from coa_jax.run.command import load_config
from coa_jax.tasks import Task
from tests import forked

REPOSITORY = Path(__file__).resolve().parents[2]


def write_stage(folder, stage, tasks, tools=None, methods=None):
    """A result file; tasks are (id, fields, grades)."""
    rows = [
        {"id": name, **fields, "samples": [{"value": v, "calls": calls} for v, calls in samples]}
        for name, fields, samples in tasks
    ]
    costs = {"tools": tools or {}, "calls_per_solved": 2.5}
    figures = {"costs": costs, "scaling": methods or {}, "n": len(tasks)}
    path = folder / "evaluate" / stage / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"tasks": rows, "figures": figures}))


@pytest.fixture
def folders(tmp_path):
    """Two seeds of 20 tasks: SFT solves 8 and 10 of them, RL 12 and 14."""
    runs = []
    for seed, (sft, rl) in enumerate(((8, 12), (10, 14))):
        run = tmp_path / f"run{seed}"
        for stage, solved in (("sft", sft), ("rl", rl)):
            tasks = [
                (f"t{i}", {"wording": "new" if i % 2 else "known"}, [(float(i < solved), {})])
                for i in range(20)
            ]
            write_stage(run, stage, tasks)
        saved = {"both_solved": 0.2 + 0.2 * seed, "both_solved_resent": -0.1}
        block = {"saved": saved, "both_solved": {"samples": 5}}
        teacher = {"pass_at_1": 0.5, "tool_calls_per_task": 1 + seed, "n": 20}
        summary = {"economy": block, "teacher": teacher}
        (run / "summary.json").write_text(json.dumps(summary))
        runs.append(run)
    return Folders(runs)


def test_rates_are_means_over_tasks_and_seeds(folders):
    figure = claims.rate("rl")(folders)
    assert figure.value == pytest.approx(26 / 40) and figure.seeds == (0.6, 0.7)
    new = claims.rate("rl", wording="new")(folders)
    assert new.n == 10 and new.seeds == (0.6, 0.7)


def test_a_task_of_several_seeds_counts_once(folders, tmp_path):
    """More seeds on the same tasks do not make an interval over tasks narrower."""
    shared = claims.rate("rl")(folders)
    assert shared.n == 20
    other = tmp_path / "other"
    tasks = [(f"u{i}", {}, [(float(i < 14), {})]) for i in range(20)]
    write_stage(other, "rl", tasks)
    apart = claims.rate("rl")(Folders([folders.runs[0], other]))
    assert apart.n == 40 and apart.value == pytest.approx(shared.value) == 26 / 40
    # Wilson's interval of 26 of 40, from scipy.stats.binomtest.
    assert apart.interval == pytest.approx((0.4951, 0.7787), abs=1e-4)
    assert shared.interval[0] < apart.interval[0] < apart.interval[1] < shared.interval[1]


def test_differences_are_paired_by_task(folders):
    figure = claims.difference("rl", "sft")(folders)
    assert figure.value == pytest.approx(0.2) and figure.seeds == (0.2, 0.2)
    assert figure.signed and 0 < figure.interval[0] < 0.2 < figure.interval[1]
    # RL is better at six tasks, in one or both seeds, and worse at none: 2 of the 2^6 choices of
    # signs have a sum at least as far from zero.
    assert figure.p == pytest.approx(2 / 2**6)
    [line] = [line for line in claims.table(folders).splitlines() if "| RL minus SFT |" in line]
    assert ", p = 0.031 |" in line


def test_savings_are_read_from_the_summary(folders):
    figure = claims.saved("both_solved")(folders)
    assert figure.value == pytest.approx(0.3) and figure.n == 10 and figure.interval is None


def test_tool_calls_count_those_of_failures_too(folders):
    assert claims.calls_per_solved("rl")(folders).value == 2.5
    team = claims.team_calls_per_solved(folders)
    assert team.seeds == (2.0, 4.0) and team.n == 40


def test_samples_and_calls(tmp_path):
    right, wrong = (1.0, {"units": 1}), (0.0, {})
    tasks = [("a", {}, [right, wrong, wrong]), ("b", {}, [wrong, wrong, wrong])]
    tools = {"units": {"outcomes": {"ok": 3, "bad_call": 1}}, "code": {"outcomes": {"ok": 9}}}
    write_stage(tmp_path, "unseen", tasks, tools, {"majority@3": entry(0.25)})
    found = Folders([tmp_path])
    assert claims.at_k("unseen", 2)(found).value == pytest.approx((2 / 3 + 0) / 2)
    assert claims.at_k("unseen", 3)(found).value == 0.5
    assert claims.scaled("unseen", "majority")(found).value == 0.25
    calls = claims.well_formed("unseen", "units")(found)
    assert calls.value == 0.75 and calls.n == 4
    assert claims.helped("unseen", "units")(found).value == pytest.approx(1 / 6)


def entry(value):
    return {"pass_at_1": value, "ci95": [0.0, 1.0], "n": 2}


def test_the_rows_of_test_time_scaling_read_what_an_evaluation_writes(folders):
    groups = [TaskSamples(Task("a", "Q?", "web", ("x",), "test"), ())]
    methods = dict.fromkeys(scaling(groups, 4, 3, {}, {}), entry(0.25))
    assert len(methods) == 2
    for run in folders.runs:
        write_stage(run, "scaling", [("a", {}, [(1.0, {})])], methods=methods)
    lines = claims.table(folders).splitlines()
    rows = [line for line in lines if "| majority of four |" in line or "| best of 3," in line]
    assert len(rows) == 2 and all("| 0.250 |" in row for row in rows)


def test_a_claim_without_its_files_stands_below_the_table_with_its_command(folders):
    lines = claims.table(folders).splitlines()
    by_what = {line.split(" | ")[2]: line for line in lines if line.startswith("| ")}
    assert "| 0.650 (" in by_what["SFT + RL: pass@1"] and "pass@3" not in by_what
    [missing] = [line for line in lines if f"`{claims.MAIN}`" in line]
    assert "scaling" in missing and "launch/quickstart.sh" in lines[-1] + missing + "".join(lines)
    # A seed without the stage leaves the row open: half of the seeds are no result.
    (folders.runs[1] / "evaluate" / "rl" / "results.json").unlink()
    assert claims.rate("rl")(folders) is None


def test_a_measured_row_without_cases_says_so(folders):
    for run in folders.runs:
        write_stage(run, "unseen", [("a", {}, [(0.0, {})])])
    figure = claims.well_formed("unseen", "units")(folders)
    assert figure.n == 0 and figure.seeds == () and figure.interval is None
    [line] = [line for line in claims.table(folders).splitlines() if "tools understood" in line]
    assert "| nothing to count | 0 |" in line


def test_the_code_of_the_table_holds_no_result():
    text = (REPOSITORY / "coa_jax" / "paper" / "claims.py").read_text()
    measured = re.findall(r"\b0\.\d+", text)
    assert not measured


def test_every_stage_of_the_claims_is_one_of_the_pipeline():
    stages = {"base", "sft", "rl", "sft_more", "rft"}
    for name in ("pretrained/factbook.py", "quickstart/mhqa.py:recall"):
        stages |= set(load_config(f"configs/{name}").measures)
    text = (REPOSITORY / "coa_jax" / "paper" / "claims.py").read_text()
    used = set(re.findall(r"(?:rate|difference|at_k|scaled|well_formed|helped)\(\"(\w+)\"", text))
    assert used and used <= stages


def test_mistakes_of_the_user_are_explained(tmp_path):
    folder = str(tmp_path)
    for arguments, part in (
        ((), "give the folders"),
        ((folder,), "no summary.json"),
        ((folder, folder, f"--plain={folder}"), "--plain has 1 folders for 2 runs"),
        ((folder, f"--out={folder}/none/claims.md"), "in a directory that exists"),
    ):
        done = forked.run(["-m", "coa_jax.paper.claims", *arguments])
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr
