"""Programs are graded by running them in the sandbox, within a time limit."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import enum
import json
import pickle
import re
import types
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.tasks import code_tests
from coa_jax.tasks.code_tests import (
    CodeLimits,
    program_of,
    read_tests,
    run_tests,
    same_lines,
    same_tokens,
)
from coa_jax.tasks.private_tests import livecodebench_tests, load_private_tests
from tests.tools.fault_server import stopwatch

QUICK = CodeLimits(test_s=1.5, total_s=20.0)
SUM = {"stdin": ["1 2\n", "5 -7\n"], "expected_output": ["3\n", "-2\n"]}
CALL = {"inputs": ["[3, 1, 2]\n2", "[]\n0"], "outputs": ["[1, 2]", "[]"], "fn_name": "smallest"}
POWER = {"inputs": ["3\n40\n997"], "outputs": [str(pow(3, 40, 997))], "fn_name": "power"}
ASSERTS = {
    "import_prefix": "import math\n",
    "test_code": "def check(f):\n    assert f(2) == 4\n    assert f(3) == 9\n",
    "entry_point": "square",
}


def failure(program, gold, limits=QUICK):
    return asyncio.run(run_tests(program, read_tests(gold), limits)).why


@pytest.mark.parametrize(
    ("gold", "program"),
    [
        (SUM, "print(sum(map(int, input().split())))"),
        (SUM, "import sys\nprint(sum(int(x) for x in sys.stdin.buffer.read().split()), end='')"),
        (CALL, "class Solution:\n    def smallest(self, nums: List[int], k: int):\n"
               "        return heapq.nsmallest(k, nums)"),
        (CALL, "def smallest(nums, k):\n    print('noise')\n    return tuple(sorted(nums)[:k])"),
        (ASSERTS, "def square(x):\n    return int(math.pow(x, 2))"),
        ({"functional": "assert double(4) == 8"}, "def double(x): return 2 * x"),
        (CALL, "def smallest(nums, k):\n    print('noise' * 50_000)\n    return sorted(nums)[:k]"),
        (ASSERTS, "def square(x):\n    print('noise\\n' * 50_000)\n    return x * x"),
        (POWER, "class Solution:\n    def power(self, x, n, m): return pow(x, n, m)"),
        (POWER, "from __future__ import annotations\ndef power(x, n, m): return pow(x, n, m)"),
        (SUM, "def down(n):\n    return 0 if n == 0 else down(n - 1)\ndown(20000)\n"
              "counts = defaultdict(int)\nprint(sum(map(int, input().split())))"),
        (SUM, "if __name__ == '__main__':\n    print(sum(map(int, input().split())))"),
        (SUM, "import datetime, copy\nassert datetime.date.today() == deepcopy(date.today())\n"
              "print(sum(map(int, open(0).read().split())))"),
    ],
)  # fmt: skip
def test_right_programs_pass_every_test(gold, program):
    assert failure(program, gold) == ""


@pytest.mark.parametrize(
    ("gold", "program", "why"),
    [
        (SUM, "print(3)", "output"),
        (SUM, "print(sum(map(int, input().split()))); print('and more')", "output"),
        (SUM, "print('3' + ' ' * 100_000)", "output"),
        (CALL, "print('[1, 2]\\n' * 50_000); import os; os._exit(0)", "output"),
        (SUM, "print(1 / 0)", "error"),
        (SUM, "print((", "error"),
        (SUM, "while True: pass", "time"),
        (SUM, "import time; time.sleep(60)", "time"),
        (SUM, "x = bytearray(8 << 30)", "error"),
        (SUM, "while True: print('y' * 10000)", "limit"),
        (CALL, "def smallest(nums, k): return nums[:k]", "output"),
        (CALL, "def other(nums, k): return []", "error"),
        (CALL, "import os\nprint('[1, 2]', flush=True)\nos._exit(0)", "output"),
        (ASSERTS, "def square(x): return 4", "error"),
        (ASSERTS, "import os; os._exit(0)", "output"),
        (ASSERTS, "import sys; sys.exit()", "output"),
        ({"functional": "assert double(4) == 8"}, "def double(x): return x", "error"),
    ],
)
def test_wrong_programs_fail_for_the_right_reason(gold, program, why):
    seconds = stopwatch()
    assert failure(program, gold) == why
    assert seconds() < 15


MANY_LINES = """def check(c):
    # the first comment
    assert c(2) == 4

    assert c(
        3
    ) == 9, '''not
nine'''
"""
SETUP = "def check(c):\n    xs = [1]\n    assert c(xs) == 2\n    assert c(\n        [3]) == 4\n"


@pytest.mark.parametrize(
    ("test_code", "cases", "right", "wrong"),
    [
        (MANY_LINES, 2, "def f(x): return x * x", "def f(x): return 4"),
        (SETUP, 1, "def f(x): return x[0] + 1", "def f(x): return 2"),
        ("def check(c): assert c(1) == 1; assert c(2) == 2", 1, "def f(x): return x",
         "def f(x): return 1"),
        ("xs = [1]\ndef check(c):\n    assert c(xs) == 1", 1, "def f(x): return x[0]",
         "def f(x): return 2"),
        ("def check(c):\r\n    assert c(1) == 1\r\n    assert c(2) == 2\r\n", 2,
         "def f(x): return x", "def f(x): return 1"),
    ],
)  # fmt: skip
def test_assertions_are_split_where_each_stands_alone(test_code, cases, right, wrong):
    gold = {"import_prefix": "", "test_code": test_code, "entry_point": "f"}
    assert len(read_tests(gold).cases) == cases
    assert failure(right, gold) == ""
    assert failure(wrong, gold) == "error"


def test_tests_share_nothing():
    program = (
        "import os\nseen = os.path.exists('/tmp/seen')\nopen('/tmp/seen', 'w').close()\n"
        "print('again' if seen else 'first')"
    )
    gold = {"stdin": ["", ""], "expected_output": ["first", "first"]}
    assert failure(program, gold) == ""


def test_the_time_of_all_tests_together_is_limited():
    gold = {"stdin": ["x"] * 50, "expected_output": ["x"] * 50}
    seconds = stopwatch()
    slow = "import time; time.sleep(0.4); print('x')"
    assert failure(slow, gold, CodeLimits(5.0, 4.0)) == "time"
    assert 3.5 < seconds() < 15


@pytest.mark.parametrize(("total_s", "why"), [(50.0, ""), (20.0, "time")])
def test_a_busy_machine_does_not_use_up_the_time_of_all_tests(monkeypatch, total_s, why):
    now, given_s = [0.0], []

    async def slow_case(program, tests, case, seconds, limits):
        now[0] += 11.0  # the program waits for a processor for half of this time
        given_s.append(seconds)
        return code_tests.Outcome("")

    monkeypatch.setattr(code_tests, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(code_tests, "_run_case", slow_case)
    gold = {"stdin": ["x"] * 7, "expected_output": ["x"] * 7}
    # Each test counts 7 s, so that 50 s are enough for 7 tests and 20 s for 3.
    assert failure("print('x')", gold, CodeLimits(6.0, total_s)) == why
    assert len(given_s) == (7 if not why else 3) and given_s[:2] == [6.0, 6.0]


def test_a_long_expected_output_may_be_printed():
    gold = {"stdin": ["5000000\n"], "expected_output": ["x" * 5_000_000 + "\n"]}
    assert failure("print('x' * int(input()))", gold, CodeLimits(20.0, 40.0)) == ""
    endless = "while True:\n    print('x' * 1_000_000)"
    assert failure(endless, SUM, CodeLimits(20.0, 40.0)) == "limit"


@pytest.mark.parametrize(
    ("given", "expected", "lines", "tokens"),
    [
        ("3\n", "3", True, True),
        ("3", "3.0", True, True),
        (" 1 2 \n3\n\n", "1 2\n3", True, True),
        ("1 2 3", "1 2\n3", False, True),
        ("0.333333", "0.333334", False, True),
        ("0.3333", "0.3343", False, False),
        ("YES", "yes", False, True),
        ("1000000008", "1000000007", False, False),
        ("+7", "7", True, True),
        ("1000000.5", "1000000.6", False, False),
        ("1e400 nan", "1e400 nan", True, True),
        ("", "", True, True),
        ("x", "", False, False),
        ("12345678901234567890", "12345678901234567891", False, False),
    ],
)
def test_outputs_are_compared_as_their_benchmarks_do(given, expected, lines, tokens):
    assert same_lines(given, expected) is lines
    if given != "12345678901234567890":  # beyond what a float tells apart
        assert same_tokens(given, expected) is tokens


@given(st.text(max_size=40), st.text(max_size=40))
def test_comparing_never_raises_and_everything_equals_itself(a, b):
    assert same_lines(a, a) and same_tokens(a, a)
    assert same_lines(a, b) in (True, False) and same_tokens(a, b) in (True, False)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```py\nx = 1\n```", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nand\n```python\ny = 2\n```", "y = 2"),
        ("no program", None),
        ("```py\n\n```", None),
        ("", None),
        ("The input is\n```text\n1 2\n```\nso:\n```python\nx = 1\n```", "x = 1"),
        ("```cpp\nint x;\n```\n```Python3\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nExample output:\n```\n3\n```", "x = 1"),
        ("```\nx = 1\n```\nRun it:\n```sh\npython a.py\n```", "x = 1"),
        ("So: ```python\nx = 1```\nIt prints\n```text\n3\n```", "x = 1"),
        ("So:\r\n```python\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2"),
        ("So:\n```py\ndef f():\n    ```\n    f()\n    ```\n```",
         "def f():\n    ```\n    f()\n    ```"),
        ("1. So:\n    ```py\n    if x:\n        y = 2\n    ```", "if x:\n    y = 2"),
        ("````py\nx = 1\n```\ny = 2\n````\ndone", "x = 1\n```\ny = 2"),
        ("```cpp\nint x;\n```", None),
        ("Between ``` fences:\n``` python title=a.py\nx = 1\n```", "x = 1"),
        ("So:\n```py\nx = 1\n```\nbut\n```py\ny = 2", "x = 1"),
    ],
)  # fmt: skip
def test_the_program_of_an_answer(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize(
    "gold",
    [
        {},
        {"stdin": ["1"], "expected_output": []},
        {"stdin": [], "expected_output": []},
        {"stdin": 3, "expected_output": 3},
        {"functional": [1]},
        {"import_prefix": 3},
        {"import_prefix": "", "test_code": "def check(f):\n    assert (", "entry_point": "f"},
    ],
)
def test_tests_that_are_none_are_refused(gold):
    with pytest.raises(ValueError):
        read_tests(gold)


# --- tests that are kept apart --------------------------------------------------------------


class Kind(enum.Enum):
    STDIN = "stdin"


@dataclasses.dataclass
class Sample:
    input: str
    output: str
    testtype: Kind


@dataclasses.dataclass
class Problem:
    question_id: str
    public_test_cases: list
    private_test_cases: list
    metadata: dict


PRIVATE = [{"input": "1 2", "output": "3", "testtype": "stdin"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode()


def test_livecodebench_packs_its_private_tests():
    row = {"public_test_cases": json.dumps(PRIVATE), "private_test_cases": PACKED, "metadata": "{}"}
    tests = livecodebench_tests(row)
    assert [(c.kind, c.given, c.expected) for c in tests.cases] == [("stdin", "1 2", "3")] * 2
    functional = [{"input": "[1]\n2", "output": "3", "testtype": "functional"}]
    row = {"public_test_cases": functional, "metadata": '{"func_name": "add"}'}
    assert livecodebench_tests(row).entry == "add"


def test_pickles_of_the_release_are_read(tmp_path):
    sample = Sample("1 2", "3", Kind.STDIN)
    (tmp_path / "abc_a.pkl").write_bytes(pickle.dumps(Problem("abc_a", [sample], [sample], {})))
    tests = load_private_tests(str(tmp_path), "abc_a")
    assert [(c.kind, c.given) for c in tests.cases] == [("stdin", "1 2")] * 2


def test_private_tests_as_json_and_their_mistakes(tmp_path):
    (tmp_path / "q1.json").write_text(json.dumps(SUM))
    (tmp_path / "q2.json").write_text("{}")
    assert len(load_private_tests(str(tmp_path), "q1").cases) == 2
    assert load_private_tests(str(tmp_path), "q3") is None
    with pytest.raises(UserError, match=r"q2\.json"):
        load_private_tests(str(tmp_path), "q2")
    for name in ("../q1", "", ".hidden", "a/b", "/etc/passwd"):
        with pytest.raises(UserError, match=re.escape(f": {name!r} ")):
            load_private_tests(str(tmp_path), name)
    with pytest.raises(UserError, match=f"^{tmp_path}/absent: "):
        load_private_tests(str(tmp_path / "absent"), "q1")
