"""Two real processes of a run spend one budget."""

from __future__ import annotations

import json

import pytest

from tests import tiny_policy
from tests.parallel.launched import launch

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from coa_jax.run.command import run_main

class Search:
    name, deadline = "search", 5.0
    async def __call__(self, arguments, context):
        from coa_jax.tools.base import Observation
        with open(os.environ["CALLS"], "a") as file:
            file.write("x")
        return Observation("seen", True, "ok", 0.0)

def main(argv):
    from coa_jax.train.command import run_at
    from coa_jax.parallel import processes
    from coa_jax.tools.base import ToolContext, call_tool
    from coa_jax.tools.budgeted import Budgeted
    from coa_jax.tools.net.budget import BudgetSpentError, CallBudget
    with run_at(Path(os.environ["RUN"]), {}) as (run, output, _):
        tool = Budgeted(Search(), CallBudget(max_calls=int(os.environ["MOST"])))
        made = 0
        try:
            while True:
                asyncio.run(call_tool(tool, "x", ToolContext()))
                made += 1
        except BudgetSpentError as error:
            print(made, error, flush=True)
        processes.barrier("the end", 60)

run_main(main)
"""


def test_two_processes_spend_no_more_than_one_budget_over_their_restarts(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    for most, shares in ((7, ["4", "3"]), (12, ["3", "2"])):
        env = {"RUN": str(tmp_path / "run"), "CALLS": str(tmp_path / "calls"), "MOST": str(most)}
        done = launch(2, 1, str(tmp_path / "program.py"), timeout=120, **env)
        assert done.returncode == 0, done.stderr
        said = {
            line[1]: line[4:].split()[0] for line in done.stdout.splitlines() if "spent" in line
        }
        assert [said["0"], said["1"]] == shares
        assert len((tmp_path / "calls").read_text()) == most


@pytest.mark.slow
def test_a_run_of_two_processes_that_has_spent_its_budget_ends_in_a_line_and_goes_on(tmp_path):
    tiny_policy.write_rl_inputs(tmp_path)
    given = {"model": tmp_path / "model", "tasks": tmp_path / "tasks.jsonl", "num_tasks": 3,
             "rows": 2, "row_length": 192, "mesh.fsdp": -1, "engine.max_length": 192,
             "rollout.max_tokens": 192, "optimizer.total_steps": 3, "group_size": 4,
             "algorithm.overlong_buffer": 0}  # fmt: skip
    words = ["-m", "coa_jax.cli.rl", "--config=configs/rl/tiny.py", f"--workdir={tmp_path / 'run'}"]
    words += [f"--config.{name}={value}" for name, value in given.items()]
    done = launch(2, 1, *words, "--config.tools.budgets.wiki_search.max_calls=2")
    assert done.returncode == 2, done.stderr
    told = [each[4:] for each in done.stderr.splitlines() if "] error: the budget" in each]
    spent = "error: the budget tools.budgets.wiki_search.max_calls=2 is spent (1 by process "
    assert told and all(each.startswith(spent) for each in told)
    assert "Traceback" not in done.stderr
    done = launch(2, 1, *words, "--config.tools.budgets.wiki_search.max_calls=1000")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model").exists()
    spent = [json.loads(path.read_text()) for path in (tmp_path / "run" / "spent").iterdir()]
    assert 2 < sum(rows["wiki_search"]["calls"] for rows in spent) < 100
