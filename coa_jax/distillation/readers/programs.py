"""Analyses the Python programs of a CodeAgent, which ask an agent, answer or compute.

In smolagents and OAgents, the manager writes its actions as programs. A program that asks a managed
agent is replaced by the calls of this agent. A program that only formulates and returns the answer
is not a tool call. A program that is a single call of a tool becomes the call of this tool. Every
other program becomes a call of the code tool. A call of the code tool can use neither tools of the
other framework nor values that no program made. If a program uses such a tool or value, the record
is rejected.

The interpreter of smolagents provides some functions of `math` without an import. Python does not,
so the import is added to programs that use these functions.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any

from coa_jax.distillation.readers.base import Conversation, Field, Malformed
from coa_jax.distillation.readers.tool_calls import is_tool
from coa_jax.protocol import format_code

_GLUE = frozenset({"print", "final_answer", "str", "repr", "len", "format"})
_WORK = (
    *(ast.BinOp, ast.AugAssign, ast.Compare, ast.BoolOp, ast.If, ast.IfExp, ast.Match, ast.While),
    *(ast.Import, ast.ImportFrom, ast.SetComp, ast.DictComp, ast.Lambda),
    *(ast.FunctionDef, ast.ClassDef),
)
_WORDING = (ast.For, ast.ListComp, ast.GeneratorExp, ast.Subscript, ast.FormattedValue)
"""Operations that, in requests and answers, only formulate text or pass on known values."""

_PASSING = frozenset(
    {"append", "extend", "format", "items", "join", "strip", "enumerate", "zip", "list"}
)
_MATH = frozenset(
    {"acos", "asin", "atan", "atan2", "ceil", "cos", "degrees"}
    | {"exp", "floor", "log", "radians", "sin", "sqrt", "tan"}
)
"""Functions that the interpreter of smolagents adds to those of Python (`BASE_PYTHON_TOOLS`).
"""

_UNDEFINED = re.compile(r"not defined|not among|forbidden function", re.IGNORECASE)
_LAST = r"\n?Last output from code snippet:\n"
_PRINTED = re.compile(rf"Execution logs:\n(.*?)(?:{_LAST}None\s*)?", re.DOTALL)
_KEPT = re.compile(rf"Execution logs:\n(.*?)(?:{_LAST}(.*))?", re.DOTALL)
_FENCE = re.compile(r"\n?\s*(?:Code:\s*)?(?:```|<code>).*\Z", re.DOTALL)
_HEAD = re.compile(r"\A\s*Thoughts?:\s*")


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The analysis of the Python program that an agent wrote in one step.

    Attributes:
        source: source of the program.
        requests: pairs (agent, task), one for each call of a managed agent (an agent that the
            program calls as a function), in the order of the source. The task is None if it is not
            a literal.
        adds: whether the program computes something or calls a tool. Calls of agents do not count,
            nor do operations that only word a task or an answer, such as loops and f-strings.
        computes: whether the program must be run to know its output: ``adds`` is true, or the
            program uses loops or f-strings and does not call `final_answer`.
        unknown: names that the program uses without a definition in the program, in an earlier
            program of the run or in the interpreter. They are names of tools, of agents whose runs
            are not in the file, or of values given to the run.
        maths: functions of `math` that the program uses without an import.
        prints: whether the program calls `print`.
        call: tool and arguments if the program consists of a single call of an unknown name with
            literal arguments, whose result it prints or stores; None otherwise.
        binds: names that the program defines.
    """

    source: str
    requests: tuple[tuple[str, str | None], ...]
    computes: bool
    adds: bool = True
    unknown: tuple[str, ...] = ()
    maths: tuple[str, ...] = ()
    prints: bool = False
    call: tuple[str, Any] | None = None
    binds: frozenset[str] = frozenset()


def function_of(call: Field) -> tuple[str, Field]:
    """Returns the name and the arguments of a tool call in the format of OpenAI's API."""
    function = call["function"]
    return function["name"].text(), function["arguments"]


def error_of(step: Field) -> str:
    """Returns the error message of an agent's step; "" if the step has no error."""
    error = step.get("error")
    return error.get("message").optional_text() if error else ""


def examine(source: str, agents: Collection[str], known: Collection[str] = ()) -> StepProgram:
    """Analyses a program without running it; if parsing fails, ``computes`` is True.

    Args:
        source: source of the program.
        agents: names of the agents that the program can call as functions.
        known: names that earlier programs of the run define.
    """
    try:
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return StepProgram(source, (), True)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [node.func.id if isinstance(node.func, ast.Name) else "" for node in calls]
    agent_calls = [node for name, node in zip(names, calls, strict=True) if name in agents]
    binds, used = _bound_names(nodes), [node for node in nodes if isinstance(node, ast.Name)]
    read = {node.id for node in used if isinstance(node.ctx, ast.Load)}
    defined = {*binds, *known, *agents, *dir(builtins), "final_answer"}
    missing = [] if "*" in {*binds, *known} else sorted(read - defined)
    unknown = tuple(name for name in missing if name not in _MATH)
    roots = {_root(node.func) for node in calls}
    adds = _computes(nodes, agent_calls) or any(name in roots or is_tool(name) for name in unknown)
    computes = adds
    if "final_answer" not in names:
        computes = any(name not in _GLUE and name not in agents for name in names)
        computes = computes or any(
            _is_computation(node) or isinstance(node, _WORDING) for node in nodes
        )
    elif not adds:
        unknown = ()  # the file itself contains the answer
    return StepProgram(
        source,
        requests=tuple((_root(node.func), _task(node)) for node in agent_calls),
        computes=computes or "*" in binds,
        adds=adds,
        unknown=unknown,
        maths=tuple(name for name in missing if name in _MATH),
        prints="print" in names,
        call=_only_call(tree, unknown),
        binds=binds,
    )


def examine_all(sources: Iterable[str | None], agents: Collection[str]) -> list[StepProgram | None]:
    """Analyses the programs of a run; a program can use names that earlier programs define.

    Args:
        sources: source of each step's program; None for a step without a program.
        agents: names of the agents that programs can call as functions.
    """
    defined: set[str] = set()
    programs: list[StepProgram | None] = []
    for source in sources:
        program = None if source is None else examine(source, agents, defined)
        defined.update(() if program is None else program.binds)
        programs.append(program)
    return programs


def outcome_of(step: Field) -> tuple[str, str]:
    """Returns (output, error message) of an agent's step; "" for what the step lacks."""
    return step.get("observations").optional_text(), error_of(step)


def add_step(talk: Conversation, step: Field, program: StepProgram, thought: str) -> None:
    """Adds a step to a conversation; the program of the step must not ask an agent.

    If the program only calls a tool, the step becomes a call of this tool. If the program computes
    something, the step becomes a call of ``code``. Otherwise only its thought is added.

    Args:
        talk: conversation to which the messages are added.
        step: the step with its output and its error.
        program: analysis of the step's program.
        thought: text before the program.

    Raises:
        Malformed: the program uses a name that no program defined, such as that of a tool, and does
            more than a single call of it.
    """
    output, error = outcome_of(step)
    tool = _tool_call(program, error, str(step))
    if tool is None and not program.computes:
        talk.add_thought(thought)
        return
    name, arguments = tool or ("code", format_code(runnable(program).strip("\n")))
    returned = _call_result(output, program.prints) if tool else output
    talk.call(name, arguments, "\n".join(filter(None, (returned, error))), not error, thought)


def runnable(program: StepProgram) -> str:
    """Returns a program's source as plain Python, with `print` in place of `final_answer`.

    An import of the `math` functions that the program lacks is added.
    """
    source = _printing(program.source)
    if not program.maths:
        return source
    return f"from math import {', '.join(program.maths)}\n{source.lstrip()}"


def _printing(source: str) -> str:
    """Replaces calls of `final_answer` by calls of `print`."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    lines = [line.encode() for line in source.split("\n")]  # columns of `ast` count bytes
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_answer(node.func)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        for keyword in reversed(call.keywords):
            if keyword.arg and keyword.lineno == keyword.value.lineno:
                line = lines[keyword.lineno - 1]
                head, tail = line[: keyword.col_offset], line[keyword.value.col_offset :]
                lines[keyword.lineno - 1] = head + tail
        line, start, end = lines[call.lineno - 1], call.col_offset, call.func.end_col_offset
        lines[call.lineno - 1] = line[:start] + b"print" + line[end:]
    return b"\n".join(lines).decode()


def _is_answer(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "final_answer"


def _tool_call(program: StepProgram, error: str, where: str) -> tuple[str, Any] | None:
    """Returns (name, arguments) of the tool that a program calls; None if it calls no tool.

    Args:
        program: analysis of the program.
        error: error of the step. A name that the error reports as undefined is not a tool.
        where: name of the step, used in error messages.

    Raises:
        Malformed: the program uses something whose result cannot be separated from its output.
    """
    unknown = [n for n in program.unknown if not (n in error and _UNDEFINED.search(error))]
    if not unknown:
        return None
    if program.call is None:
        raise Malformed(
            f"{where} uses {unknown[0]!r}, a tool or agent whose call the file lacks, or a value "
            "that no program made"
        )
    return program.call


def _call_result(observation: str, prints: bool) -> str:
    """Extracts the result of a program's only call from the formatted output of the step."""
    # The result may itself contain the line that announces the last output. If the program prints,
    # the last output is None, the value of `print`, at the end of the text. If the program only
    # stores the result, there are no logs.
    match = (_PRINTED if prints else _KEPT).fullmatch(observation)
    if match is None:
        return observation
    return (match[1] if prints or match[2] is None else match[2]).strip()


def _is_computation(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.operand, ast.Constant)  # -1 is a number
    return isinstance(node, _WORK)


def _is_text(node: ast.AST) -> bool:
    """Returns whether an addition concatenates strings, with a literal on at least one side."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return False
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        or _is_text(side)
        for side in (node.left, node.right)
    )


def _computes(nodes: Collection[ast.AST], requests: Collection[ast.Call]) -> bool:
    inside = {inner for request in requests for inner in ast.walk(request)}
    for node in nodes:
        if node in inside:
            continue
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else _root(node.func)
            if name not in _GLUE and name not in _PASSING:
                return True
        elif _is_computation(node) and not _is_text(node):
            return True
    return False


def _bound_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.MatchMapping(rest=str(name)):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case object(name=str(name)):  # functions, classes, exceptions and patterns
                names.add(name)
    return frozenset(names)


def _root(function: ast.AST) -> str:
    """Returns the first name of a call: ``search`` for ``search.run(...)``; "" if there is none."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _only_call(tree: ast.Module, unknown: Collection[str]) -> tuple[str, Any] | None:
    match tree.body:
        case [ast.Expr(ast.Call(ast.Name("print"), [ast.Call() as call], []))]:
            pass
        case [ast.Expr(ast.Call() as call)] | [ast.Assign([ast.Name()], ast.Call() as call)]:
            pass
        case [
            ast.Assign([ast.Name(name)], ast.Call() as call),
            ast.Expr(ast.Call(ast.Name("print"), [ast.Name(shown)], [])),
        ] if name == shown:
            pass
        case _:
            return None
    if not isinstance(call.func, ast.Name) or call.func.id not in unknown:
        return None
    values = _literals([*call.args, *(keyword.value for keyword in call.keywords)])
    names = [keyword.arg for keyword in call.keywords]
    if values is None or None in names or len(call.args) + bool(names) != 1:
        return None
    return call.func.id, dict(zip(names, values, strict=True)) if names else values[0]


def _task(call: ast.Call) -> str | None:
    arguments = call.args[:1] or [k.value for k in call.keywords if k.arg in ("task", "request")]
    values = _literals(arguments[:1])
    return values[0] if values and isinstance(values[0], str) else None


def _literals(nodes: Iterable[ast.expr]) -> list[Any] | None:
    """Returns the values of expressions; None unless all expressions are literals."""
    try:
        return [ast.literal_eval(node) for node in nodes]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def thought_of(output: str) -> str:
    """Returns the thought in the output of an agent's step: the text before the program."""
    return _HEAD.sub("", _FENCE.sub("", output)).strip()


_PREFACE = re.compile(r"^Here (?:are|is) [^\n]*:\s*?\n?```\w*\n", re.IGNORECASE | re.MULTILINE)
_PLAN_HEAD = re.compile(r"^#+\s*(?:\d+\.?)*\s*(?:step-by-step\s+)?plan\b[^\n]*$", re.I | re.M)
_FACT_HEAD = re.compile(r"^#+\s*(?:\d+\.?)*\s*(?:updated\s+)?facts survey[^\n]*\n?", re.I | re.M)


def unwrap(text: str) -> str:
    """Removes the text that some models write around a plan or a survey of facts.

    This text is a preface such as "Here is the plan:", a code fence, and the mark
    ``<end_plan>``.
    """
    text = text.strip()
    prefaces = list(_PREFACE.finditer(text))
    if prefaces and text.endswith("```"):
        text = text[prefaces[-1].end() : -3]
    elif text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") : -3]
    return text.replace("<end_plan>", "").strip()


def split_plan(text: str) -> tuple[str, str]:
    """Splits the text of a planning step into (survey of facts, plan) at the heading of the plan.

    If the text has no heading of the plan, the survey is "" and the whole text is the plan.
    """
    text = unwrap(text)
    headings = list(_PLAN_HEAD.finditer(text))
    if not headings:
        return "", text
    facts = _FACT_HEAD.sub("", text[: headings[-1].start()]).strip()
    plan = text[headings[-1].end() :].strip()
    return (facts, plan) if plan else ("", text)
