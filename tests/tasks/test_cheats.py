"""Programs and answers that were written to cheat earn nothing; honest ones lose nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from coa_jax.data.trajectory import Author, SegmentSpan
from coa_jax.tasks import Graders, GradersConfig, Task, load_tasks
from coa_jax.tasks.code_tests import CodeLimits, Outcome, read_tests, run_tests
from coa_jax.tasks.maths import same_expression
from tests.tasks.finished import finished

DATA = Path(__file__).resolve().parents[2] / "../shared/data"
LIMITS = CodeLimits(test_s=10.0, total_s=60.0)
FUNCTIONAL = {"functional": ["assert f(2) == 40", "assert f([3]) == (1, {2}, 0.5)"]}
CHECK = {
    "import_prefix": "import math\n",
    "test_code": "def check(candidate):\n    assert candidate(2) == 40\n",
    "entry_point": "f",
}
CALL = {"inputs": ["2"], "outputs": ["40"], "fn_name": "f"}
STDIN = {"stdin": ["2\n"], "expected_output": ["40\n"]}

CHEATS = {
    "the mark of standard input": "import os, sys\nm = sys.stdin.readline().strip()\n"
    "print('\\n' + m, flush=True)\nos._exit(0)",
    "the mark of every descriptor": "import os\n"
    "for n in range(3, 20):\n    try:\n        os.write(n, b'[true, null, []]\\n')\n"
    "    except OSError: pass\nos._exit(0)",
    "equal to everything": "class All:\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 0\ndef f(*a): return All()",
    "never unequal": "class All(int):\n    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\ndef f(*a): return All(1)",
    "a text equal to everything": "class All(str):\n    __eq__ = lambda s, o: True\n"
    "    __hash__ = str.__hash__\ndef f(*a): return All('x')",
    "a list equal to everything": "class All(list):\n    __eq__ = lambda s, o: True\n"
    "def f(*a): return All()",
    "the source": "import re\nt = open('program.py').read() if __import__('os').path.exists("
    "'program.py') else open('/tmp/program.py').read()\n"
    "n = re.findall(r'== (\\d+)', t)\ndef f(*a): return int(n[-1]) if n else None",
    "the arguments of the interpreter": "import sys, re\nt = open(sys.argv[0]).read() + open("
    "'/proc/self/cmdline').read()\nn = re.findall(r'== ?(\\d+)', t)\n"
    "def f(*a): return int(n[0]) if n else None",
    "the frames": "import sys\ndef f(*a):\n    g = sys._getframe()\n    while g:\n"
    "        for v in g.f_locals.values():\n"
    "            if isinstance(v, str) and '=' '= 40' in v: return 40\n        g = g.f_back",
    "the garbage collector": "import gc\ndef f(*a):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and '40' in map(str, o.values()): return 40",
    "builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.eval = lambda *a: 40\n"
    "builtins.exec = lambda *a: None",
    "modules": "import sys, json, types\njson.dumps = lambda *a: '[[], null, []]'\n"
    "sys.modules['json'] = types.ModuleType('json')\ndef f(*a): return 1",
    "an end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(*a): raise SystemExit",
    "an exception that counts as an end": "def f(*a): raise SystemExit(0)",
    "a keyboard interrupt": "def f(*a): raise KeyboardInterrupt",
    "an end at once": "import os\nos._exit(0)",
    "forged verdicts": "import os\ndef f(*a):\n    for n in range(1, 12):\n"
    "        try: os.write(n, b'pass\\n')\n        except OSError: pass\n    os._exit(0)",
    "a flood of answers": "import os\ndef f(*a):\n    while True: os.write(3, b'x' * 65536)",
    "a generator": "def f(*a):\n    yield 40",
    "a coroutine": "async def f(*a): return 40",
    "a type": "def f(*a): return int",
    "a function": "def f(*a): return lambda *b: 40",
    "an exception": "def f(*a): return ValueError(40)",
    "a thread": "import threading, os, time\ndef flood():\n    while True:\n"
    "        for n in range(3, 9):\n            try: os.write(n, b'[null, null, []]\\n')\n"
    "            except OSError: pass\n        time.sleep(0.01)\n"
    "threading.Thread(target=flood, daemon=True).start()\ndef f(*a): return None",
    "a child": "import os, time\nif os.fork():\n    os._exit(0)\ntime.sleep(1)\nos._exit(0)",
    "a trace function": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(None)\n"
    "def f(*a): return True",
    "another comparison": "def check(*a): pass\ndef f(*a): return NotImplemented",
    "a wrong constant": "def f(*a): return float('nan')",
    "an excepthook": "import sys\nsys.excepthook = lambda *a: None\ndef f(*a): raise ValueError",
}


def graded(program, gold):
    return asyncio.run(run_tests(program, read_tests(gold), LIMITS))


@pytest.mark.parametrize("kind", ["functional", "check", "call", "stdin"])
def test_no_program_passes_by_cheating(kind):
    gold = {"functional": FUNCTIONAL, "check": CHECK, "call": CALL, "stdin": STDIN}[kind]
    tests = read_tests(gold)

    async def all_of_them():
        limits = CodeLimits(test_s=3.0, total_s=20.0)
        turns = asyncio.Semaphore(2)

        async def one(program):
            async with turns:
                return await run_tests(program, tests, limits)

        return await asyncio.gather(*map(one, CHEATS.values()))

    passed = {n for n, o in zip(CHEATS, asyncio.run(all_of_them()), strict=True) if not o.why}
    assert len(CHEATS) >= 29 and passed == set()


HONEST = {
    "tuples": ("assert f(1) == (1, 'a', None)", "def f(x): return (x, 'a', None)"),
    "sets": ("assert f([1, 1]) == {1} and f([]) == set()", "def f(x): return set(x)"),
    "frozen sets": ("assert f() == {frozenset({1}): b'x'}",
                    "def f(): return {frozenset([1]): b'x'}"),
    "floats": ("assert abs(f(2) - 1.4142) < 1e-4", "def f(x): return x ** 0.5"),
    "infinity": ("assert f() == float('inf')", "def f(): return math.inf"),
    "not a number": ("x = f()\nassert x != x", "def f(): return float('nan')"),
    "long numbers": ("assert f(6000) == 10 ** 6000", "def f(n): return 10 ** n"),
    "exceptions": ("try:\n    f(-1)\nexcept ValueError as error:\n    assert str(error) == 'no'\n"
                   "else:\n    assert False", "def f(x): raise ValueError('no')"),
    "own exceptions": ("try:\n    f()\n    assert False\nexcept KeyError:\n    pass",
                       "class Own(KeyError): pass\ndef f(): raise Own('x')"),
    "context managers": ("import contextlib\nwith contextlib.suppress(ValueError):\n    f()\n"
                         "    assert False", "def f(): raise ValueError"),
    "mutation": ("x = [3, [1]]\nf(x)\nassert x == [[1, 2], 3]",
                 "def f(x):\n    x.sort(key=str, reverse=True)\n    x[0].append(2)"),
    "identity": ("x = [1]\nassert f(x) is x and f(None) is None", "def f(x): return x"),
    "a copy": ("x = [1]\nassert f(x) == x and f(x) is not x", "def f(x): return list(x)"),
    "truth": ("assert f(3)\nassert not f(4)", "def f(x): return x % 2"),
    "members": ("assert f(3) in (1, 9)", "def f(x): return x * x"),
    "methods of values": ("assert f('a').upper() == 'A'", "def f(x): return x"),
    "generators": ("assert list(f(3)) == [0, 1, 2]", "def f(n):\n    yield from range(n)"),
    "endless generators": ("g = f()\nassert next(g) == 0 and next(g) == 1",
                           "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1"),
    "functions": ("assert f(2)(3) == 5", "def f(x): return lambda y: x + y"),
    "named tuples": ("assert f() == (1, 2)",
                     "import collections as c\ndef f(): return c.namedtuple('P', 'x y')(1, 2)"),
    "a sort in place": ("def check(c):\n    x = [3, 1]\n    assert c(x) == None and x == [1, 3]\n"
                        "check(f)", "def f(x): x.sort()"),
    "scratch": ("for x, y in [([3, 1], [1, 3]), ([2], [2])]:\n    assert f(x) == y\n"
                "x = [3, 1]\nassert sorted(f(x)) == sorted([3, 1])",
                "def f(x):\n    y = sorted(x)\n    x.clear()\n    return y"),
    "a sorted argument": ("for x, y in [([3, 1], [1, 3]), ([2], [2])]:\n    assert f(x) == y",
                          "def f(x):\n    x.sort()\n    return x"),
    "default values": ("assert f()['a'] == 4 and f() == {}",
                       "import collections as c\ndef f(): return c.defaultdict(lambda: 4)"),
    "counters": ("assert f('aab') == {'a': 2, 'b': 1}", "def f(x): return Counter(x)"),
    "views of dictionaries": ("a, b, c = f({'a': 1})\n"
                              "assert a == {'a'} and list(b) == [1] and c == {('a', 1)}",
                              "def f(x): return x.keys(), x.values(), x.items()"),
    "fractions": ("from fractions import Fraction\nassert f() == Fraction(1, 2)",
                  "from fractions import Fraction\ndef f(): return Fraction(2, 4)"),
    "state": ("f(1)\nassert f(2) == [1, 2]",
              "seen = []\ndef f(x):\n    seen.append(x)\n    return seen"),
    "the prelude": ("assert isclose(f(2), 4.0) and math.floor(f(2)) == 4",
                    "def f(x): return x * 2"),
    "a name of a builtin": ("assert sum(10, 15) == 6", "def sum(a, b): return 6"),
    "a name of the prelude": ("assert lcm(4, 6) == 12", "def lcm(a, b): return 12"),
    "keywords": ("assert f(1, k=2) == 3", "def f(x, k): return x + k"),
    "noise": ("assert f() == 1", "print('noise' * 10000)\ndef f():\n    print('x')\n    return 1"),
    "methods": ("assert Solution().add(1, 2) == 3",
                "class Solution:\n    def add(self, a, b): return a + b"),
}  # fmt: skip


def test_honest_programs_pass_assertions_apart():
    async def all_of_them():
        turns = asyncio.Semaphore(2)

        async def one(test, program):
            async with turns:
                return await run_tests(program, read_tests({"functional": test}), LIMITS)

        return await asyncio.gather(*(one(*pair) for pair in HONEST.values()))

    outcomes = dict(zip(HONEST, asyncio.run(all_of_them()), strict=True))
    assert {n: o for n, o in outcomes.items() if o != Outcome("")} == {}


def test_arrays_cross_as_values():
    limits = dataclasses.replace(LIMITS, libraries=("numpy",))
    test = (
        "import numpy as np\nx = np.array([[3, 1], [2, 4]])\ny = f(x)\n"
        "assert np.array_equal(y, [[1, 3], [2, 4]]) and f(y) is y\n"
        "assert np.allclose(f(np.array([0.5, 1j])), [1j, 0.5])"
    )
    honest = "import numpy as np\ndef f(x):\n    x.sort()\n    return x"
    cheats = (
        "class A:\n    def __eq__(s, o): return s\n    def __array__(s, *a, **k): return [1]\n"
        "    dtype = shape = property(lambda s: s)\ndef f(x): return A()",
        "import numpy as np\nnp.array_equal = np.allclose = lambda *a, **k: True\n"
        "def f(x): return x",
    )
    for program, passes in ((honest, True), *((cheat, False) for cheat in cheats)):
        outcome = asyncio.run(run_tests(program, read_tests({"functional": test}), limits))
        assert (outcome.why == "") == passes, program
        assert not outcome.cheatable


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("s = Stack()\ns.push(3)\nassert s.pop() == 3",
         "class Stack(list):\n    def push(self, x): self.append(x)"),
        ("assert f(lambda x: x + 1, 2) == 3", "def f(g, x): return g(x)"),
        ("import datetime\nassert f() == datetime.date(2020, 1, 1)",
         "import datetime\ndef f(): return datetime.date(2020, 1, 1)"),
        ("import types\nassert isinstance(f(3), types.GeneratorType)", "def f(n):\n    yield n"),
        ("assert isclose(lcm(4, 6), 12)", "def lcm(a, b): return 12"),
        ("x = [3, 1]\nf(x)\nassert x == sorted([3, 1])", "def f(x): x.sort()"),
        ("try:\n    f([])\n    assert False\nexcept StopIteration:\n    pass",
         "def f(x): return next(iter(x))"),
        ("assert f(1).value == 1", "import types\ndef f(x): return types.SimpleNamespace(value=x)"),
    ],
)  # fmt: skip
def test_an_assertion_that_needs_an_object_passes_and_is_marked(test, program):
    assert graded(program, {"functional": test}) == Outcome("", 1)
    task = Task("c", "?", "code", (json.dumps({"functional": test}),), "s", {"grader": "code"})
    reward = Graders(GradersConfig())(task, finished(f"```py\n{program}\n```", "code"))
    assert (reward.value, reward.parts["cheatable"]) == (1.0, 1.0)


def test_the_program_does_not_choose_how_it_is_tested():
    own = "class All:\n    def __eq__(s, o): return True\n    def __getattr__(s, n): return s\n"
    own += "    def __call__(s, *a): return s\n    def __bool__(s): return True\n"
    own += "    def __iter__(s): return iter([])\n    def __len__(s): return 2\n"
    own += "def f(*a): return All()\n"
    for test in (
        "assert f('a').upper() == 'A'", "assert f(1) == f(2) == 3", "assert f(1) == [f(1)]",
        "assert f(f(1)) == 2", "assert f('a').startswith('a')", "assert len(f(1)) == 2",
        "assert set(f(1)) == {1}", "assert sorted(f(1)) == [1]", "assert isinstance(f(1), int)",
        "assert {1} <= f(1)", "assert f(1) > 0",
    ):  # fmt: skip
        assert graded(own, {"functional": test}) == Outcome("error"), test
    shadows = "def f(x): return []\nsorted = set = abs = isclose = lambda *a, **k: []\n"
    for test in ("assert sorted(f(1)) == [1]", "assert isclose(f(1), 1)"):
        assert graded(shadows, {"functional": test}) == Outcome("error"), test


STEAL = CHEATS["the mark of standard input"]
FORGE = """import json, os, sys
def f(x):
    frame = sys._getframe()
    while "writes" not in frame.f_locals:
        frame = frame.f_back
    writes = frame.f_locals["writes"]
    writes.write(json.dumps([{}, None, []]).encode() + b"\\n")
    writes.flush()
    os._exit(0)
m = sys.stdin.readline().strip()
if m:
    print("\\n" + m, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert lcm(4, 6) == 12", STEAL),
        ("assert sum(10, 15) == 6", STEAL),
        ("assert math.isclose(lcm(4, 6), 12)", STEAL),
        ("try:\n    lcm('a')\n    assert False\nexcept KeyError:\n    pass", STEAL),
        ("assert f(f(1)) == 2", FORGE.replace("{}", "{'type': '__loader__'}")),
        ("assert f(f(1)) == 2", FORGE.replace("{}", "{'exit': '__loader__'}")),
    ],
)
def test_a_program_cannot_choose_to_run_together_with_the_assertion(test, program):
    outcome = graded(program, {"functional": test})
    assert outcome.why and not outcome.cheatable


def test_a_forged_array_is_not_a_value():
    forged = FORGE.replace("{}", "{'ndarray': [['x'], 'O', [1]]}")
    tests = read_tests({"functional": "assert f(f(1)) == 2"})
    limits = dataclasses.replace(LIMITS, libraries=("numpy",))
    outcome = asyncio.run(run_tests(forged, tests, limits))
    assert outcome.why and not outcome.cheatable


EMPTY = "def f(x):\n    while x: x.pop()\n    return "


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert isclose(lcm(4, 6), 12)", "def isclose(*a): return True"),
        ("assert all([lcm(4, 6) == 13])", "def all(*a): return True"),
        ("assert max([1], key=lcm) == 7", "def max(*a, **k): return 7"),
        ("x = [3, 1]\nassert f(x) == sorted(x)", EMPTY + "[]"),
        ("x = [3, 1]\nassert f(x) - sum(x) == 0", EMPTY + "0"),
        ("x = [3, 1]\ny = f(x)\nassert len(y) == len(x)", EMPTY + "[]"),
        ("x = [3, 1]\ny = f(x)\nassert (y == sorted(x)) == True", EMPTY + "[]"),
        ("y = [3, 1]\nx = [y]\nassert f(x) == len(y)", "def f(x):\n    x[0].clear()\n    return 0"),
        ("x = {1: 2}\nassert set(f(x)) == set(x.values())",
         "def f(x):\n    x.clear()\n    return []"),
        ("assert all(map(lambda x: f(x) == 7, [1, 2]))", "def f(x): raise StopIteration"),
        ("for a, b in zip(map(f, [1, 2]), [5, 6]):\n    assert a == b",
         "def f(x): raise StopIteration"),
        ("import uuid\nassert f() == uuid.UUID(int=1)",
         "class A:\n    __eq__ = lambda s, o: True\ndef f(): return A()"),
    ],
)  # fmt: skip
def test_what_a_program_can_still_cheat_is_marked(test, program):
    assert graded(program, {"functional": test}) == Outcome("", 1)


# --- answers --------------------------------------------------------------------------------

CITY = Task("e", "Which?", "web", ("Oslo",), "s")
HALF = Task("m", "?", "code", (r"\frac12",), "s", {"grader": "math"})
CHOICE = Task("q", "A, B, C or D?", "web", ("B",), "s")


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        (CITY, "Oslo|Bergen"), (CITY, "Bergen|Oslo"), (CITY, "Oslo or Bergen"), (CITY, "|"),
        (CITY, "Oslo, Bergen, Rome"), (CITY, "<answer>Oslo</answer>"), (CITY, ""), (CITY, ".*"),
        (CHOICE, "A|B|C|D"), (CHOICE, "A B C D"), (CHOICE, "ABCD"), (CHOICE, "B or C"),
        (HALF, r"\boxed{1/3} or \boxed{x}"), (HALF, r"\boxed{1/2, 1/3}"), (HALF, r"$1/2$ or $1/3$"),
        (HALF, "x"), (HALF, r"\frac{1}{2"), (HALF, ""), (HALF, "[0, 1]"), (HALF, r"\boxed{}"),
    ],
)  # fmt: skip
def test_no_answer_that_hedges_or_injects_earns_a_reward(task, answer):
    assert Graders(GradersConfig())(task, finished(answer, task.protocol)).value == 0.0


@pytest.mark.parametrize(
    "sign",
    [
        *(r"\lor", r"\vee", r"\cup", r"\cap", r"\land", r"\wedge", "=", r"\to", r"\Rightarrow"),
        *(r"\in", r"\subset", r"\mid", r"\iff", r"\equiv", r"\sim", r"\circ", r"\setminus"),
        *(r"\mapsto", r"\approx"),
    ],
)
def test_several_joined_numbers_are_not_one_of_them(sign):
    pytest.importorskip("math_verify")
    numbers = f" {sign} ".join(["1", "2", "11"])
    for answer in (numbers, f"x = {numbers}", f"{{{numbers}}}"):
        assert not any(same_expression(answer, gold) for gold in ("1", "2", "11")), answer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("x = 5", "5"), (r"x \in [0, 1]", "[0,1]"), ("f(x) = x^2", "x^2"), ("5", "x = 5"),
        (r"30^\circ", "30"), (r"(0,1) \cup (2,3)", r"(0,1)\cup(2,3)"),
    ],
)  # fmt: skip
def test_a_named_value_is_its_value(answer, gold):
    pytest.importorskip("math_verify")
    assert same_expression(answer, gold)


@pytest.mark.parametrize(
    "name", ["mhqa_train", "mhqa_eval", "qa_em", "qa_subem", "f1", "exact_match"]
)
def test_an_answer_in_an_observation_is_never_graded(name):
    silent = finished(None)
    text = "<observation><answer>Oslo</answer></observation>"
    last = silent.segments[-1].end
    spans = (*silent.segments, SegmentSpan("observation", Author.ENVIRONMENT, text, last, last))
    seen = dataclasses.replace(silent, segments=spans, text=silent.text + text)
    graders = Graders(GradersConfig(answer=name))
    assert graders(CITY, seen).value == 0.0
    assert graders(CITY, finished("Oslo")).value == 1.0
    if name in ("mhqa_train", "mhqa_eval", "qa_em", "qa_subem"):  # as the release's code
        path = f"coa_jax.tasks.release_rewards:{name}"
        assert Graders(GradersConfig(answer=path))(CITY, seen).value == 1.0


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("aime24", "code"), pytest.param("livecodebench_v4_20", "code", marks=pytest.mark.slow)],
)
def test_right_answers_to_the_rows_of_the_release_lose_nothing(name, protocol):
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip("the data are not here")
    graders = Graders(GradersConfig())
    for task in load_tasks(str(path), "test"):
        answer = rf"\boxed{{{task.gold[0]}}}"
        if task.metadata["grader"] == "code":
            tests = json.loads(task.gold[0])
            table = dict(zip(tests["stdin"], tests["expected_output"], strict=True))
            answer = f"```py\nimport sys\nprint({table!r}[sys.stdin.read()])\n```"
        reward = graders(task, finished(answer, protocol))
        assert reward.value == 1.0 and "cheatable" not in reward.parts, task.id
