"""Agent programs run as separate processes under a supervisor, which ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.serve.agents.program import (
    Access,
    ProgramError,
    ProgramOutcome,
    make_agent,
    run_command,
)
from tests.tools.fault_server import wait_until

ACCESS = Access("http://127.0.0.1:1", "key")
TASK = {"id": "t", "question": "Which 'river'?\n", "metadata": {"hops": 2}, "sample": 3}


def run(script: str, seconds: float = 30.0) -> ProgramOutcome:
    async def bounded() -> ProgramOutcome:
        async with asyncio.timeout(seconds):
            return await run_command(["bash", "-c", script], TASK, ACCESS)

    return asyncio.run(bounded())


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("true", ProgramOutcome()),
        ("echo chatter; echo 42", ProgramOutcome("42")),
        ('echo \'{"answer": "Ume", "reward": 1}\'', ProgramOutcome("Ume", 1.0)),
        (
            "python3 -c 'import json, sys; print(json.load(sys.stdin)[\"sample\"])'",
            ProgramOutcome("3"),
        ),
        ('echo "$OPENAI_BASE_URL $OPENAI_API_KEY"', ProgramOutcome("http://127.0.0.1:1/v1 key")),
        (
            'echo "$OPENAI_MODEL $COA_REWARD_URL"',
            ProgramOutcome("policy http://127.0.0.1:1/reward"),
        ),
        ('printf "%s" "$COA_QUESTION"', ProgramOutcome("Which 'river'?")),
        ("yes | head -c 3000000; echo; echo end", ProgramOutcome("end")),
        # Lines end at "\n" only: JSON may contain U+2028 as it is.
        (r'printf "{\"answer\": \"a\xe2\x80\xa8b\"}"', ProgramOutcome("a\u2028b")),
        ("head -c 100000 /dev/zero | tr '\\0' a", ProgramOutcome("a" * 100_000)),
        ("head -c 9000 /dev/zero | tr '\\0' '['", ProgramOutcome("[" * 9000)),
    ],
)
def test_a_program_reads_its_task_and_prints_its_outcome(script, outcome):
    assert run(script) == outcome


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo start >&2; echo it broke >&2; exit 3", "exit code 3: it broke"),
        ("kill -9 $$", "exit code 137: its standard error is empty"),
        ('echo \'{"reward": "much"}\'', "its reward is 'much', not a finite number"),
        ('echo \'{"error": "no judge"}\'', "no judge"),
        ("echo '{\"score\": 1}'", "it returned .*'score': 1"),
    ],
)
def test_a_program_that_fails_says_why(script, reason):
    with pytest.raises(ProgramError, match=reason):
        run(script)


@pytest.mark.parametrize(
    ("function", "reason"), [("quits", "SystemExit: 2"), ("given_up", "CancelledError")]
)
def test_a_function_that_exits_or_cancels_its_own_work_has_failed(function, reason):
    agent = make_agent(AgentConfig(function=f"tests.serve.agents.functions:{function}"))
    with pytest.raises(ProgramError, match=reason):
        asyncio.run(agent(TASK, ACCESS))


@pytest.mark.parametrize("question", ["\u4e2d" * 60_000, "\ud83d?"])
def test_a_question_that_no_variable_can_hold_reaches_a_program_on_its_input(question):
    read = "import json, sys; print(len(json.load(sys.stdin)['question']))"
    task = {**TASK, "question": question}
    outcome = asyncio.run(run_command([sys.executable, "-c", read], task, ACCESS))
    assert outcome == ProgramOutcome(str(len(question)))


def test_a_reward_beyond_all_floats_is_a_fault():
    with pytest.raises(ProgramError, match=r"^its reward is '-1000"):
        ProgramOutcome.read({"reward": -(10**400)})


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(ProgramError, match="exit code 127: /no/such: No such file or directory"):
        asyncio.run(run_command(["/no/such"], TASK, ACCESS))


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def gone(processes: list[int]) -> bool:
    return wait_until(lambda: not any(map(alive, processes)), 10.0)


def numbers(file: Path, count: int) -> list[int]:
    """Numbers of processes, as soon as so many are in a file."""

    def found() -> list[int]:
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    assert wait_until(lambda: len(found()) == count, 20.0), "the program did not begin"
    return found()


def family(file: Path) -> str:
    """A program that waits for a child, and for one that has left its session."""
    return (
        f"sleep 1000 & echo $! >> {file}; setsid bash -c 'echo $$ >> {file}; sleep 1000' & "
        f"echo $$ >> {file}; wait"
    )


def test_a_deadline_ends_a_program_and_all_that_it_has_started(tmp_path):
    with pytest.raises(TimeoutError):
        run(family(tmp_path / "numbers"), seconds=2.0)
    assert gone(numbers(tmp_path / "numbers", 3))


def test_what_a_program_leaves_behind_ends_with_it(tmp_path):
    file = tmp_path / "numbers"
    assert run(f"setsid sleep 1000 & echo $! > {file}; echo done") == ProgramOutcome("done")
    assert gone(numbers(file, 1))


def test_programs_end_when_their_owner_is_killed(tmp_path):
    script = family(tmp_path / "numbers")
    code = (
        "import asyncio\n"
        "from tests.serve.agents.test_program import ACCESS, TASK, run_command\n"
        f"asyncio.run(run_command(['bash', '-c', {script!r}], TASK, ACCESS))"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        processes = numbers(tmp_path / "numbers", 3)
        assert all(map(alive, processes))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert gone(processes)
    finally:
        owner.kill()
        owner.wait()
