"""The order of the rooms and the declared dependencies hold."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

import coa_jax
from coa_jax.__main__ import COMMANDS

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "coa_jax"

# A room may import the rooms before it and itself; the sandbox imports itself only.
CORE = (
    "errors", "config", "files", "storage", "parallel", "protocol", "data", "model", "engine",
    "run", "sandbox", "tools", "tasks", "rollout", "distillation", "evaluation", "train", "serve",
    "report", "api", "cli",
)  # fmt: skip
# A wing may import the core and the wings before it.  The core imports no wing.
WINGS = ("demo", "perf", "paper")
RANK = {room: rank for rank, room in enumerate((*CORE, *WINGS))}


def room_of(path: Path, package: Path) -> str | None:
    """Returns the room of a module, or None for the two modules that hand names on."""
    room = path.relative_to(package).parts[0]
    return None if room in ("__init__.py", "__main__.py") else room.removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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
    """Lists the imports of a room that it may not make."""
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
        for line, name in imports(tree_of(path), module):
            parts = name.split(".")
            if parts[0] != "coa_jax" or parts[1:2] in ([], [room]):
                continue
            if room == "sandbox" or RANK.get(parts[1], len(RANK)) >= RANK[room]:
                found.append(f"{where}:{line}: {room} imports {parts[1]}")
    return found


def test_imports_only_go_upwards():
    assert wrong_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("engine/x.py", "from coa_jax.tasks import Task", "engine/x.py:1: engine imports tasks"),
        ("model/x.py", "def f():\n    import coa_jax.train", "model/x.py:2: model imports train"),
        ("tools/x.py", "from coa_jax import rollout", "tools/x.py:1: tools imports rollout"),
        ("tools/x.py", "from ..rollout import a", "tools/x.py:1: tools imports rollout"),
        ("train/x.py", "import coa_jax.serve.app", "train/x.py:1: train imports serve"),
        ("cli/x.py", "import coa_jax.demo.pages", "cli/x.py:1: cli imports demo"),
        ("extra/x.py", "", "extra/x.py: the room extra has no place in the order"),
        ("api/x.py", "import coa_jax.cli.rl", "api/x.py:1: api imports cli"),
        ("sandbox/x.py", "import coa_jax.errors", "sandbox/x.py:1: sandbox imports errors"),
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
        ("cli/sft.py", "import coa_jax.train, coa_jax.api"),
        ("paper/x.py", "import coa_jax.demo.facts, coa_jax.cli.rl"),
    ],
)
def test_a_right_import_is_let_pass(tmp_path, path, code):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(code + "\n")
    assert wrong_imports(tmp_path) == []


# Test files of the core that run the demonstration, and why.
WITH_DEMO = {
    "tests/test_house.py": "names a wrong import",
    "tests/test_configs.py": "checks the config files of all commands",
    "tests/test_full_disk.py": "trains on the files of the command debug-files",
}


def test_tests_of_the_core_have_data_of_their_own():
    leaning = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tests").rglob("*.py")
        if path.relative_to(REPOSITORY / "tests").parts[0] not in WINGS
        and re.search(r"coa_jax\.demo\b|coa_jax import .*\bdemo\b", path.read_text())
    }
    assert leaning == {*WITH_DEMO}


def circles(package: Path) -> list[str]:
    """Lists the modules of a room that import each other, also for typing or in functions."""
    modules = {
        ".".join(parts).removesuffix(".__init__"): (path, parts)
        for path in package.glob("*/**/*.py")
        for parts in [("coa_jax", *path.relative_to(package).with_suffix("").parts)]
    }
    graph: dict[str, set[str]] = {}
    for name, (path, parts) in modules.items():
        imported = [target for _, target in imports(ast.parse(path.read_text()), parts)]
        imported = [t if t in modules else t.rpartition(".")[0] for t in imported]
        room = f"{'.'.join(parts[:2])}."
        graph[name] = {t for t in imported if t in modules and f"{t}.".startswith(room)} - {name}
    while ends := {name for name, others in graph.items() if not others}:
        graph = {name: others - ends for name, others in graph.items() if name not in ends}
    return sorted(f"{name} imports {other}" for name, others in graph.items() for other in others)


def test_inside_a_room_no_module_imports_itself_by_way_of_others():
    assert circles(PACKAGE) == []


def test_a_circle_inside_a_room_is_found(tmp_path):
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "a.py").write_text("def f():\n    from coa_jax.model.deep import b\n")
    (tmp_path / "model" / "deep" / "b.py").write_text("if TYPE:\n    from ..a import f\n")
    (tmp_path / "model" / "c.py").write_text("import coa_jax.engine.a\n")
    expected = ["coa_jax.model.a imports coa_jax.model.deep.b",
                "coa_jax.model.deep.b imports coa_jax.model.a"]  # fmt: skip
    assert circles(tmp_path) == expected


def test_every_room_says_what_belongs_there():
    rooms = {path.parent for path in PACKAGE.glob("*/__init__.py")}
    assert {room.name for room in rooms} | {"errors"} == set(RANK)
    folders = {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    texts = {f: ast.get_docstring(tree_of(f / "__init__.py")) or "" for f in folders}
    assert [f.name for f in folders if not texts[f]] == []
    # A room has a paragraph about its modules and imports below the first line.
    assert [room.name for room in rooms if "\n\n" not in texts[room]] == []


@pytest.mark.parametrize("module", ["train.step", "engine.engine", "model.decoder"])
def test_the_compiled_programs_load_only_arrays_and_the_model(module):
    code = (
        f"import sys, coa_jax.{module}\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('coa_jax.')})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    outer = {"storage", "data", "run", *CORE[CORE.index("sandbox") :], *WINGS}
    assert not (outer - {"train"}) & set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("data.trajectory", ("jax", "fsspec", "coa_jax.storage")),
        ("model.tokenizer", ("jax", "fsspec", "coa_jax.storage")),
    ],
)
def test_texts_and_records_load_neither_jax_nor_buckets(module, absent):
    assert not {*absent} & loaded(module)


def loaded(*modules: str) -> set[str]:
    """Returns the names of all modules in a process that imports some modules of the package."""
    code = (
        f"import sys, {', '.join(f'coa_jax.{module}' for module in modules)}\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*done.stdout.split()}


def modules_of_settings() -> list[str]:
    """Returns the modules of the core that define a class of settings, a subclass of `Bounded`."""
    classes = [
        (path.relative_to(PACKAGE).with_suffix("").parts, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        if room_of(path, PACKAGE) in CORE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]
    names, found = {"Bounded"}, {}
    while more := {
        node: ".".join(parts).removesuffix(".__init__")
        for parts, node in classes
        if node not in found and names & {ast.unparse(b).rpartition(".")[2] for b in node.bases}
    }:
        found |= more
        names |= {node.name for node in more}
    return sorted({*found.values()})


def test_settings_load_neither_jax_nor_clients():
    modules = modules_of_settings()
    assert {"cli.distill", "train.rl_config", "tools.net.chat"} < {*modules}  # also of subclasses
    clients = {"jax", "httpx2", "httpcore2", "httpx", "httpcore", "openai", "mcp"}
    assert not clients & loaded(*modules)


def test_every_command_is_an_entry_point():
    modules = [find_spec(f"coa_jax.{module}") for module in COMMANDS.values()]
    origins = [Path(spec.origin) for spec in modules if spec and spec.origin]
    origins = [o.with_name("__main__.py") if o.name == "__init__.py" else o for o in origins]
    assert len(origins) == len(COMMANDS)
    assert [
        str(o)
        for o in origins
        if "run_main(" not in (text := o.read_text()) and "sys.exit(main())" not in text
    ] == []


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
WITH_EXTRA = ("serve",)


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


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Returns the distributions of each importable name; to read all of them takes seconds."""
    return importlib.metadata.packages_distributions()


def test_every_import_of_the_package_is_declared():
    core, everything, _ = declared()
    assert "jax" in core
    assert "gguf" in everything - core
    providers = distributions()
    missing = set()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).parts[0] in WITH_EXTRA
        for name, at_import in third_party(tree_of(path)):
            packages = {normal(p) for p in providers.get(name, [name])} | {normal(name)}
            if not packages & (core if at_import and not inside else everything):
                missing.add(f"{path.relative_to(REPOSITORY)}: {name}")
    assert missing == set()


# Declared packages that no module of `coa_jax` imports, and what uses each of them.
USED_BY_OTHERS = {
    "gcsfs": "fsspec, for gs://",
    "s3fs": "fsspec, for s3://",
    "jax-cuda13-plugin": "jax, as the compiler for GPUs",
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
    "model/attention/causal.py": "tokamax",
    "run/command.py": "jax",
    "parallel/processes.py": "jax",
    "storage/checkpoint_folders.py": "orbax-checkpoint",
    "serve/http/protocol.py": "uvicorn",
}


def imported(root: Path) -> set[str]:
    """Returns the top-level packages that the modules below a folder import, also by name."""
    names = set()
    for path in root.rglob("*.py"):
        tree = tree_of(path)
        names |= {name for name, _ in third_party(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                function, name = node.func, node.args[0]
                called = getattr(function, "attr", getattr(function, "id", ""))
                if called in BY_NAME and isinstance(name, ast.Constant):
                    names.add(str(name.value).split(".")[0])
    return names


def test_every_declared_package_is_imported():
    providers = distributions()
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
        if (names := {name.split(".")[0] for name in private_names(tree_of(path))})
    }
    assert {file: {package.split("-")[0]} for file, package in PRIVATE.items()} == found
    text = (REPOSITORY / "setup.py").read_text()
    for package in PRIVATE.values():
        assert re.search(rf'"{package}>=[\d.]+,<[\d.]+"', text), package


def test_every_import_of_the_tests_is_declared():
    declared_for_tests = declared()[2]
    providers = distributions()
    own = {path.stem for path in (REPOSITORY / "tests").rglob("*")}
    own |= {"setuptools", "tests", "examples"}
    missing = set()
    for path in (REPOSITORY / "tests").rglob("*.py"):
        for name, _ in third_party(tree_of(path)):
            packages = {normal(p) for p in providers.get(name, [name])} | {normal(name)}
            if name not in own and not packages & declared_for_tests:
                missing.add(f"{path.relative_to(REPOSITORY)}: {name}")
    assert missing == set()


# --- the package itself --------------------------------------------------------------------


def test_the_version_is_that_of_the_distribution():
    told = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(told, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.split() == [coa_jax.__version__]


def test_the_package_exports_two_names_of_a_wing():
    exported = {name for name, home in coa_jax._HOME_OF.items() if home.split(".")[1] in WINGS}
    # docs/api.md and the notebooks use them.
    assert exported == {"create_policy", "make_debug_files"}


def test_exports_are_loaded_from_where_they_are_defined():
    from coa_jax.model import api

    assert coa_jax.load is api.load
    assert all(getattr(coa_jax, name) is not None for name in coa_jax.__all__)
    assert set(coa_jax.__all__) <= set(dir(coa_jax))


def test_type_checkers_see_the_exports():
    (block,) = (
        n for n in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(n, ast.If)
    )
    imported = {
        (n.module, name.name)
        for n in block.body
        if isinstance(n, ast.ImportFrom)
        for name in n.names
    }
    assert imported == {(home, name) for name, home in coa_jax._HOME_OF.items()}


PAGES = [
    path
    for folder in ("docs", "examples", "notebooks", "coa_jax/cli/templates")
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in (".md", ".py", ".ipynb", ".txt") and "site" not in path.parts
]


def test_what_users_read_imports_exported_names_only():
    # The sandbox may be used alone, so its page imports its modules.
    inner = re.compile(
        r"(?:from coa_jax\.(?!sandbox\.)[\w.]+ import|^[ \t\"]*import coa_jax\.)[^\n]*",
        re.MULTILINE,
    )
    pages = [REPOSITORY / "README.md", *PAGES]
    assert {
        p.name: inner.findall(p.read_text()) for p in pages if inner.search(p.read_text())
    } == {}


def test_an_unknown_export_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = coa_jax.load_modle
