"""The folders of examples/: a run in another folder uses all of them at once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from coa_jax.data.trajectory import DistilledRecord, read_trajectories
from tests.test_extension_commands import coa_jax
from tests.tiny_policy import write_untrained

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
OWN = ("own_tool", "own_reward", "own_algorithm")

PARTS = (("policy", "<think>one</think><answer>two</answer>"),)
EPISODE = DistilledRecord("q", "What is 1?", "generalist", ("1",), PARTS, "1")

# Rewards of an untrained policy do not differ by its answers.
MORE = """
from coa_jax.tasks import Task

def load(n: int):
    return [Task(f"t{at}", f"What is {at}?", "with_days", (str(at),), "") for at in range(n)]

def varied(trajectory):
    return (len(trajectory.text) * 7 % 5) / 4
"""


def options(folder: str) -> list[str]:
    """The settings of the command in the README of an example."""
    readme = (EXAMPLES / folder / "README.md").read_text()
    return re.findall(r"--config\.\S+", readme.partition("```bash")[2].partition("```")[0])


def test_an_example_has_a_readme():
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir()]
    assert {folder.name for folder in folders if (folder / "README.md").is_file()} >= {*OWN}
    assert [folder for folder in folders if not (folder / "README.md").is_file()] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of RL with the advantage, the loss, the reward and the tool of the examples."""
    here = tmp_path_factory.mktemp("empty")
    write_untrained(here / "model", [EPISODE])
    for folder in OWN:
        for file in (EXAMPLES / folder).glob("*.py"):
            shutil.copy(file, here)
    (here / "my_more.py").write_text(MORE)
    done = coa_jax(
        here,
        *("rl", "--config=configs/rl/tiny.py", "--workdir=run"),
        *(option for folder in OWN for option in options(folder)),
        *("--config.model=model", "--config.tasks=my_more:load"),
        *("--config.graders.rewards.varied.path=my_more:varied", "--config.rows=2"),
        *("--config.optimizer.total_steps=4", "--config.mini_batch=1"),
        "--config.algorithm.old_logp=trainer",
        "--config.algorithm.tis_cap=2.0",
        # The prompt describes the tools of the examples.
        *("--config.rollout.max_tokens=1024", "--config.engine.max_length=1024"),
        "--config.row_length=1024",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return here


@pytest.mark.slow
def test_a_run_in_an_empty_folder_uses_every_extension(run):
    rows = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert {"reward/grader", "reward/rouge", "reward/varied", "masked/deadline"} <= row.keys()
        assert 0 < row["policy/gate_slope"] <= 1 and "policy/clip_low" not in row
    assert rows[0]["adv/max"] > 0 and rows[0]["optim/grad_norm"] > 0
    traces = read_trajectories(run / "run" / "traces.jsonl")
    assert {trace.protocol for trace in traces} == {"with_days"}
    for trace in traces:
        parts = trace.reward.parts
        assert trace.reward.value == pytest.approx(
            parts["grader"] + 0.5 * parts["rouge"] + parts["varied"]
        )
    used = json.loads((run / "run" / "config.json").read_text())["algorithm"]
    assert used["loss_options"] == {"tau_neg": 1.1} and used["loss"] == "sapo:sapo"


@pytest.mark.slow
def test_such_a_run_can_be_repeated_to_the_bit(run):
    done = coa_jax(run, "rl", "--replay=run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "parameters identical after every step" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", OWN)
def test_the_command_of_an_example_runs(tmp_path, folder):
    for file in (EXAMPLES / folder).glob("*.py"):
        shutil.copy(file, tmp_path)
    readme = (EXAMPLES / folder / "README.md").read_text()
    block = readme.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    for line in filter(None, block.splitlines()):
        words = line.split()
        assert words.pop(0) == "coa-jax"
        done = coa_jax(tmp_path, *words)
        assert done.returncode == 0, done.stderr[-3000:]
