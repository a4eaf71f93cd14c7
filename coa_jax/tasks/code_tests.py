"""Grades programs: they run in the sandbox, and their output is compared outside of it.

Forms of tests, by the content of a question file:

* input and output texts (AtCoder, CodeContests, ``stdin`` and ``expected_output`` of the release),
* calls of a function with JSON arguments (LeetCode in LiveCodeBench's own files),
* assertions (``functional``, and ``import_prefix`` with ``test_code``).

A program passes if all of its tests pass. Time limits are those of the release: 6 seconds per test,
min(7 n + 5, 300) seconds for n tests.
"""

from __future__ import annotations

import ast
import dataclasses
import decimal
import functools
import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

from coa_jax.bounds import Bounded, MiB, Seconds
from coa_jax.protocol import parse_code
from coa_jax.tools.code_libraries import Library, find_libraries
from coa_jax.tools.sandbox import isolation
from coa_jax.tools.sandbox.limits import Limits
from coa_jax.tools.sandbox.run import Result, run

_WHOLE = re.compile(r"[-+]?[0-9]+")
_FENCED = re.compile(r"```(?:py|python|python3)?[ \t]*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)
_PYTHON = ("py", "python", "python3")
_STAR = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins"),
    "typing",
)
"""Modules that LiveCodeBench imports with ``*`` before a program, in this order: ``builtins``
restores names that earlier modules hide, such as ``pow`` with three arguments.
"""

_PRELUDE = "".join(
    [
        *(f"from {name} import *\n" for name in _STAR),
        *(f"import {name}\n" for name in _STAR),
        "sys.setrecursionlimit(50000)\n",
    ]
)
# A separate source, so that statements required at the start of a file work at the program's start.
_PROGRAM = "exec(compile({!r}, '<program>', 'exec'), globals())\n"
_CALL = """

def _main():
    import json, sys
    mark, name, *lines = sys.stdin.read().split("\\n")
    arguments = [json.loads(line) for line in lines if line.strip()]
    owner = globals().get("Solution")
    function = getattr(owner(), name) if owner is not None else globals()[name]
    print("\\n" + mark + json.dumps(function(*arguments)), flush=True)

_main()
"""


@dataclasses.dataclass(frozen=True)
class CodeLimits(Bounded):
    """Limits of graded programs.

    Attributes:
        test_s: seconds of one test.
        total_s: seconds of all tests of a program.
        memory_mb: MiB of memory.
        libraries: packages that programs and their tests may import, see
            `coa_jax.tools.code_libraries`.
    """

    test_s: Seconds = 6.0
    total_s: Seconds = 300.0
    memory_mb: MiB = 2048
    libraries: tuple[Library, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One test: its input and the expected output.

    For ``stdin``, a text and the expected output; for ``call``, one JSON argument per line and the
    expected JSON; for ``assert``, statements that must not fail, and no output.
    """

    kind: Literal["stdin", "call", "assert"]
    given: str
    expected: str = ""


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of a question.

    Attributes:
        cases: tests in the order in which they run.
        entry: function that ``call`` tests call.
        prefix: source that precedes the program.
        compare: comparison of outputs: ``lines``, as in LiveCodeBench, or ``tokens``, as in
            CodeContests.
    """

    cases: tuple[Case, ...]
    entry: str = ""
    prefix: str = ""
    compare: Literal["lines", "tokens"] = "lines"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a program.

    Attributes:
        passed: whether every test passed.
        tests: number of tests.
        done: number of tests that passed before the first failure.
        why: reason of the failure: ``output``, ``error``, ``time``, ``limit``, or "".
    """

    passed: bool
    tests: int
    done: int
    why: str = ""


def program_of(answer: str) -> str | None:
    """Extracts the program from an answer; None if there is none.

    Of several code blocks, the last one labelled as Python is used, else the last one without a
    label.
    """
    parsed = parse_code(answer)
    if parsed is not None:
        return parsed[0]
    blocks = [block for block in _blocks(answer) if block[1].strip()]
    for names in (_PYTHON, ("",)):
        programs = [text for name, text in blocks if name in names]
        if programs:
            return programs[-1]
    torn = _FENCED.findall(answer)  # for fences that do not pair up line by line
    return torn[-1] if torn and torn[-1].strip() else None


def _blocks(answer: str) -> list[tuple[str, str]]:
    """Returns (label, text) of each fenced block; fences are paired line by line.

    A block may begin after words on the same line, and end after its last statement. A fence
    indented like code, as in a docstring, does not end a block.
    """
    blocks: list[tuple[str, str]] = []
    lines: list[str] | None = None
    name, indent, size = "", "", 3
    for line in answer.split("\n"):
        before, found, rest = line.rstrip().partition("```")
        behind, words = rest.lstrip("`"), before.strip()
        ticks = 3 + len(rest) - len(behind)
        if lines is None:
            if found and "`" not in behind and not (words and " " in behind):
                name, indent, size = behind.strip().lower(), "" if words else before, ticks
                lines = []
            continue
        shallow = words or len(before) <= max(3, len(indent))
        if found and not behind and ticks >= size and shallow:
            blocks.append((name.partition(" ")[0], "\n".join([*lines, before] if words else lines)))
            lines = None
        else:
            lines.append(line.removesuffix("\r").removeprefix(indent))
    return blocks


def read_tests(gold: Mapping[str, Any]) -> Tests:
    """Reads the tests in the gold value of a question file.

    Raises:
        ValueError: the value has none of the known forms.
    """
    if "import_prefix" in gold:
        checks = _checks(_text(gold, "test_code"))
        call = f"check({_text(gold, 'entry_point')})"
        cases = [Case("assert", f"{check}\n{call}") for check in checks]
        return Tests(tuple(cases), prefix=_text(gold, "import_prefix"))
    if gold.get("functional"):
        checks = gold["functional"]
        checks = [checks] if isinstance(checks, str) else list(checks)
        if not all(isinstance(check, str) for check in checks):
            raise ValueError("'functional' must hold statements")
        return Tests(tuple(Case("assert", check) for check in checks))
    for inputs, outputs in (
        ("stdin", "expected_output"),
        ("inputs", "outputs"),
        ("input", "output"),
    ):
        if inputs in gold and outputs in gold:
            tests = _pairs(gold[inputs], gold[outputs], str(gold.get("fn_name") or ""))
            tokens = gold.get("compare") == "tokens"
            return dataclasses.replace(tests, compare="tokens") if tokens else tests
    raise ValueError("the tests are in no known form (stdin, inputs, functional, import_prefix)")


def _checks(source: str) -> list[str]:
    """Splits a function of assertions into one source per assertion.

    Other sources are returned unchanged.

    Raises:
        ValueError: the source is not valid Python, so no program could pass.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    try:
        module = ast.parse(source).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"'test_code' is not Python: {error}") from error
    function = module[0] if len(module) == 1 else None
    if not isinstance(function, ast.FunctionDef):
        return [source]
    lines, body = source.split("\n"), function.body
    for check in body:
        alone = not lines[check.lineno - 1][: check.col_offset].strip()
        if not isinstance(check, ast.Assert) or not alone:
            return [source]
    head = lines[: body[0].lineno - 1]
    return ["\n".join([*head, *lines[c.lineno - 1 : c.end_lineno]]) for c in body]


def _pairs(inputs: Any, outputs: Any, entry: str) -> Tests:
    inputs = [inputs] if isinstance(inputs, str) else inputs
    outputs = [outputs] if isinstance(outputs, str) else outputs
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("there must be as many inputs as outputs")
    if not inputs:
        raise ValueError("there are no tests")
    cases = []
    for given, expected in zip(inputs, outputs, strict=True):
        if entry:
            given = given if isinstance(given, str) else "\n".join(map(json.dumps, given))
            expected = expected if isinstance(expected, str) else json.dumps(expected)
        cases.append(Case("call" if entry else "stdin", str(given), str(expected)))
    return Tests(tuple(cases), entry)


def _text(gold: Mapping[str, Any], key: str) -> str:
    if not isinstance(gold.get(key), str):
        raise ValueError(f"{key!r} must be a string")
    return str(gold[key])


async def run_tests(program: str, tests: Tests, limits: CodeLimits) -> Verdict:
    """Runs a program's tests until one fails, each in a new process that sees no other test.

    Args:
        program: source of the program.
        tests: tests of the question.
        limits: limits of the program.

    Raises:
        SandboxError: the sandbox does not work; the program is not to blame.
        UserError: this machine has no sandbox.
    """
    total = len(tests.cases)
    budget = min((limits.test_s + 1) * total + 5, limits.total_s)
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Verdict(False, total, 0, "error")
    end = time.monotonic() + budget
    for done, case in enumerate(tests.cases):
        left = end - time.monotonic()
        if left <= 0:
            return Verdict(False, total, done, "time")
        why = await _run_case(program, tests, case, min(limits.test_s, left), limits)
        if why:
            return Verdict(False, total, done, why)
    return Verdict(True, total, total)


async def _run_case(
    program: str, tests: Tests, case: Case, seconds: float, limits: CodeLimits
) -> str:
    """Returns the reason why one test fails, or ""."""
    source, stdin, mark = _PRELUDE + tests.prefix + "\n", case.given, secrets.token_hex(16)
    source += _PROGRAM.format(program)
    if case.kind == "call":
        name = tests.entry.rpartition(".")[2]
        source, stdin = source + _CALL, f"{mark}\n{name}\n{case.given}"
    elif case.kind == "assert":
        end = "\nimport sys as _sys\nprint('\\n' + _sys.stdin.readline().strip(), flush=True)\n"
        source, stdin = f"{source}\n{case.given}{end}", f"{mark}\n"
    keep = 2 * len(case.expected) + (1 << 16)
    # Other load on the machine does not reduce the time of a graded program.
    within = Limits(wall_s=seconds, cpu_s=seconds, memory_mb=limits.memory_mb, starved_s=seconds)
    job = _isolation().job(within, _directories(limits.libraries))
    result = await run(job, source, stdin, keep)
    if result.reason == "wall":
        return "time"
    if result.reason != "exit":
        return "limit"
    if result.code != 0:
        return "time" if result.cpu_s >= seconds else "error"
    return "" if _right(result, tests, case, mark) else "output"


@functools.cache
def _isolation() -> isolation.Isolation:
    return isolation.find_isolation()


@functools.cache
def _directories(libraries: tuple[str, ...]) -> tuple[str, ...]:
    return find_libraries(libraries, _isolation().interpreter).directories


def _right(result: Result, tests: Tests, case: Case, mark: str) -> bool:
    printed = result.stdout
    if case.kind == "stdin":
        if printed.length > len(printed.head):
            return False  # far longer than the expected output
        same = same_lines if tests.compare == "lines" else same_tokens
        return same(printed.head, case.expected)
    # The program's own output, of any length, does not count as the result of a call.
    last = printed.tail.rstrip("\n").rpartition("\n")[2]
    if not last.startswith(mark):
        return False
    return case.kind == "assert" or _same_json(last[len(mark) :], case.expected)


def _same_json(given: str, expected: str) -> bool:
    try:
        return bool(json.loads(given) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def same_lines(given: str, expected: str) -> bool:
    """Compares outputs as LiveCodeBench does.

    The numbers of lines must be equal. Lines agree if they are the same text, apart from blanks at
    both ends, or the same numbers.
    """
    ours, theirs = given.strip().split("\n"), expected.strip().split("\n")
    return len(ours) == len(theirs) and all(
        a.strip() == b.strip() or _same_numbers(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def _same_numbers(a: str, b: str) -> bool:
    try:
        return [decimal.Decimal(t) for t in a.split()] == [decimal.Decimal(t) for t in b.split()]
    except decimal.InvalidOperation:
        return False


def same_tokens(given: str, expected: str) -> bool:
    """Compares outputs as CodeContests does.

    Line breaks and case are ignored. Words agree if they are equal, or if they are numbers that
    differ by less than 1e-5. Integers must be equal, even if they are too large for a float.
    """
    ours, theirs = given.lower().split(), expected.lower().split()
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(a: str, b: str) -> bool:
    if a == b:
        return True
    try:
        if _WHOLE.fullmatch(a) and _WHOLE.fullmatch(b):
            return decimal.Decimal(a) == decimal.Decimal(b)
        return abs(float(a) - float(b)) < 1e-5
    except ValueError:
        return False
