"""The order of the rooms and the declared dependencies hold."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import coa_jax

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "coa_jax"

# A room may import the rooms above it and itself.  Rooms of one line do not know each other.
# A module of the package that is not named here is an entry point and may import anything.
ROOMS = (
    ("errors",),
    ("reading",),
    ("bounds", "files", "installed", "intervals", "markdown", "overrides", "progress"),
    ("extensions",),
    ("storage",),
    ("parallel",),
    ("event_file", "wandb_run", "cli", "jsonl", "settings", "shards"),
    ("protocol",),
    ("run_dir", "web"),
    ("trajectory",),
    ("records",),
    ("model",),
    ("engine",),
    ("tools",),
    ("tasks",),
    ("environments",),
    ("rollout",),
    ("serve",),
    ("agents",),
    ("distill",),
    ("learn", "small"),
    ("evaluate", "report", "bench", "aot"),
    ("device",),
    ("api",),
    ("needs",),
    ("check",),
)
RANK = {room: rank for rank, line in enumerate(ROOMS) for room in line}


def room_of(path: Path, package: Path) -> str | None:
    """Returns the room of a module, or None for an entry point and for `__init__`."""
    parts = path.relative_to(package).parts
    if path.name == "__main__.py" or parts == ("__init__.py",):
        return None
    if len(parts) > 1:
        return parts[0]
    return path.stem if path.stem in RANK else None


def imports(tree: ast.AST, module: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of everything that a module imports, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module[: len(module) - node.level]) if node.level else ""
            base = ".".join(part for part in (base, node.module or "") if part)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def wrong_imports(package: Path) -> list[str]:
    """Lists the imports of a room that go downwards or sideways."""
    found = []
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        if room is None:
            continue
        where = path.relative_to(package)
        if room not in RANK:
            found.append(f"{where}: the room {room} has no place in the order")
            continue
        module = ("coa_jax", *where.with_suffix("").parts)
        for line, name in imports(ast.parse(path.read_text()), module):
            parts = name.split(".")
            if parts[0] != "coa_jax" or parts[1:2] in ([], [room], ["__version__"]):
                continue
            if RANK.get(parts[1], len(ROOMS)) >= RANK[room]:
                found.append(f"{where}:{line}: {room} imports {parts[1]}")
    return found


def test_imports_only_go_upwards():
    assert wrong_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("engine/x.py", "from coa_jax.tasks import Task", "engine/x.py:1: engine imports tasks"),
        ("model/x.py", "def f():\n    import coa_jax.learn", "model/x.py:2: model imports learn"),
        ("tools/x.py", "from coa_jax import rollout", "tools/x.py:1: tools imports rollout"),
        ("tools/x.py", "from ..rollout import a", "tools/x.py:1: tools imports rollout"),
        ("report/x.py", "import coa_jax.evaluate", "report/x.py:1: report imports evaluate"),
        ("learn/x.py", "import coa_jax.sft", "learn/x.py:1: learn imports sft"),
        ("extra/x.py", "", "extra/x.py: the room extra has no place in the order"),
        ("files.py", "import coa_jax.run_dir", "files.py:1: files imports run_dir"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, path, code, fault):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(code + "\n")
    assert wrong_imports(tmp_path) == [fault]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("tasks/x.py", "from coa_jax.tools.base import Tool\nfrom coa_jax.errors import UserError"),
        ("tasks/x.py", "from . import y\nfrom .y import z\nimport numpy"),
        ("tasks/__main__.py", "import coa_jax.learn"),
        ("sft.py", "import coa_jax.learn, coa_jax.rl"),
    ],
)
def test_a_right_import_is_let_pass(tmp_path, path, code):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(code + "\n")
    assert wrong_imports(tmp_path) == []


@pytest.mark.parametrize("module", ["learn.step", "engine.engine", "model.decoder"])
def test_the_compiled_programs_load_only_arrays_and_the_model(module):
    code = (
        f"import sys, coa_jax.{module}\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('coa_jax.')})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    outer = {"storage", "tools", "tasks", "environments", "rollout", "serve", "agents", "web"}
    outer |= {"distill", "records", "run_dir", "settings", "trajectory"}
    assert not outer & set(done.stdout.split())


def test_entry_points_can_be_run_as_modules():
    missing = [
        path.name
        for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__main__.py")]
        if path not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
        and path.stem not in RANK
        and "run_main(" not in path.read_text()
    ]
    assert missing == []


def sources() -> list[Path]:
    return sorted(
        path
        for folder in ("coa_jax", "configs", "launch", "tests")
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    )


def test_nothing_is_left_for_later():
    words = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "raise NotImplemented" + "Error"]))
    left = [str(p.relative_to(REPOSITORY)) for p in sources() if words.search(p.read_text())]
    assert left == []


# --- dependencies --------------------------------------------------------------------------


# Rooms that are there only with their extra; others import them in functions only.
WITH_EXTRA = ("agents", "serve", "web")


def declared() -> tuple[set[str], set[str], set[str]]:
    """Returns the names that setup.py requires: (core, with all extras, with the tests')."""
    tree = ast.parse((REPOSITORY / "setup.py").read_text())
    lists: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            names = (re.match(r"([\w.-]+)(?=\[|>=)", str(text)) for text in texts)
            lists[node.targets[0].id] = {normal(m[1]) for m in names if m}
    core, extras = lists["CORE"], lists["CORE"] | lists["EXTRAS"]
    return core, extras, extras | lists["TEST"] | lists["TEST_JAX"] | lists["LINT"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def third_party(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields (top-level package, whether the import is run with the module) of a module."""
    at_import = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try) or guarded:
            continue
        at_import.add(node)
        todo.extend(ast.iter_child_nodes(node))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in (n.split(".")[0] for n in names):
            if name not in sys.stdlib_module_names and name not in ("coa_jax", "configs"):
                yield name, node in at_import


def test_every_import_of_the_package_is_declared():
    core, everything, _ = declared()
    assert "jax" in core
    assert "gguf" in everything - core
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).parts[0] in WITH_EXTRA
        for name, at_import in third_party(ast.parse(path.read_text())):
            packages = {normal(p) for p in providers.get(name, [name])} | {normal(name)}
            if not packages & (core if at_import and not inside else everything):
                missing.add(f"{path.relative_to(REPOSITORY)}: {name}")
    assert missing == set()


# Declared packages that no module of `coa_jax` imports, and what uses each of them.
USED_BY_OTHERS = {
    "gcsfs": "fsspec, for gs://",
    "s3fs": "fsspec, for s3://",
    "lxml-html-clean": "trafilatura",
    "importlib-resources": "tensorflow-datasets",
    "ipykernel": "nbclient",
    "matplotlib": "notebooks",
    "mkdocs-material": "mkdocs.yml",
    "mkdocstrings-python": "mkdocs.yml",
}
BY_NAME = ("import_module", "find_spec", "files")  # functions that get the name of a package
# Modules that use private names of other packages, and the package whose version has a limit.
PRIVATE = {
    "cli.py": "jax",
    "parallel/processes.py": "jax",
    "storage/arrays.py": "orbax-checkpoint",
    "web/protocol.py": "uvicorn",
}


def imported(root: Path) -> set[str]:
    """Returns the top-level packages that the modules below a folder import, also by name."""
    names = set()
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names |= {name for name, _ in third_party(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                function, name = node.func, node.args[0]
                called = getattr(function, "attr", getattr(function, "id", ""))
                if called in BY_NAME and isinstance(name, ast.Constant):
                    names.add(str(name.value).split(".")[0])
    return names


def test_every_declared_package_is_imported():
    providers = importlib.metadata.packages_distributions()
    names = imported(PACKAGE) | imported(REPOSITORY / "docs") | imported(REPOSITORY / "notebooks")
    packages = {normal(p) for name in names for p in (name, *providers.get(name, []))}
    assert declared()[1] - packages == USED_BY_OTHERS.keys()


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yields the imported modules and names whose path has a part that begins with "_".

    Strings that name such a module count too, and so do the modules below ``uvicorn.protocols``,
    none of which uvicorn documents.
    """
    for node in ast.walk(tree):
        paths = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(\w+\.)+\w+", str(node.value)):
            paths = [str(node.value)]
        for path in paths:
            own = path.startswith(("coa_jax.", "__future__"))
            if not own and re.search(r"\._(?!_)|^uvicorn\.protocols", path):
                yield path


def test_packages_with_private_names_have_a_highest_version():
    found = {
        str(path.relative_to(PACKAGE)): set(map(normal, names))
        for path in PACKAGE.rglob("*.py")
        if (names := {name.split(".")[0] for name in private_names(ast.parse(path.read_text()))})
    }
    assert {file: {package.split("-")[0]} for file, package in PRIVATE.items()} == found
    text = (REPOSITORY / "setup.py").read_text()
    for package in PRIVATE.values():
        assert re.search(rf'"{package}>=[\d.]+,<[\d.]+"', text), package


def test_every_import_of_the_tests_is_declared():
    declared_for_tests = declared()[2]
    providers = importlib.metadata.packages_distributions()
    own = {path.stem for path in (REPOSITORY / "tests").rglob("*")}
    own |= {"setuptools", "tests", "examples"}
    missing = set()
    for path in (REPOSITORY / "tests").rglob("*.py"):
        for name, _ in third_party(ast.parse(path.read_text())):
            packages = {normal(p) for p in providers.get(name, [name])} | {normal(name)}
            if name not in own and not packages & declared_for_tests:
                missing.add(f"{path.relative_to(REPOSITORY)}: {name}")
    assert missing == set()


# --- the package itself --------------------------------------------------------------------


def test_the_version_is_that_of_the_distribution():
    told = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(told, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.split() == [coa_jax.__version__]


def test_exports_are_loaded_from_where_they_are_defined():
    from coa_jax.model import api

    assert coa_jax.load_model is api.load_model
    assert coa_jax.logits is api.logits
    assert coa_jax.save_model is api.save_model
    assert {"load_model", "logits", "save_model"} <= set(dir(coa_jax))


def test_an_unknown_export_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = coa_jax.load_modle
