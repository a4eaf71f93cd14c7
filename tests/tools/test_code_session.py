"""Programs that continue those of their trajectory, in the real sandbox."""

from __future__ import annotations

import asyncio

import pytest

from coa_jax.sandbox.isolation import find_isolation
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.bm25 import WikiIndex
from coa_jax.tools.code import CodeConfig, CodeTool, RemoteCode
from coa_jax.tools.code_session import FORGOTTEN
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.recorded import StoreConfig
from tests.tools.live import serving
from tests.tools.test_remote import PASSAGES


class Trajectory:
    """Calls in a row, each of which knows those before it."""

    def __init__(self, tool):
        self.tool, self.calls, self.outcomes, self.seen = tool, [], [], []

    def run(self, source, given="", tag="code"):
        body = f"```py\n{source}\n```" + (f"\n```sh\n{given}\n```" if given else "")
        context = ToolContext("t", len(self.calls), None, tuple(self.calls), tuple(self.outcomes))
        seen = asyncio.run(call_tool(self.tool, body, context))
        self.calls.append((tag, body))
        self.outcomes.append(seen.outcome)
        self.seen.append((seen.outcome, seen.text))
        return seen


@pytest.fixture
def session():
    return Trajectory(CodeTool(session=True, timeout_s=3.0, cpu_s=1.0))


def printed(seen):
    assert seen.outcome == "ok", seen
    return seen.text.removeprefix("[EXECUTED]\n")


def test_variables_functions_imports_and_files_survive(session):
    assert printed(session.run("import math\nname = input()\nprint('noise')", "Ada")) == "noise"
    session.run("def twice(x):\n    return 2 * x\nopen('kept.txt', 'w').write(name)")
    session.run("class Point:\n    x = twice(21)\nimport sys; print('more noise', file=sys.stderr)")
    seen = session.run("print(name, Point.x, math.pi > 3, open('kept.txt').read(), input())", "in")
    assert printed(seen) == "Ada 42 True Ada in"
    assert seen.detail["remembered"] == 3


def test_each_trajectory_has_its_own_and_the_default_has_none():
    tool = CodeTool(session=True)
    Trajectory(tool).run("x = 1")
    assert "NameError" in Trajectory(tool).run("print(x)").text
    alone = Trajectory(CodeTool())
    alone.run("x = 1")
    assert "NameError" in alone.run("print(x)").text
    (configured,) = make_tools(ToolsConfig(names=("code",), code=CodeConfig(session=True)))
    assert configured.remembers and not alone.tool.remembers


def test_what_an_exception_left_is_kept_and_what_was_stopped_is_not(session):
    session.run("x = 1")
    session.run("x = 2\nraise ValueError('half')\nx = 3")
    stopped = session.run("x = 4\nwhile True: pass")
    assert stopped.outcome == "timeout" and stopped.text.endswith(FORGOTTEN)
    slept = session.run("x = 5\nimport time\ntime.sleep(60)")
    assert slept.outcome == "timeout" and slept.seconds < 20
    session.run("raise SystemExit(3)")
    seen = session.run("print(x)")
    assert (printed(seen), seen.detail["remembered"]) == ("2", 3)


def test_a_program_that_ends_its_process_does_not_end_those_behind_it(session):
    session.run("x = 1\nimport os\nos._exit(0)")
    assert printed(session.run("print(x)")) == "1"
    session.run("if os.fork() == 0:\n    x = 'child'\nelse:\n    os.wait()")
    assert printed(session.run("x += 1\nprint(x)")) == "2"
    session.run("if os.fork() == 0:\n    os._exit(3)\nprint(os.wait()[1])")
    crashed = session.run("x = 9\nos.abort()")
    assert crashed.outcome == "limit" and crashed.text.endswith(FORGOTTEN)
    assert "SIGABRT" in crashed.text
    assert printed(session.run("print(x)")) == "2"
    assert session.run("os._exit(5)").detail["exit_code"] == 5


@pytest.mark.slow
def test_a_program_has_the_time_of_one_and_not_that_of_those_before_it(session):
    for number in range(3):  # each takes half of what a program may use
        session.run(f"import time\nend = time.process_time() + 0.5\nn{number} = {number}\n"
                    "while time.process_time() < end: pass")  # fmt: skip
    assert printed(session.run("print(n0 + n1 + n2)")) == "3"
    late = session.run("while True: pass")
    # A soft limit of whole seconds: two at most beside the one and a half that are run again.
    assert late.outcome == "timeout" and late.seconds < 6.0


def test_a_program_sleeps_no_longer_because_others_ran_before_it(session):
    for _ in range(2):  # the time of a program is 3 s
        assert session.run("import time\ntime.sleep(4.5)").outcome == "timeout"
        session.run("x = 1")


RIVAL = """
import os, time
def waited():
    return int(open("/proc/self/schedstat").read().split()[1]) / 1e9
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
start, before = time.monotonic(), waited()
if os.fork() == 0:
    while True: pass
while True:
    print(time.monotonic() - start, waited() - before, flush=True)
    end = time.monotonic() + 0.02
    while time.monotonic() < end: pass
"""


def test_the_time_in_which_a_program_waits_for_a_processor_does_not_count():
    tool = CodeTool(session=True, timeout_s=2.0, cpu_s=20.0, backend="bubblewrap",
                    max_output_chars=40_000)  # fmt: skip
    run = Trajectory(tool)
    for _ in range(4):
        run.run("x = 1")
    seen = run.run(RIVAL)
    assert seen.outcome == "timeout"
    lines = seen.text.partition("STDOUT:\n")[2].splitlines()
    ran, waited = next(map(float, line.split()) for line in reversed(lines) if line.count(".") == 2)
    # On a busy machine, the last line may be older than the end of the program.
    assert waited > 0.5 and ran > 2.0 + min(waited, 2.0) - 1.0


def test_failures_read_as_those_of_a_program_alone(session):
    session.run("def f(x):\n    return 1 / x")
    text = session.run("y = 1\nf(0)").text
    assert 'File "program.py", line 2, in <module>\n    f(0)' in text
    assert 'File "program_1.py", line 2, in f\n    return 1 / x' in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "line 3" not in text and "execute" not in text
    syntax = session.run("x = 1\nx = = 2").text
    assert 'File "program.py", line 2\n    x = = 2' in syntax
    assert session.run("import sys; sys.exit(7)").detail["exit_code"] == 7
    assert session.run("import sys; sys.exit(200)").outcome == "error"  # no signal has number 72
    assert printed(session.run("print(__name__, sorted(k for k in globals() if k[:2] != '__'))")
                   ) == "__main__ ['f', 'sys', 'y']"  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import os; os.close(0); os.close(1); os.close(2)",
        "import os; os.closerange(0, 4096)",
        "import io, sys; sys.stdout = io.StringIO(); sys.stderr = None",
        "import os; os.dup2(os.open('f', os.O_CREAT | os.O_WRONLY), 1)",
    ],
)
def test_what_a_program_closes_is_open_for_the_next_one(session, source):
    session.run(f"{source}\nx = 1")
    assert printed(session.run("print(x)")) == "1"
    failed = session.run(f"print(x, flush=True)\n{source}\nx / 0")
    assert failed.text.endswith("ZeroDivisionError: division by zero"), failed.text


def test_the_same_calls_see_the_same_again():
    """As after a restart of the run: nothing but the calls themselves is known."""
    programs = ["import random\nx = random.random()\nprint(x)", "print(x, random.random())",
                "import atexit, threading\natexit.register(print, 'end')\n"
                "threading.Thread(target=lambda: globals().update(z=1)).start()",
                "print(x, z, hash('text'))"]  # fmt: skip
    runs = [Trajectory(CodeTool(session=True)) for _ in range(2)]
    for run in runs:
        for program in programs:
            run.run(program)
    assert runs[0].seen == runs[1].seen
    x = runs[0].seen[0][1].splitlines()[1]
    assert runs[0].seen[1][1].splitlines()[1].startswith(f"{x} ")
    assert runs[0].seen[2][1].splitlines()[1:] == ["end"]
    assert runs[0].seen[3][1].splitlines()[1].startswith(f"{x} 1 ")


def test_a_recording_tells_calls_apart_by_what_came_before_them(tmp_path):
    def tool(mode):
        store = StoreConfig(path=str(tmp_path / "calls.sqlite"), mode=mode, tools=("code",))
        return make_tools(ToolsConfig(names=("code",), code=CodeConfig(session=True), store=store))[
            0
        ]

    recorded = [Trajectory(tool("record")) for _ in range(2)]
    for number, run in enumerate(recorded):
        run.run(f"x = {number}")
        assert printed(run.run("print(x)")) == str(number)
    replayed = [Trajectory(tool("replay")) for _ in range(3)]
    for number, run in enumerate(replayed[:2]):
        run.run(f"x = {number}")
        run.run("print(x)")
    assert [run.seen for run in replayed[:2]] == [run.seen for run in recorded]
    assert replayed[2].run("print(x)").outcome == "fault"  # nobody has called it first


def test_the_calls_of_other_tools_are_none_of_its_own(session):
    session.calls.append(("wiki_search", "```py\nx = 7\n```"))
    session.outcomes.append("ok")
    assert "NameError" in session.run("print(x)").text


def test_a_server_elsewhere_needs_to_know_nothing_of_it():
    with serving(WikiIndex.build(PASSAGES), find_isolation()) as address:
        url = f"{address}/run_code"
        run = Trajectory(RemoteCode(url, timeout_s=2.0, session=True))
        run.run("x = 41")
        assert run.run("import time\ntime.sleep(30)").outcome == "timeout"
        assert printed(run.run("print(x + 1)")) == "42"
