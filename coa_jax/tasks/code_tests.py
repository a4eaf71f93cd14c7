"""Grades programs that a policy wrote, by running them on tests.

The programs run in the sandbox, and their output is compared outside the sandbox. A question file
contains tests of one of these kinds:

* texts for standard input and the expected outputs (AtCoder, CodeContests, and the fields ``stdin``
  and ``expected_output`` of the release),
* calls of a function with JSON arguments (LeetCode in LiveCodeBench's own files),
* assertions (the field ``functional``, or ``import_prefix`` with ``test_code``).

A program is right if it passes all tests. The default time limits are those of the release: 6
seconds per test, and min(7 n + 5, 300) seconds for n tests.
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

from coa_jax.config.fields import Bounded, MiB, Seconds
from coa_jax.protocol import parse_code
from coa_jax.sandbox.isolation import Isolation
from coa_jax.sandbox.limits import Job, Limits
from coa_jax.sandbox.run import ProgramResult, run
from coa_jax.tasks.assertions import Separate, run_separate, separate
from coa_jax.tools.code_libraries import Library, find_libraries, isolation_here

_WHOLE = re.compile(r"[-+]?[0-9]+")
_FENCED = re.compile(r"```(?:py|python|python3)?[ \t]*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)
_PYTHON = ("py", "python", "python3")
_KEYS = (("stdin", "expected_output"), ("inputs", "outputs"), ("input", "output"))
_STAR = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins"),
    "typing",
)
"""Modules that LiveCodeBench imports with ``*`` before a program, in this order.

``builtins`` comes late because it restores names that earlier modules hide, such as ``pow`` with
three arguments.
"""

_PRELUDE = "".join(
    [
        *(f"from {name} import *\n" for name in _STAR),
        *(f"import {name}\n" for name in _STAR),
        "sys.setrecursionlimit(50000)\n",
    ]
)
# The program is compiled as a source of its own, because statements such as ``from __future__
# import annotations`` must be the first of a source.
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
    """Limits for the programs of a policy while they are graded.

    Attributes:
        test_s: time limit of one test, in seconds.
        total_s: time limit of all tests of a program together, in seconds.
        memory_mb: memory limit of a program, in MiB.
        libraries: packages that programs and their tests may import, see
            `coa_jax.tools.code_libraries`.
    """

    test_s: Seconds = 6.0
    total_s: Seconds = 300.0
    memory_mb: MiB = 2048
    libraries: tuple[Library, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """A single test of a program.

    Attributes:
        kind: how the program is tested: ``stdin`` (its output for an input is compared), ``call``
            (the result of a function is compared) or ``assert`` (statements run after the program).
        given: text for standard input, JSON arguments of the function (one per line), or the
            statements, which must not raise an error.
        expected: expected output, or expected result as JSON; "" for ``assert``.
    """

    kind: Literal["stdin", "call", "assert"]
    given: str
    expected: str = ""


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of a question.

    Attributes:
        cases: tests in the order in which they run.
        entry: function under test: a name, or an expression such as ``Solution().add``; "" if the
            tests test the whole program, or if the assertions name the function.
        prefix: Python source that runs before the program, such as imports.
        compare: how outputs are compared: ``lines`` (see `same_lines`, as LiveCodeBench does) or
            ``tokens`` (see `same_tokens`, as CodeContests does).
    """

    cases: tuple[Case, ...]
    entry: str = ""
    prefix: str = ""
    compare: Literal["lines", "tokens"] = "lines"


def program_of(answer: str) -> str | None:
    """Extracts the program from an answer.

    Of several Markdown code blocks, the last block that is labelled as Python is the program. If no
    block has this label, the last block without a label is the program.

    Returns:
        The source of the program; None if the answer contains no program.
    """
    parsed = parse_code(answer)
    if parsed is not None:
        return parsed[0]
    blocks = [block for block in _blocks(answer) if block[1].strip()]
    for names in (_PYTHON, ("",)):
        programs = [text for name, text in blocks if name in names]
        if programs:
            return programs[-1]
    torn = _FENCED.findall(answer)  # if the fences do not form pairs line by line
    return torn[-1] if torn and torn[-1].strip() else None


def _blocks(answer: str) -> list[tuple[str, str]]:
    """Returns (label, text) of each block between Markdown fences.

    The opening fence may follow words on the same line, and the closing fence may follow the last
    statement on the same line. A fence that is indented like code, for example in a docstring, does
    not close a block.
    """
    blocks: list[tuple[str, str]] = []
    lines: list[str] | None = None
    name, indent, size = "", "", 3
    for line in answer.split("\n"):
        before, fence, rest = line.rstrip().partition("```")
        behind, words = rest.lstrip("`"), before.strip()
        ticks = 3 + len(rest) - len(behind)
        if lines is None:
            if fence and "`" not in behind and not (words and " " in behind):
                name, indent, size = behind.strip().lower(), "" if words else before, ticks
                lines = []
            continue
        shallow = words or len(before) <= max(3, len(indent))
        if fence and not behind and ticks >= size and shallow:
            blocks.append((name.partition(" ")[0], "\n".join([*lines, before] if words else lines)))
            lines = None
        else:
            lines.append(line.removesuffix("\r").removeprefix(indent))
    return blocks


def read_tests(gold: Mapping[str, Any]) -> Tests:
    """Reads the tests of a question from its accepted answer.

    Args:
        gold: accepted answer, a JSON object. It must have all keys of one of these formats:

            * (``stdin``, ``expected_output``), (``inputs``, ``outputs``) or (``input``,
              ``output``): inputs of the program, or of its function ``fn_name``, and the results,
            * ``functional``: assertions,
            * (``import_prefix``, ``test_code``, ``entry_point``): imports, a function ``check``
              with assertions, and its argument, which is the function under test.

    Raises:
        ValueError: the object has the keys of none of these formats, or a value is malformed.
    """
    if "import_prefix" in gold:
        checks = _checks(_text(gold, "test_code"))
        call = f"check({_text(gold, 'entry_point')})"
        cases = [Case("assert", f"{check}\n{call}") for check in checks]
        prefix = _text(gold, "import_prefix")
        return Tests(tuple(cases), _text(gold, "entry_point"), prefix)
    if gold.get("functional"):
        checks = gold["functional"]
        checks = [checks] if isinstance(checks, str) else list(checks)
        if not all(isinstance(check, str) for check in checks):
            raise ValueError("'functional' must be a list of strings with statements")
        return Tests(tuple(Case("assert", check) for check in checks))
    for inputs, outputs in _KEYS:
        if inputs in gold and outputs in gold:
            tests = _pairs(gold[inputs], gold[outputs], str(gold.get("fn_name") or ""))
            tokens = gold.get("compare") == "tokens"
            return dataclasses.replace(tests, compare="tokens") if tokens else tests
    raise ValueError("the tests are in no known form (stdin, inputs, functional, import_prefix)")


def _checks(source: str) -> list[str]:
    """Splits a function that contains only assertions into one source per assertion.

    The result for any other source is a list with the unchanged source.

    Raises:
        ValueError: the source is not valid Python, so that no program could pass the test.
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
    for argument, expected in zip(inputs, outputs, strict=True):
        if entry:
            argument = (
                argument if isinstance(argument, str) else "\n".join(map(json.dumps, argument))
            )
            expected = expected if isinstance(expected, str) else json.dumps(expected)
        cases.append(Case("call" if entry else "stdin", str(argument), str(expected)))
    return Tests(tuple(cases), entry)


def _text(gold: Mapping[str, Any], key: str) -> str:
    if not isinstance(gold.get(key), str):
        raise ValueError(f"{key!r} must be a string")
    return str(gold[key])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of the tests of a program.

    Attributes:
        why: why the program failed a test: ``output`` (wrong output), ``error`` (exception, exit
            code or assertion), ``time`` (time limit) or ``limit`` (memory or another limit); "" if
            the program passed every test.
        cheatable: number of tests that a program could have passed by cheating, see
            `coa_jax.tasks.assertions`.
    """

    why: str
    cheatable: int = 0


async def run_tests(program: str, tests: Tests, limits: CodeLimits) -> Outcome:
    """Runs a program on its tests, one after the other, until a test fails.

    Each test runs in a new process, which cannot see the other tests.

    Args:
        program: Python source of the program.
        tests: tests of the question.
        limits: limits for the program.

    Raises:
        SandboxError: the sandbox failed for a reason other than the program.
        UserError: this machine has no means of isolation for a sandbox.
    """
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Outcome("error")
    budget = min((limits.test_s + 1) * len(tests.cases) + 5, limits.total_s)
    cheatable = 0
    for case in tests.cases:
        if budget <= 0:
            return Outcome("time", cheatable)
        start, seconds = time.monotonic(), min(limits.test_s, budget)
        outcome = await _run_case(program, tests, case, seconds, limits)
        cheatable += outcome.cheatable
        if outcome.why:
            return Outcome(outcome.why, cheatable)
        # A passed test used at most its limit; the rest of the time it waited for a busy machine.
        budget -= min(time.monotonic() - start, limits.test_s + 1)
    return Outcome("", cheatable)


async def _run_case(
    program: str, tests: Tests, case: Case, seconds: float, limits: CodeLimits
) -> Outcome:
    """Runs one test."""
    job = _isolation().job(_limits(case, seconds, limits), _directories(limits.libraries))
    if case.kind != "assert":
        return Outcome(await _run_together(program, tests, case, seconds, job))
    parts = separate(case.given, tests.entry, tests.prefix, _STAR, program)
    if parts is not None:
        outcome = await _run_apart(parts, tests, program, seconds, job)
        if outcome is not None:
            return outcome
    return Outcome(await _run_together(program, tests, case, seconds, job), 1)


def _limits(case: Case, seconds: float, limits: CodeLimits) -> Limits:
    # Time in which the program waits for a busy machine does not count.
    return Limits(
        wall_s=seconds,
        cpu_s=seconds,
        memory_mb=limits.memory_mb,
        output_bytes=max(Limits.output_bytes, 8 * len(case.expected)),  # 4 bytes per character
        starved_s=seconds,
    )


async def _run_apart(
    parts: Separate, tests: Tests, program: str, seconds: float, job: Job
) -> Outcome | None:
    """Runs an assertion apart from the program; None if the assertion needs an object."""
    # The process of the assertion waits for the process of the program.
    patient = dataclasses.replace(job.limits, wall_s=2 * seconds + 1)
    ours = dataclasses.replace(job, limits=patient)
    setup = _PRELUDE + tests.prefix
    verdict, result = await run_separate(parts, setup, program, ours, job)
    if verdict == "object":
        return None
    if verdict in ("pass", "changed"):
        return Outcome("", int(parts.cheatable or (verdict == "changed" and not parts.fixed)))
    why = "output" if verdict == "garbled" else "error"
    if result is not None:
        why = _stop_cause(result, seconds) or "output"
    return Outcome(why, int(parts.cheatable))


def _stop_cause(result: ProgramResult, seconds: float) -> str:
    """Returns why a program did not end by itself without an error; "" if it did."""
    if result.reason != "exit":
        return "time" if result.reason == "wall" else "limit"
    if result.code != 0:
        return "time" if result.cpu_s >= seconds else "error"
    return ""


async def _run_together(program: str, tests: Tests, case: Case, seconds: float, job: Job) -> str:
    """Runs the program and the test in the same process."""
    source, stdin, mark = _PRELUDE + tests.prefix + "\n", case.given, secrets.token_hex(16)
    source += _PROGRAM.format(program)
    if case.kind == "call":
        name = tests.entry.rpartition(".")[2]
        source, stdin = source + _CALL, f"{mark}\n{name}\n{case.given}"
    elif case.kind == "assert":
        end = "\nimport sys as _sys\nprint('\\n' + _sys.stdin.readline().strip(), flush=True)\n"
        source, stdin = f"{source}\n{case.given}{end}", f"{mark}\n"
    result = await run(job, source, stdin, 2 * len(case.expected) + (1 << 16))
    return _stop_cause(result, seconds) or ("" if _passes(result, tests, case, mark) else "output")


@functools.cache
def _isolation() -> Isolation:
    return isolation_here()


@functools.cache
def _directories(libraries: tuple[str, ...]) -> tuple[str, ...]:
    return find_libraries(libraries, _isolation().interpreter).directories


def _passes(result: ProgramResult, tests: Tests, case: Case, mark: str) -> bool:
    printed = result.stdout
    if case.kind == "stdin":
        if printed.length > len(printed.head):
            return False  # the output is much longer than the expected output
        same = same_lines if tests.compare == "lines" else same_tokens
        return same(printed.head, case.expected)
    # The program may print output of its own before the result, which follows the random mark.
    last = printed.tail.rstrip("\n").rpartition("\n")[2]
    if not last.startswith(mark):
        return False
    return case.kind == "assert" or _same_json(last[len(mark) :], case.expected)


def _same_json(actual: str, expected: str) -> bool:
    try:
        return bool(json.loads(actual) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def same_lines(given: str, expected: str) -> bool:
    """Returns whether an output is right by the rules of LiveCodeBench.

    Both texts must have the same number of lines. Two lines are equal if their texts are equal
    apart from spaces at both ends, or if they contain the same numbers.

    Args:
        given: output of the program.
        expected: expected output.
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
    """Returns whether an output is right by the rules of CodeContests.

    Both texts must have the same words in the same order. Line breaks and case are ignored. Numbers
    are equal if they differ by less than 1e-5, except that integers must have the same value.

    Args:
        given: output of the program.
        expected: expected output.
    """
    ours, theirs = given.lower().split(), expected.lower().split()
    return len(ours) == len(theirs) and all(map(_is_close, ours, theirs))


def _is_close(a: str, b: str) -> bool:
    if a == b:
        return True
    try:
        if _WHOLE.fullmatch(a) and _WHOLE.fullmatch(b):
            return decimal.Decimal(a) == decimal.Decimal(b)
        return abs(float(a) - float(b)) < 1e-5
    except ValueError:
        return False
