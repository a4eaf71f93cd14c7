"""The table of docs/environments.md: environments of others that run beside this package.

Each test plays in an environment of an installed package, and compares its row of the table with
what was run.  ``COA_JAX_WRITE_TABLE=1`` writes the rows instead.  A package that is not installed
is skipped:

    pip install reasoning-gym textarena openenv-core "verifiers>=0.4" uv
    COA_JAX_WRITE_TABLE=1 python -m pytest -m slow tests/rollout/environments/test_table.py
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from coa_jax.config.extensions import find
from coa_jax.rollout.environments import ENVIRONMENTS, Turn
from coa_jax.tasks import load_tasks
from coa_jax.tasks.grading import grade_answer
from tests.buckets import free_port
from tests.own_files import install
from tests.serve.agents.test_verifiers import SETS
from tests.tools import fault_server

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "environments.md"


def row(package: str, what: str, outcome: str) -> None:
    """Compares the row of a package with what was run, or writes it."""
    version = importlib.metadata.version(package)
    text = PAGE.read_text()
    (old,) = re.findall(rf"^\| `{re.escape(package)}` \|.*\|$", text, re.MULTILINE)
    new = f"| `{package}` | {version} | {what} | {outcome} |"
    if os.environ.get("COA_JAX_WRITE_TABLE"):
        PAGE.write_text(text.replace(old, new))
    else:
        assert new == old, "COA_JAX_WRITE_TABLE=1 writes the row"


@pytest.mark.slow
def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    names = ("chain_sum", "gcd", "basic_arithmetic", "count_primes", "simple_equations")
    tasks = load_tasks(f"arithmetic:{','.join(names)}", "test", 20)
    assert len({task.metadata["kind"] for task in tasks}) == len(names)
    right = sum(grade_answer(task.gold[0], task.gold) for task in tasks)
    wrong = sum(grade_answer("none of these", task.gold) for task in tasks)
    row("reasoning-gym", f"{len(tasks)} tasks of {len(names)} generators",
        f"{right:g} of their answers are right, {wrong:g} of wrong ones")  # fmt: skip


@pytest.mark.slow
def test_textarena():
    pytest.importorskip("textarena")
    make, rewards = find(ENVIRONMENTS, "textarena", "environment.path"), {}
    games = ("GuessTheNumber-v0", "TicTacToe-v0", "Nim-v0")
    for task in load_tasks(f"textarena:games={'+'.join(games)}", "test", len(games)):
        player = make(task=task, seed=0, sample=0, samples=(0,), group={}, opponent="random")
        draw = random.Random(0)
        player.reset(task)
        for number in range(60):
            step = player.step(Turn(f"[{draw.randint(0, 9)}]", number=number))
            if step.done:
                rewards[task.metadata["game"]] = step.reward
                break
        player.close()
    assert all(-1 <= reward <= 1 for reward in rewards.values())
    row("textarena", f"{', '.join(games)} with random moves", f"{len(rewards)} games end")


@pytest.mark.slow
def test_openenv(tmp_path):
    pytest.importorskip("openenv")
    tool = Path(sys.executable).parent / "openenv"
    subprocess.run([tool, "init", "echo_back"], cwd=tmp_path, check=True, capture_output=True)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "echo_back.server.app:app", "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as server:
        end = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.5)
        world = find(ENVIRONMENTS, "openenv", "environment.path")(
            seed=0, url=f"http://127.0.0.1:{port}"
        )
        (task,) = load_tasks("openenv", "test", 1)
        begun = str(world.reset(task))
        step = world.step(Turn("hello"))
        world.close()
        server.kill()
    assert "ready" in begun
    assert "hello" in step.observation
    row(
        "openenv-core",
        "the server that `openenv init` writes",
        f"reward {step.reward:g} for a turn",
    )


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("verifiers"), reason="needs verifiers")
def test_verifiers(tmp_path):
    """The program of the example runs an episode; a server answers in place of the policy.

    The server calls the tool of the task set, and repeats what the tool returned.
    """
    (tmp_path / "river_lengths.py").write_text(f"import verifiers.v1 as vf\n{SETS['rivers']}")
    function = {"name": "rivers_length", "arguments": '{"name": "Ume"}'}
    call = {"id": "call_1", "index": 0, "type": "function", "function": function}

    def page(handler):
        head = {"id": "1", "created": 1, "model": "any"}
        asked = json.loads(handler.body)
        last = asked["messages"][-1]
        if last["role"] == "tool":
            reason, message = "stop", {"content": last["content"]}
        else:
            assert asked["tools"][0]["function"]["name"] == function["name"]
            reason, message = "tool_calls", {"content": None, "tool_calls": [call]}
        message["role"] = "assistant"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        end = {"index": 0, "finish_reason": reason}
        if not asked.get("stream"):
            choices = [{**end, "message": message}]
            return handler.json(
                {**head, "object": "chat.completion", "usage": usage, "choices": choices}
            )
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        head["object"] = "chat.completion.chunk"
        first = {"index": 0, "delta": message, "finish_reason": None}
        chunks = ([first], [{**end, "delta": {}}])
        events = [{**head, "choices": choices} for choices in chunks]
        for event in (*events, {**head, "choices": [], "usage": usage}):
            handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        return handler.wfile.write(b"data: [DONE]\n\n")

    with fault_server.running() as served:
        served.pages["/v1/chat/completions"] = page
        there = {"OPENAI_BASE_URL": served.url("/v1"), "OPENAI_API_KEY": "any"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [sys.executable, REPOSITORY / "examples/verifiers/agent.py", "river_lengths",
             *["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]],
            input=json.dumps({"metadata": {"index": 0}}), text=True, capture_output=True,
            env={**os.environ, **there, "OPENAI_MODEL": "any", "PYTHONPATH": str(tmp_path),
                 "PATH": path}, check=False, timeout=900,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome == {"reward": 1.0}
    row("verifiers", "a task set with a tool and the harness `null`",
        "reward 1 after a call of the tool")  # fmt: skip


MAZE = """
class Maze:
    def __init__(self, seed: int, doors: int = 2):
        self.left = doors

    def reset(self, task):
        return f"There are {self.left} doors."

    def step(self, turn):
        self.left -= 1
        return ("A door opens.", 1.0, not self.left)
"""


def test_an_installed_package_offers_an_environment_by_its_entry_point(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "maze_package.py").write_text(MAZE)
    install(tmp_path, "maze", "coa_jax.environments", "maze", "maze_package:Maze")
    maze = find(ENVIRONMENTS, "maze", "environment.path")(seed=0, doors=1)
    assert maze.reset(None) == "There are 1 doors."
    assert maze.step(Turn("left")) == ("A door opens.", 1.0, True)
