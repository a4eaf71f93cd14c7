"""The command ``coa-jax``, and the package as a wheel in an environment of its own."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coa_jax.__main__ import COMMANDS
from coa_jax.config import installed

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "coa_jax"


def coa_jax(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    options = {"cwd": REPOSITORY, "timeout": 120, **options}
    command = [sys.executable, "-m", "coa_jax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


# --- the command ---------------------------------------------------------------------------


def test_every_entry_point_has_a_command():
    modules = {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".").removesuffix(".__main__")
        for path in PACKAGE.rglob("*.py")
        if re.search(r'^if __name__ == "__main__":$', path.read_text(), re.MULTILINE)
    }
    # Run by other commands.
    workers = {"tools.code_libraries", "model.chat_template", "serve.agents.supervisor"}
    assert modules - workers == {*COMMANDS.values(), "__main__"}


def test_the_overview_has_a_line_for_each_command_and_imports_nothing_heavy():
    code = "import sys; from coa_jax.__main__ import main; main(); sys.exit(str(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=REPOSITORY
    )
    lines = dict(re.findall(r"^  (\S+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert list(lines) == list(COMMANDS)
    assert all(len(line) > 20 for line in lines.values())
    assert not {"jax", "numpy", "absl", "coa_jax.run.command"} & set(ast.literal_eval(done.stderr))


def test_a_command_that_there_is_not_gets_a_line_with_a_suggestion():
    done = coa_jax("evalaute")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no command 'evalaute'; did you mean 'evaluate'?\n"


@pytest.mark.parametrize("arguments", [["report", "--workdir=nowhere"], ["doctor", "--help"]])
def test_a_command_is_its_module(arguments):
    name, *flags = arguments
    module = [sys.executable, "-m", f"coa_jax.{COMMANDS[name]}", *flags]
    same = subprocess.run(module, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    done = coa_jax(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (
        same.returncode, same.stdout, same.stderr
    )  # fmt: skip


# --- configs -------------------------------------------------------------------------------


def test_configs_are_listed_and_copied_but_no_changed_file_is_overwritten(tmp_path):
    listed = coa_jax("configs").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [str(p) for p in installed.config_files()]
    assert "Fine-tunes Qwen2.5-Instruct as the paper's web agent." in "\n".join(listed)
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}}
    for arguments, folder in ((["--copy"], "configs"), (["--copy", "a"], "a"), (["--copy=b"], "b")):
        assert coa_jax("configs", *arguments, **where).returncode == 0
        copied = {p.relative_to(tmp_path / folder) for p in (tmp_path / folder).glob("*/*.py")}
        assert copied == {path.relative_to("configs") for path in installed.config_files()}
    mine = tmp_path / "configs" / "sft" / "web.py"
    mine.write_text("# mine\n")
    (tmp_path / "configs" / "rl" / "web.py").unlink()
    refused = coa_jax("configs", "--copy", **where)
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: --copy: configs/sft/web.py exists with other content; name another directory\n"
    )
    assert mine.read_text() == "# mine\n"
    assert not (tmp_path / "configs" / "rl" / "web.py").exists()


# --- hints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """What setup.py gives to setuptools."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
        runpy.run_path(str(REPOSITORY / "setup.py"))
    return given


@pytest.fixture(scope="module")
def declared(setup) -> dict[str, list[str]]:
    """The extras of setup.py."""
    return setup["extras_require"]


def test_hints_name_extras_that_there_are(declared):
    named = {"missing": 2, "install_hint": 0}  # function -> place of the extra
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in named:
                given = node.args[named[node.func.id] :]  # type: ignore[attr-defined]
                found += [given[0].value] if given and isinstance(given[0], ast.Constant) else []
    assert len(found) > 12
    assert set(found) <= set(declared)


def test_no_hint_asks_for_a_package_that_no_index_has():
    texts = [p for f in ("coa_jax", "configs", "docs") for p in (REPOSITORY / f).rglob("*")]
    texts += [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    assert [
        str(path)
        for path in texts
        if path.suffix in (".py", ".md")
        and path.name != "release.md"  # says what to write after the first release
        and re.search(r"pip install ['\"]?coa[_-]jax", path.read_text())
    ] == []


def test_only_one_module_words_hints():
    """torch and pytest, which no extra has, are the exceptions."""
    found = {
        hint
        for path in PACKAGE.rglob("*.py")
        if path.name != "installed.py"
        for hint in re.findall(r"pip install \S+", path.read_text())
    }
    assert found == {"pip install torch,", 'pip install pytest",'}


def test_a_hint_is_a_command_that_works_where_it_is_shown(monkeypatch, tmp_path, declared):
    monkeypatch.setattr(sys, "prefix", str(REPOSITORY / ".venv"))
    monkeypatch.chdir(REPOSITORY)
    assert installed.install_hint("maths") == "bash launch/setup_env.sh maths"
    monkeypatch.chdir(tmp_path)
    assert installed.install_hint("maths") == f"bash {REPOSITORY}/launch/setup_env.sh maths"
    # Another environment: the packages themselves.
    monkeypatch.setattr(sys, "prefix", "/usr")
    listed = ["jax>=0.10", 'a>=1; extra == "x"', "b[c]>=2 ; extra == 'x'", 'd; extra == "y"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: listed)
    assert installed.install_hint("x") == "pip install 'a>=1' 'b[c]>=2'"


def test_constraints_keep_to_the_floors_of_setup_py(setup):
    core = {each.name: each for each in map(Requirement, setup["install_requires"])}
    for _, _, path in installed.tested_versions():
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        pinned = dict(line.split("==") for line in lines)
        assert {"jax", "jaxlib", "flax", "optax", "numpy"} <= pinned.keys()
        below = [n for n in pinned if n in core and pinned[n] not in core[n].specifier]
        assert below == []


def test_the_lowest_constraints_are_the_floors_of_setup_py(setup):
    wanted = [*setup["install_requires"], *itertools.chain(*setup["extras_require"].values())]
    floors = {
        f"{canonicalize_name(each.name)}=={bound.version}"
        for each in map(Requirement, wanted)
        for bound in each.specifier
        if bound.operator == ">="
    }
    lines = (installed.CONSTRAINTS / "lowest.txt").read_text().split("# Not in setup.py")[0]
    assert {line for line in lines.splitlines() if not line.startswith("#")} == floors


# --- the wheel -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built from a copy so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("source") / "coa_jax"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("coa_jax", "configs"):
        shutil.copytree(
            REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps",
         "--no-build-isolation", "-w", str(copy / "dist"), str(copy)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A function that runs programs of a fresh environment with the wheel.

    Dependencies are those of the running environment, found by a path file; its own entry for this
    repository, an editable installation, is not followed from there.
    """
    home = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    python = home / "venv" / "bin" / "python"
    (site,) = (home / "venv" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(others))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps",
         "--disable-pip-version-check", str(wheel)],
        check=True, timeout=300,
    )  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(program: str, *arguments: str, cwd: Path = home) -> str:
        done = subprocess.run(
            [str(python.parent / program), *arguments],
            capture_output=True, text=True, cwd=cwd, timeout=1200, env=kept,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run.home = home
    return run


def test_the_wheel_has_the_command_and_the_configs(environment, declared, tmp_path):
    code = (
        "import coa_jax.config.installed as i, json, sys\n"
        "from coa_jax.run.command import load_config\n"
        "config = load_config('configs/rl/web.py:debug')\n"
        "files = [path.name for *_, path in i.tested_versions()]\n"
        "extras = {extra: i.requirements_of(extra) for extra in sys.argv[1:]}\n"
        "print(json.dumps([i.__file__, str(i.ROOT), config.groups, extras, i.install_hint('web'), "
        "files]))"
    )
    told = environment("python", "-c", code, *declared, cwd=tmp_path)
    file, root, groups, extras, hint, constraints = json.loads(told)
    assert constraints == ["jax-0.10.txt", "jax-0.12.txt"]
    assert Path(file).is_relative_to(environment.home) and Path(root).is_relative_to(
        environment.home
    )
    assert groups == 2
    # What pip would install for an extra is what setup.py lists.
    assert {extra: list(map(Requirement, found)) for extra, found in extras.items()} == {
        extra: list(map(Requirement, wanted)) for extra, wanted in declared.items()
    }
    assert hint.startswith("pip install 'trafilatura>=")
    assert environment("coa-jax", "configs") == coa_jax("configs").stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_user_of_the_wheel_copies_the_configs_and_trains(environment, tmp_path):
    environment("coa-jax", "debug-files", cwd=tmp_path)
    # The packaged file, and then a changed copy of one.
    environment(
        "coa-jax", "sft", "--config=configs/sft/web.py:debug", "--workdir=runs/a", cwd=tmp_path
    )
    environment("coa-jax", "configs", "--copy", cwd=tmp_path)
    copy = tmp_path / "configs" / "rl" / "tiny.py"
    copy.write_text(copy.read_text().replace('"groups": 2', '"groups": 3'))
    environment(
        "coa-jax", "rl", "--config=configs/rl/mhqa.py:debug", "--workdir=runs/b", cwd=tmp_path
    )
    for run, steps in (("a", 2), ("b", 1)):
        rows = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == steps
        assert (tmp_path / "runs" / run / "model" / "config.json").is_file()
    assert json.loads((tmp_path / "runs" / "b" / "config.json").read_text())["groups"] == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_cell_of_a_notebook_installs_the_wheel(wheel, tmp_path):
    """In an environment with all dependencies and without coa_jax."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    (site,) = (tmp_path / "v" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(others))
    program = (
        "import nbformat, sys\n"
        "from nbclient import NotebookClient\n"
        "book = nbformat.read(sys.argv[1], as_version=4)\n"
        "code = 'import coa_jax; print(coa_jax.__file__)'\n"
        "book.cells = [*book.cells[:2], nbformat.v4.new_code_cell(code)]\n"
        "NotebookClient(book, timeout=900).execute()\n"
        "print(book.cells[-1].outputs[-1].text)\n"
    )
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(tmp_path / "v/bin/python"), "-c", program,
         str(REPOSITORY / "notebooks" / "explore_run.ipynb")],
        capture_output=True, text=True, cwd=tmp_path, env={**kept, "COA_JAX": str(wheel)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert Path(done.stdout.strip()).is_relative_to(site)
