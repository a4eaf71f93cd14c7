"""Runs assertions and the programs that they test in separate, connected processes.

Both processes run in the sandbox. The program sees the arguments of its functions, and returns
values. It sees neither the text of the assertion nor the expected results, and cannot change how
they are compared, see `coa_jax.tasks.assertion_process`.

Whether a program can pass an assertion by cheating should depend on the assertion alone, because
otherwise a program could choose a test that it can pass in this way. The part ``cheatable`` of a
reward therefore counts the tests in which a program has a choice.
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
from coa_jax.tasks import assertion_process

_BUILTINS = frozenset(dir(builtins))
_EXCEPTIONS = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
)
_ALIASES = {"np": "numpy", "pd": "pandas"}
_LITERAL = frozenset(
    name
    for kind in (int, float, str, list, BaseException, *assertion_process._TYPES)
    for name in dir(kind)
)
"""Names of the attributes of values."""
_SHARED = frozenset(
    {"eval", "exec", "compile", "globals", "locals", "vars", "setattr", "delattr", "open", "input"}
    | {"__import__", "asyncio", "threading", "multiprocessing", "subprocess", "inspect", "gc", "os"}
    | {"patch", "mock", "redirect_stdout", "redirect_stderr", "stdout", "stderr", "stdin", "seed"}
    | {"pathlib", "tempfile", "importlib", "modules", "types", "Generator", "Coroutine"}
)
"""Names with which an assertion reaches into the process that executes the assertion."""

_START = "\n_crossing = {{}}\nexec(compile({!r}, '<crossing>', 'exec'), _crossing)\n"
_START += "_crossing.pop({!r})(globals(), *{!r})\n"


@dataclasses.dataclass(frozen=True)
class Separate:
    """An assertion that can run in a process of its own, apart from the program that it tests.

    Attributes:
        source: source of the assertion.
        stubs: name in the assertion -> expression for a function of the program.
        modules: name in the assertion -> module that the assertion uses without an import.
        cheatable: whether the program could pass by cheating, because it chooses the function under
            test or supplies further functions, such as a comparison that is always true.
        fixed: whether each comparison is between one result or argument and a constant. A program
            then cannot pass by changing its arguments.
    """

    source: str
    stubs: dict[str, str]
    modules: dict[str, str]
    cheatable: bool
    fixed: bool


def separate(
    test: str, entry: str, setup: str, modules: Iterable[str], program: str
) -> Separate | None:
    """Prepares an assertion to run in another process than the program that it tests.

    The program can then neither read the expected results nor change the comparisons.

    Args:
        test: source of the assertion.
        entry: expression for the function under test, such as ``Solution().add``; "" if the
            assertion names it.
        setup: source that runs before the assertion, without the star imports.
        modules: modules from which all names are imported before the assertion.
        program: source of the program.

    Returns:
        The assertion; None if it must run in the process of the program, for example because it
        uses attributes of an object of the program.
    """
    try:
        tree, before = ast.parse(test), ast.parse(setup)
        assigned = _module_names(test, "assigned") | _module_names(setup, "assigned")
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
    # The function under test may have the name of a function of the standard library.
    candidates = set() if names else used - (roots & set(modules) - called) - _EXCEPTIONS
    if len(candidates) > 1:  # the program decides which of them is meant
        defined = _defined(program) & candidates & called
        names = defined - _BUILTINS or defined
    elif candidates <= called:
        names = names or candidates
    if not names:
        return None
    stubs = {name: name for name in names}
    tree = _Methods(stubs).visit(tree)
    known_roots = imported | _BUILTINS | set(aliases) | _imports(tree) | _imports(before)
    if _needs_object(tree, list(_reachable(tree, before)), set(stubs), known_roots):
        return None
    stubs = {name: function for name, function in stubs.items() if name in _ids(tree)}
    cheatable = len(stubs) != 1 or len(candidates) > 1
    return Separate(ast.unparse(tree), stubs, aliases, cheatable, _is_fixed(tree.body, set(stubs)))


def _defined(program: str) -> set[str]:
    try:
        return _module_names(program, "assigned")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


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


def _is_fixed(body: list[ast.stmt], stubs: set[str]) -> bool:
    """Returns whether each comparison is one of a constant with an argument or a result."""
    stubs = stubs | {part.name for part in body if isinstance(part, ast.FunctionDef)}

    def calls(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and getattr(node.func, "id", "") in stubs

    def is_constant(node: ast.expr) -> bool:
        return not any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(node))

    def compares(test: ast.expr) -> bool:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return all(map(compares, test.values))
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
            return False
        sides = [test.left, *test.comparators]
        others = [side for side in sides if not is_constant(side)]
        alone = len(sides) == 2 and len(others) == 1
        return alone and (isinstance(others[0], ast.Name) or calls(others[0]))

    def fixed(part: ast.stmt) -> bool:
        if isinstance(part, ast.FunctionDef):
            return _is_fixed(part.body, stubs | {argument.arg for argument in part.args.args})
        if isinstance(part, ast.Assert):
            return compares(part.test)
        if isinstance(part, ast.Assign | ast.Expr):
            return calls(part.value) or is_constant(part.value)
        return False

    return all(map(fixed, body))


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
        assertion: a check that must run apart from the program.
        setup: source that runs before the assertion and before the program.
        program: source of the program.
        ours: sandbox job that runs the assertion.
        theirs: sandbox job that runs the program.

    Returns:
        (verdict, result). The verdict is one of `coa_jax.tasks.assertion_process.judge`, or
        ``stopped`` if the process of the assertion ended without a verdict, for example at a limit.
        The result tells how a process ended: with ``stopped``, the process of the assertion; with
        ``gone``, the process of the program. With every other verdict, the result is None.

    Raises:
        SandboxError: the sandbox failed for a reason other than the program.
    """
    mark, text = secrets.token_hex(16), inspect.getsource(assertion_process)
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
