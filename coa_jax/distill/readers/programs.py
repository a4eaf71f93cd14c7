"""What the Python code of a CodeAgent's step does: ask an agent, answer, or compute.

smolagents and OAgents let the manager write its actions as programs.  A program that asks a
managed agent is glue: the agent's own calls stand for it.  A program that only hands the answer
over is no tool call either.  Everything else is a call of the code tool.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Collection

_GLUE = frozenset({"print", "final_answer", "str", "repr", "len", "format"})
_FENCE = re.compile(r"\n?\s*(?:Code:\s*)?(?:```|<code>).*\Z", re.DOTALL)
_HEAD = re.compile(r"\A\s*Thoughts?:\s*")


@dataclasses.dataclass(frozen=True)
class Program:
    """A step's program, looked at from outside.

    Attributes:
        requests: for each call of a managed agent, in the order of the text: (agent, its task, or
            None where the task is not a literal).
        computes: whether it calls anything besides agents, `print` and `final_answer`, or holds an
            operation, so that its output is not already known.
        answers: whether it calls `final_answer`.
    """

    requests: tuple[tuple[str, str | None], ...]
    computes: bool
    answers: bool


def examine(source: str, agents: Collection[str]) -> Program:
    """Looks at a program without running it; one that does not parse computes.

    Args:
        source: Python.
        agents: names under which managed agents are called.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Program((), True, False)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [node.func.id if isinstance(node.func, ast.Name) else "" for node in calls]
    requests = tuple(
        (name, _task(node)) for name, node in zip(names, calls, strict=True) if name in agents
    )
    work = (ast.BinOp, ast.For, ast.While, ast.ListComp, ast.Import, ast.ImportFrom, ast.Subscript)
    computes = any(name not in _GLUE and name not in agents for name in names)
    computes = computes or any(isinstance(node, work) for node in ast.walk(tree))
    return Program(requests, computes, "final_answer" in names)


def _task(call: ast.Call) -> str | None:
    given = call.args[:1] or [k.value for k in call.keywords if k.arg in ("task", "request")]
    if not given:
        return None
    try:
        value = ast.literal_eval(given[0])
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, str) else None


def thought_of(output: str) -> str:
    """The words of a step before its program."""
    return _HEAD.sub("", _FENCE.sub("", output)).strip()


_PREFACE = re.compile(r"^Here (?:are|is) [^\n]*:\s*?\n?```\w*\n", re.IGNORECASE | re.MULTILINE)
_PLAN_HEAD = re.compile(r"^#+\s*(?:\d+\.?)*\s*(?:step-by-step\s+)?plan\b[^\n]*$", re.I | re.M)
_FACT_HEAD = re.compile(r"^#+\s*(?:\d+\.?)*\s*(?:updated\s+)?facts survey[^\n]*\n?", re.I | re.M)


def unwrap(text: str) -> str:
    """A plan or a survey of facts without the preface, the fence and the end mark around it."""
    text = text.strip()
    prefaces = list(_PREFACE.finditer(text))
    if prefaces and text.endswith("```"):
        text = text[prefaces[-1].end() : -3]
    elif text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") : -3]
    return text.replace("<end_plan>", "").strip()


def split_plan(text: str) -> tuple[str, str]:
    """(survey of facts or "", plan) of a planning step that holds both under headings."""
    text = unwrap(text)
    found = list(_PLAN_HEAD.finditer(text))
    if not found:
        return "", text
    facts = _FACT_HEAD.sub("", text[: found[-1].start()]).strip()
    plan = text[found[-1].end() :].strip()
    return (facts, plan) if plan else ("", text)
