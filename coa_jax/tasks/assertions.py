"""Runs assertions in a process of their own, which calls the functions of a program in another.

Both processes run in the sandbox. The program sees the arguments of its functions, and returns
values. It sees neither the text of the assertion nor the expected results, and cannot change how
they are compared, see `coa_jax.tasks.crossing`.

Whether an assertion can be separated from the program should depend on the assertion alone.
Otherwise, a program could choose the kind of test that it can pass by cheating. One choice is left:
a program that does not define the tested function, if this has the name of a function of the
standard library, runs together with the assertion.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import dataclasses
import importlib
import inspect
import os
import secrets
import symtable
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any

from coa_jax.sandbox.limits import Job
from coa_jax.sandbox.run import ProgramResult, run
from coa_jax.tasks import crossing

_BUILTINS = frozenset(dir(builtins))
_ALIASES = {"np": "numpy", "pd": "pandas"}
_LITERAL = frozenset(
    name for kind in (int, float, str, list, BaseException, *crossing._TYPES) for name in dir(kind)
)
"""Names of the attributes of values."""
_SHARED = frozenset(
    {"eval", "exec", "compile", "globals", "locals", "vars", "setattr", "delattr", "open", "input"}
    | {"__import__", "asyncio", "threading", "multiprocessing", "subprocess", "inspect", "gc", "os"}
    | {"patch", "mock", "redirect_stdout", "redirect_stderr", "stdout", "stderr", "stdin", "seed"}
    | {"pathlib", "tempfile", "importlib", "modules"}
)
"""Names with which an assertion reaches into the process that executes the assertion."""

_START = "\n_crossing = {{}}\nexec(compile({!r}, '<crossing>', 'exec'), _crossing)\n"
_START += "_crossing.pop({!r})(globals(), *{!r})\n"


@dataclasses.dataclass(frozen=True)
class Separate:
    """An assertion that can run apart from the program.

    Attributes:
        source: source of the assertion.
        stubs: name in the assertion -> expression for a function of the program.
        modules: name in the assertion -> module that the assertion uses without an import.
    """

    source: str
    stubs: dict[str, str]
    modules: dict[str, str]

    @property
    def cheatable(self) -> bool:
        """Whether the program supplies more than the function under test, such as a comparison."""
        return len(self.stubs) != 1


def separate(
    test: str, entry: str, setup: str, modules: Iterable[str], program: str
) -> Separate | None:
    """Separates an assertion from the program.

    Args:
        test: source of the assertion.
        entry: expression for the function under test, such as ``Solution().add``; "" if the
            assertion names it.
        setup: source that runs before the assertion, without the star imports.
        modules: modules from which all names are imported before the assertion.
        program: source of the program.

    Returns:
        The assertion; None if it must run in the process of the program.
    """
    try:
        tree, before = ast.parse(test), ast.parse(setup)
        assigned = _module_names(test, "assigned") | _module_names(setup, "assigned")
        defined = _module_names(program, "assigned")
        used = _module_names(test, "used") - assigned
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    imported = {name for module in modules for name in _public_names(module)} | set(modules)
    nodes = list(_reachable(tree, before))
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    values = [n.value for n in nodes if isinstance(n, ast.Attribute)]
    roots = {value.id for value in values if isinstance(value, ast.Name)}
    names = {name for name in used if name not in imported | _BUILTINS}
    aliases = {n: _ALIASES.get(n, n) for n in names & roots - called if _is_module(n)}
    names -= set(aliases)
    if entry:
        names.add(_root_name(entry))
    for others in (imported - _BUILTINS, _BUILTINS):
        # The function under test may have the name of a function of the standard library.
        names = names or used & others & defined & called
    if not names:
        return None
    stubs = {name: name for name in names}
    tree = _Methods(stubs).visit(tree)
    known_roots = imported | _BUILTINS | set(aliases) | _imports(tree) | _imports(before)
    if _needs_object(tree, list(_reachable(tree, before)), set(stubs), known_roots):
        return None
    return Separate(ast.unparse(tree), {k: v for k, v in stubs.items() if k in _ids(tree)}, aliases)


def _module_names(source: str, kind: str) -> set[str]:
    """Returns the global names that a source assigns or uses."""
    tables = [symtable.symtable(source, "<test>", "exec")]
    if kind == "assigned":
        symbols = tables[0].get_symbols()
        return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    used = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                used.add(symbol.get_name())
    return used


def _public_names(module: str) -> list[str]:
    imported = importlib.import_module(module)
    return getattr(imported, "__all__", None) or [n for n in dir(imported) if not n.startswith("_")]


def _reachable(tree: ast.AST, before: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes of an assertion, and of the functions and classes of ``before`` it uses."""
    functions = {
        part.name: part
        for part in before.body
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    todo = [tree]
    while todo:
        for node in ast.walk(todo.pop()):
            yield node
            if isinstance(node, ast.Name) and node.id in functions:
                todo.append(functions.pop(node.id))


def _is_module(name: str) -> bool:
    return name in sys.stdlib_module_names or name in _ALIASES or name in _ALIASES.values()


def _root_name(expression: str) -> str:
    return next((n.id for n in ast.walk(ast.parse(expression)) if isinstance(n, ast.Name)), "")


def _ids(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _imports(tree: ast.AST) -> set[str]:
    statements = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(a.asname or a.name).partition(".")[0] for n in statements for a in n.names}


class _Methods(ast.NodeTransformer):
    """Replaces methods of new objects, such as ``Solution().add``, by names of stubs."""

    def __init__(self, stubs: dict[str, str]) -> None:
        self.stubs = stubs

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        made = node.value
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name):
            return self.generic_visit(node)
        if made.func.id not in self.stubs or made.args or made.keywords:
            return self.generic_visit(node)
        name = f"_{made.func.id}_{node.attr}"
        self.stubs[name] = ast.unparse(node)
        return ast.copy_location(ast.Name(name, node.ctx), node)


def _needs_object(tree: ast.AST, nodes: list[ast.AST], stubs: set[str], modules: set[str]) -> bool:
    """Returns whether an assertion needs more of a program than values.

    Args:
        tree: the assertion.
        nodes: nodes of the assertion, and of the functions that it uses.
        stubs: names of the functions of the program.
        modules: names with attributes that do not belong to the program.
    """
    proper = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    local = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    classes = any(name[:1].isupper() and name in _ids(tree) for name in stubs)
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in _SHARED - local:
            return True
        if isinstance(node, ast.Attribute):
            root: ast.AST = node
            while isinstance(root, ast.Attribute):
                root = root.value
            outside = isinstance(root, ast.Name) and root.id in modules
            if node.attr in _SHARED or (not outside and (classes or node.attr not in _LITERAL)):
                return True
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await):
            return True
        elif isinstance(node, ast.Import | ast.ImportFrom):
            parts = [*(a.name for a in node.names), getattr(node, "module", "") or ""]
            if _SHARED & {word for part in parts for word in part.split(".")}:
                return True
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            if not _ids(node.type) <= _BUILTINS:
                return True
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            inner = [n for part in (*node.args, *node.keywords) for n in ast.walk(part)]
            if name in stubs and any(isinstance(n, ast.Lambda) for n in inner):
                return True
            if name not in ("isinstance", "issubclass", "type", "getattr", "hasattr"):
                proper |= {id(n) for n in node.args}
        elif isinstance(node, ast.Assign | ast.keyword):
            proper.add(id(node.value))
    return any(isinstance(n, ast.Name) and n.id in stubs and id(n) not in proper for n in nodes)


@contextlib.asynccontextmanager
async def _running_program(
    work: Coroutine[Any, Any, ProgramResult],
) -> AsyncIterator[asyncio.Task[ProgramResult]]:
    """Runs a program in the background, and kills the program at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def run_separate(
    assertion: Separate, setup: str, program: str, ours: Job, theirs: Job
) -> tuple[str, ProgramResult | None]:
    """Runs an assertion and the program in two connected processes.

    Args:
        assertion: the assertion.
        setup: source that runs before the assertion and before the program.
        program: source of the program.
        ours: job of the assertion.
        theirs: job of the program.

    Returns:
        The verdict, see `coa_jax.tasks.crossing.judge`, or ``stopped`` if the assertion itself
        reached a limit; and the result of the process that ended the test, which is None if the
        verdict does not depend on it.

    Raises:
        SandboxError: the sandbox failed for a reason other than the program.
    """
    mark, text = secrets.token_hex(16), inspect.getsource(crossing)
    arguments = (setup, assertion.source, assertion.stubs, assertion.modules, mark)
    requests, answers = os.pipe(), os.pipe()
    judge = _START.format(text, "judge", arguments)
    serve = _START.format(text, "serve", (setup, program))
    async with _running_program(run(theirs, serve, streams=(requests[0], answers[1]))) as served:
        judged = await run(ours, judge, streams=(answers[0], requests[1]))
        last = judged.stderr.tail.rstrip("\n").rpartition("\n")[2]
        if not last.startswith(mark):
            return "stopped", judged
        verdict = last.removeprefix(mark)
        return verdict, await served if verdict == "gone" else None
