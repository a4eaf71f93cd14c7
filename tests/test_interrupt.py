"""A command that is stopped, or a rollout that ends, ends the programs of the model too."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from coa_jax.data.trajectory import DistilledRecord, part_violations
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model, save_model
from coa_jax.model.encode import prompt_ids
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import Prompt
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tasks import Task
from coa_jax.tools.code import CodeTool
from tests import tiny_policy

REPOSITORY = Path(__file__).resolve().parents[1]
QUESTION = "How long is a night?"
# Two processes that outlive every patience; one of them has left the program's session.
# The first line names both processes "sleep" (PR_SET_NAME).
PROGRAM = (
    "import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'sleep')\n"
    "if os.fork() == 0:\n    os.setsid()\ntime.sleep(86400)"
)
BUDGET = RolloutConfig(max_tokens=320, max_tool_calls=3, max_observation_tokens=24)


@functools.cache
def policy() -> Model:
    """A policy that answers every question with a program that sleeps for a day."""
    head = (
        "<think>sleep</think>\n<plan>use code</plan>\n<think>run it</think>\n"
        f"<code>\n```py\n{PROGRAM}\n```\n</code>"
    )
    tail = (
        "<think>late</think>\n<suggested_answer>long</suggested_answer>\n<think>yes</think>\n"
        "<double_check>The score is 4.</double_check>\n<answer>long</answer>"
    )
    parts = (("policy", head), ("environment", tiny_policy.observed("slept")), ("policy", tail))
    assert part_violations(tiny_policy.PROTOCOL, parts) == []
    record = DistilledRecord("night", QUESTION, tiny_policy.PROTOCOL, ("long",), parts, "long")
    return tiny_policy.learn([record])


def sleepers(process: psutil.Process) -> list[psutil.Process]:
    """The sleeping programs below a process."""
    found = []
    for child in process.children(recursive=True):
        try:
            if child.name() == "sleep":
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# --- commands and signals ------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("interrupt")
    save_model(policy(), path / "model")
    task = {"id": "night", "question": QUESTION, "answer": "long", "protocol": "generalist"}
    (path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    return path


def command(name: str, folder: Path) -> list[str]:
    """The command line of a run in which several programs sleep at once."""
    start = [sys.executable, "-m", "coa_jax", name]
    model = folder / "model"
    if name == "ask":
        return [*start, QUESTION, f"--model={model}", "--max_tokens=192", "--tools=code",
                "--prompt_style=brief"]  # fmt: skip
    config = {
        "model": model,
        "tasks": folder / "tasks.jsonl",
        "num_tasks": 1,
        "engine.slots": 4,
        "engine.max_length": 192,
        "rollout.max_tokens": 192,
        "rollout.strict": False,
        "rollout.prompt_style": "brief",
        "tools.names": ("code",),
        "tools.code.timeout_s": 300.0,
    }
    if name == "evaluate":
        config |= {"samples": 4}
    else:
        config |= {"groups": 1, "group_size": 4, "row_length": 192}
    given = [f"--config.{key}={value}" for key, value in config.items()]
    workdir = f"--workdir={folder / name}-{time.monotonic_ns()}"
    return [*start, f"--config=configs/{name}/factbook.py", workdir, *given]


def stopped(name: str, folder: Path, *signals: int) -> tuple[int, str]:
    """Sends signals to a command whose programs sleep, as a terminal does: to the whole group.

    Returns:
        Its exit code and what it said on stderr; all processes below it are gone.
    """
    process = subprocess.Popen(
        command(name, folder),
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    above = psutil.Process(process.pid)
    wanted = 2 if name == "ask" else 4  # at two processes a program
    try:
        assert wait_for(
            lambda: process.poll() is not None or len(sleepers(above)) >= wanted, seconds=120
        )
        assert process.poll() is None, process.communicate()[1]
        below = above.children(recursive=True)
        for number in signals:
            os.killpg(process.pid, number)
            time.sleep(0.05)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert alive == []
    return process.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("ask", signal.SIGINT, 130),
        pytest.param("evaluate", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("evaluate", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("rl", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("rl", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_command_and_the_programs_of_the_model(folder, name, number, code):
    returned, errors = stopped(name, folder, number)
    assert returned == code, errors
    assert "Traceback" not in errors
    assert ("interrupted" in errors) == (code == 130)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ask", "rl"])
def test_who_presses_ctrl_c_again_and_again_sees_no_traceback(folder, name):
    returned, errors = stopped(name, folder, *[signal.SIGINT] * 4)
    # A shell shows both as 130.
    assert returned in (130, -signal.SIGINT), errors
    assert "Traceback" not in errors, errors


# --- rollouts in this process --------------------------------------------------------------


@functools.cache
def engine() -> Engine:
    model = policy()
    shapes = EngineConfig(4, 320, chunk=8, extend_buckets=(64,))
    made = Engine(model.params, model.config, shapes, eos_ids(model.tokenizer))
    made.warm_up()  # what it takes to compile shall not be taken from the budgets
    return made


def sleeping_rollouts(config: RolloutConfig):
    """Three samples, each of which runs the program that sleeps."""
    tokenizer = policy().tokenizer
    task = Task("night", QUESTION, tiny_policy.PROTOCOL, ("long",), "tests")
    prompt = prompt_ids(tokenizer, task, Prompt("brief"))
    request = Request(task, prompt, 0, 0, (0, 1, 2), SamplingParams(temperature=0.0))
    tool = CodeTool(timeout_s=60.0, concurrency=2)
    return rollout(engine(), tokenizer, [request], [tool], config)


def nothing_sleeps() -> bool:
    return sleepers(psutil.Process()) == []


@pytest.mark.parametrize("budget", ["max_seconds", "max_tool_seconds"])
def test_a_budget_of_time_ends_the_programs(budget):
    async def go():
        stream = sleeping_rollouts(dataclasses.replace(BUDGET, **{budget: 2.0}))
        return [trajectory async for trajectory in stream]

    trajectories = asyncio.run(go())
    calls = [trajectory.tool_calls[0] for trajectory in trajectories]
    # Two programs ran; the third call waited for its turn.
    assert sorted(call.outcome for call in calls) == ["fault", "timeout", "timeout"]
    assert all(1.0 < call.end - call.start < 3.0 for call in calls)
    assert wait_for(nothing_sleeps, 5)


@pytest.mark.slow
def test_a_cancelled_rollout_ends_the_programs_that_run_and_starts_no_other():
    async def go():
        async def consume():
            async for _ in sleeping_rollouts(BUDGET):
                pass

        task = asyncio.create_task(consume())
        assert await asyncio.to_thread(wait_for, lambda: len(sleepers(psutil.Process())) == 4, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(wait_for, nothing_sleeps, 5)
        # The third call waited for its turn; that one came free must not have started it.
        await asyncio.sleep(0.5)
        assert nothing_sleeps()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())
    assert not engine().any_active
