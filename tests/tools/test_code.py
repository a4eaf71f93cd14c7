"""The code tool as the agent loop sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.sandbox import isolation
from coa_jax.sandbox.limits import Limits
from coa_jax.sandbox.run import SERVER, Captured, ProgramResult
from coa_jax.tools.base import Observation, Tool, ToolContext, call_tool
from coa_jax.tools.code import CodeTool, describe


@pytest.fixture(scope="module")
def tool() -> CodeTool:
    return CodeTool(timeout_s=3.0, cpu_s=1.0, concurrency=4)


def ask(tool: CodeTool, source: str, **context) -> Observation:
    return asyncio.run(call_tool(tool, f"```py\n{source}\n```", ToolContext(**context)))


def captured(text: str, keep: int = 1 << 16) -> Captured:
    return Captured(text[:keep], text[-keep:], len(text))


def ended(
    out: str = "", error: str = "", reason: str = "exit", code: int | None = 0
) -> ProgramResult:
    return ProgramResult(captured(out), captured(error), reason, code, 0.0, 1)


def test_it_is_a_tool(tool):
    assert isinstance(tool, Tool)
    assert tool.name == "code"
    assert tool.deadline > tool.timeout_s + tool.queue_s


def test_a_program_that_went_well_gives_its_output(tool):
    observation = ask(tool, "print(sum(range(10)))")
    assert observation.text == "[EXECUTED]\n45"
    assert (observation.ok, observation.outcome) == (True, "ok")
    assert observation.detail["exit_code"] == 0
    assert observation.detail["isolation"] == tool.isolation.backend
    assert 0 < observation.seconds < 20


def test_python_fence_and_stdin(tool):
    body = "\n```python\nprint(input()[::-1])\n```\n```sh\nabc\n```\n"
    observation = asyncio.run(call_tool(tool, body, ToolContext()))
    assert observation.text == "[EXECUTED]\ncba"


def test_no_output_is_said_and_not_left_empty(tool):
    assert ask(tool, "x = 1").text == "[EXECUTED]\n(no output; print what you want to see)"


@pytest.mark.parametrize("body", ["print(1)", "", "```js\n1\n```", "```py\nprint(1)"])
def test_a_call_without_a_program_is_a_bad_call_with_advice(tool, body):
    observation = asyncio.run(call_tool(tool, body, ToolContext()))
    assert (observation.ok, observation.outcome) == (False, "bad_call")
    assert "```py" in observation.text


def test_a_traceback_names_the_program_and_no_path(tool):
    observation = ask(tool, "print('before')\n\ndef f():\n    return 1 / 0\nf()")
    assert observation.outcome == "error"
    assert observation.text == (
        "[FAILED] exit code 1\nSTDOUT:\nbefore\nSTDERR:\nTraceback (most recent call last):\n"
        '  File "program.py", line 5, in <module>\n    f()\n'
        '  File "program.py", line 4, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero"
    )


def test_the_text_is_the_same_on_both_back_ends():
    source = "import os\nprint(os.getcwd(), __file__, hash('x'))\nimport nothing"
    texts = {ask(CodeTool(backend=name), source).text for name in isolation.BACKENDS}
    assert len(texts) == 1
    assert "/tmp /tmp/program.py" in texts.pop()


def test_time_limits_are_timeouts_with_advice(tool):
    slept = ask(CodeTool(timeout_s=0.5), "import time; time.sleep(60)")
    assert (slept.ok, slept.outcome) == (False, "timeout")
    assert slept.text.startswith("[FAILED] stopped at the time limit")
    worked = ask(CodeTool(timeout_s=20, cpu_s=1), "while True: pass")
    assert worked.outcome == "timeout"
    assert worked.text.startswith("[FAILED] stopped after 1 seconds of processor time")


def test_a_call_for_which_no_time_is_left_is_a_timeout_and_no_fault_of_ours(tool):
    observation = ask(tool, "print(1)", deadline=0.3)
    assert observation.outcome == "timeout"
    assert observation.text == "[FAILED] No time was left to run the program."


def test_the_deadline_of_the_caller_comes_first(tool):
    observation = ask(tool, "import time; time.sleep(60)", deadline=4)
    assert observation.outcome == "timeout"
    assert observation.text.startswith("[FAILED]")  # from the tool itself, in time
    assert observation.seconds < 4


def test_endless_output_is_a_limit_with_both_ends_shown(tool):
    observation = ask(tool, "i = 0\nwhile True:\n    print(i); i += 1")
    assert observation.outcome == "limit"
    assert "STDOUT:\n0\n1\n2\n" in observation.text
    assert "characters left out" in observation.text
    assert len(observation.text) < 1536 + 200
    assert observation.text == ask(tool, "i = 0\nwhile True:\n    print(i); i += 1").text


def test_waiting_for_a_turn_too_long_is_a_fault_of_ours():
    tool = CodeTool(timeout_s=5, concurrency=1, queue_s=0.3)
    body = "```py\nimport time; time.sleep(1.5)\nprint('slept')\n```"

    async def two() -> list[Observation]:
        return await asyncio.gather(*(call_tool(tool, body, ToolContext()) for _ in range(2)))

    first, second = asyncio.run(two())
    assert first.text == "[EXECUTED]\nslept"
    assert (second.ok, second.outcome) == (False, "fault")
    assert "free sandbox" in second.detail["exception"]


def test_no_more_programs_run_than_allowed():
    tool = CodeTool(timeout_s=10, concurrency=2)
    body = "```py\nimport time; a = time.time(); time.sleep(0.2); print(a, time.time())\n```"

    async def many() -> list[Observation]:
        return await asyncio.gather(*(call_tool(tool, body, ToolContext()) for _ in range(7)))

    spans = [tuple(map(float, o.text.split()[1:])) for o in asyncio.run(many())]
    for moment, _ in spans:
        assert sum(start <= moment < end for start, end in spans) <= 2


def test_a_broken_sandbox_is_a_fault(tool, monkeypatch):
    broken = CodeTool()
    broken._job = dataclasses.replace(broken._job, interpreter="/nonexistent/python")
    observation = ask(broken, "print(1)")
    assert (observation.ok, observation.outcome) == (False, "fault")
    assert "nonexistent" in observation.detail["exception"]


def test_cancelling_frees_the_turn():
    tool = CodeTool(timeout_s=30, concurrency=1)
    sleep = "```py\nimport time; time.sleep(60)\n```"

    async def scenario() -> Observation:
        sleeping = asyncio.create_task(tool(sleep, ToolContext()))
        await asyncio.sleep(0.3)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        return await tool("```py\nprint('next')\n```", ToolContext())

    start = time.monotonic()
    assert asyncio.run(scenario()).text == "[EXECUTED]\nnext"
    assert time.monotonic() - start < 20


def test_no_isolation_means_no_tool(monkeypatch):
    monkeypatch.setattr(isolation, "_why_not", lambda backend: "not today")
    with pytest.raises(UserError, match="no isolation available: bubblewrap: not today"):
        CodeTool()
    monkeypatch.undo()
    with pytest.raises(UserError, match="'chroot'"):
        CodeTool(backend="chroot")


def test_unsafe_needs_two_words(monkeypatch):
    monkeypatch.delenv(isolation.UNSAFE_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"unsafe=True and {isolation.UNSAFE_VARIABLE}=1 "):
        CodeTool(unsafe=True)
    monkeypatch.setenv(isolation.UNSAFE_VARIABLE, "1")
    assert CodeTool().isolation.backend != "none"
    tool = CodeTool(unsafe=True)
    assert tool.isolation.backend == "none"
    observation = ask(tool, "print(open('/etc/passwd').readline()[:4])")
    assert observation.text == "[EXECUTED]\nroot"
    assert observation.detail["isolation"] == "none"


@given(st.text(max_size=60), st.text(max_size=60), st.integers(2, 40))
def test_output_keeps_to_its_room_and_shows_both_ends(out, error, room):
    outcome, text, _ = describe(ended(out, error, code=1), Limits(), room)
    shown = text.replace("[FAILED] exit code 1", "")
    assert outcome == "error"
    assert len(shown) <= room + 2 * len("\nSTDOUT:\n\n[... 99 characters left out ...]\n")
    if len(out) + len(error) <= room:
        assert "left out" not in shown or "left out" in out + error
        assert out.rstrip("\n") in shown and error.rstrip("\n") in shown


@given(st.text(), st.integers(1, 30))
def test_clip_counts_what_it_leaves_out(text, room):
    shown = captured(text, keep=max(room, 1)).clip(room)
    if len(text) <= room:
        assert shown == text
    else:
        notice = f"\n[... {len(text) - room} characters left out ...]\n"
        assert shown == text[: room // 2] + notice + text[len(text) - (room - room // 2) :]


@pytest.mark.parametrize(
    ("reason", "code", "outcome", "words"),
    [
        ("memory", None, "limit", "more than 5120 MiB of memory"),
        ("disk", None, "limit", "more than 64 MiB of files"),
        ("processes", None, "limit", "more than 8 processes"),
        ("exit", 128 + signal.SIGSEGV, "error", "exit code 139 (SIGSEGV)"),
        ("exit", 128 + signal.SIGXCPU, "timeout", "processor time"),
        ("exit", 200, "error", "exit code 200"),
    ],
)
def test_each_end_has_its_words(reason, code, outcome, words):
    assert words in describe(ended(reason=reason, code=code), Limits(), 100)[1]
    assert describe(ended(reason=reason, code=code), Limits(), 100)[0] == outcome


def test_the_server_is_small_and_shared(tool):
    ask(tool, "")
    server = SERVER.process_id
    ask(CodeTool(), "")
    assert SERVER.process_id == server
    status = Path(f"/proc/{server}/status").read_text()
    resident_kb = int(status.split("VmRSS:")[1].split()[0])
    assert resident_kb < 40_000
    assert "jax" not in Path(f"/proc/{server}/maps").read_text()
