"""Commands that use one file each for a tool, a task source and a reward, from another folder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from coa_jax.data.trajectory import read_trajectories
from tests import forked
from tests.distillation.chat_server import serving
from tests.own_files import FILES

CONFIG = """
import my_settings
from coa_jax.run.command import load_config

def get_config():
    config = load_config("configs/evaluate/tiny.py")
    config.num_tasks, config.samples, config.temperature = my_settings.TASKS, 1, 0.0
    config.rollout.max_tokens, config.rollout.max_turn_tokens = 2000, 0
    return config
"""
PLAN = "<think>a</think>\n<plan>b</plan>\n<think>c</think>\n<shout>{}</shout>"
END = (
    "<think>d</think>\n<suggested_answer>{0}</suggested_answer>\n<think>e</think>\n"
    "<double_check>The score is 4.</double_check>\n<answer>{0}</answer>"
)


def says(messages):
    """A policy that shouts its answer once before it gives it; of rivers it knows too much."""
    answer = "the river Ume" if "Norrland" in str(messages[:-1] or messages) else "Ivo"
    return PLAN.format(answer) if messages[-1]["role"] == "user" else END.format(answer)


def coa_jax(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the console command, for which the working directory is not on the path by itself."""
    start = "import sys; sys.argv[0] = 'coa-jax'; from coa_jax.__main__ import main; main()"
    return forked.run(["-c", start, *arguments], folder, {**os.environ, "PYTHONSAFEPATH": "1"})


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with the extensions, and beside it one with a config file and what it imports."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "config.py").write_text(CONFIG)
    (tmp_path / "beside" / "my_settings.py").write_text("TASKS = 2\n")
    (tmp_path / "here").mkdir()
    for name, text in FILES.items():
        (tmp_path / "here" / name).write_text(text)
    return tmp_path / "here"


OPTIONS = (
    "--config.tasks=my_tasks:load",
    "--config.task_options.times=1",
    "--config.protocol=shouting",
    "--config.tools.protocol=shouting",
    "--config.tools.names=shout",
    "--config.tools.own.shout.path=my_tools:Shout",
    "--config.tools.own.shout.options.times=2",
    "--config.graders.rewards.grader.weight=1.0",
    "--config.graders.rewards.rouge.path=my_rewards:rouge_l",
    "--config.graders.rewards.rouge.options.beta=1.0",
    "--config.graders.rewards.rouge.weight=0.0",
)


@pytest.mark.slow
def test_an_evaluation_uses_a_tool_a_source_and_a_reward_from_another_folder(elsewhere, tmp_path):
    with serving(says) as server:
        done = coa_jax(
            elsewhere,
            *("evaluate", "--config=../beside/config.py", f"--workdir={tmp_path / 'run'}"),
            *(f"--config.endpoint.url={server.url}", "--config.endpoint.model=m", *OPTIONS),
        )
    assert done.returncode == 0, done.stderr[-2000:]
    traces = read_trajectories(tmp_path / "run" / "traces.jsonl")
    assert [[call.tool for call in trace.tool_calls] for trace in traces] == [["shout"]] * 2
    assert "THE RIVER UME THE RIVER UME" in traces[0].text and "IVO IVO" in traces[1].text
    assert [trace.reward.value for trace in traces] == [0.0, 1.0]
    assert [trace.reward.parts["rouge"] for trace in traces] == pytest.approx([0.5, 1.0])
    assert [trace.reward.parts["format"] for trace in traces] == [1.0, 1.0]
    # A process without the tool knows the protocol by what the run has left.
    shown = coa_jax(tmp_path, "inspect", f"--data={tmp_path / 'run' / 'traces.jsonl'}")
    assert "'shouting' is unknown" not in shown.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("tasks=my_tasks:lead", "my_tasks.py has no 'lead'; did you mean 'load'?"),
        ("task_options.time=1", "my_tasks:load has no option 'time'; did you mean 'times'?"),
        ("tools.own.shout.options.times=x", "the option times of my_tools:Shout is 'x'; give a"),
        (
            "tools.own.shout.pth=x:y",
            "config.tools.own.shout.pth is not a setting; did you mean 'path'?",
        ),
        ("tools.names=whisper", "is 'whisper'; give one of wiki_search, code,"),
        ("graders.rewards.rouge.weight=heavy", "weight is 'heavy'; give a number from"),
    ],
)
def test_a_mistake_is_one_line_of_a_command(elsewhere, tmp_path, option, message):
    done = coa_jax(
        elsewhere,
        *("evaluate", "--config=../beside/config.py", f"--workdir={tmp_path / 'run'}"),
        *("--config.endpoint.url=http://localhost:1/v1", "--config.endpoint.model=m", *OPTIONS),
        f"--config.{option}",
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert message in line
    assert "Traceback" not in done.stderr


def test_the_documented_flag_gives_a_tool_to_a_command(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
    (code,) = re.findall(r"```python\n(# my_tools\.py\n.*?)```", page, re.DOTALL)
    (flag,) = re.findall(r"`(--config\.tools\.names=\S+)` is enough", page)
    (tmp_path / "my_tools.py").write_text(code)
    config = "--config=configs/rl/tiny.py"
    done = coa_jax(tmp_path, "doctor", config, flag)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["ready", "wiki_search"],
        ["ready", "my_tools:Dice"],
    ]
    told = coa_jax(tmp_path, "needs", "rl", config, flag)
    assert told.returncode == 0, told.stderr
