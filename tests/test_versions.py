"""Tested versions of Python and JAX: the constraint files, and warnings outside of them."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

from coa_jax.config import installed
from tests import test_launch
from tests.test_launch import fake_venv, pip_calls, program, run

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "coa_jax"

tree = test_launch.tree  # the fixture


@pytest.fixture
def running(monkeypatch):
    """A function that sets the versions of Python and JAX that the package sees."""

    def set_to(python: tuple[int, int], jax: str) -> None:
        monkeypatch.setattr(sys, "version_info", (*python, 0))
        monkeypatch.setattr(importlib.metadata, "version", {"jax": jax}.__getitem__)

    return set_to


@pytest.mark.parametrize(
    ("python", "jax"), [((3, 11), "0.10.2"), ((3, 12), "0.11.3"), ((3, 13), "0.12.9.dev20261124")]
)
def test_nothing_is_said_between_the_ends_of_the_tested_versions(running, python, jax):
    running(python, jax)
    assert installed.untested() == ""


def test_versions_outside_get_one_line_with_what_to_do(running, monkeypatch, capsys):
    def said(*versions) -> str:
        running(*versions)
        installed.warn_untested()
        line = capsys.readouterr().err
        assert line.startswith("warning: ") and line.count("\n") == 1
        return line.strip()

    (python, jax, _), *_, (new_python, new_jax, _) = installed.tested_versions()
    tested = f"(Python {python} with jax {jax} to Python {new_python} with jax {new_jax} are)"
    line = said((3, 14), "0.13.0")
    assert f"Python 3.14 with jax 0.13.0 is not tested {tested}" in line
    assert line.endswith("take Python 3.11 to 3.13")
    for python, jax, name in (((3, 12), "0.13.0", "jax-0.12"), ((3, 11), "0.9.2", "jax-0.10")):
        monkeypatch.setattr(sys, "prefix", str(REPOSITORY / ".venv"))
        assert said(python, jax).endswith(f"CONSTRAINTS={name} {installed._script()}")
        monkeypatch.setattr(sys, "prefix", "/usr")
        file = PACKAGE / "config" / "constraints" / f"{name}.txt"
        assert said(python, jax).endswith(f"pip install -c {file} jax flax")


def test_a_package_without_jax_is_not_warned_of(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed.untested() == ""


# --- setup_env.sh --------------------------------------------------------------------------


@pytest.mark.slow
def test_constraints_are_kept_by_later_runs(tree, tmp_path):
    fake_venv(tree.root)
    file = tree.root / "coa_jax" / "config" / "constraints" / "jax-0.12.txt"
    assert tree("setup_env.sh", CONSTRAINTS="jax-0.12").returncode == 0
    assert tree("setup_env.sh", "gguf").returncode == 0
    assert tree("setup_env.sh", CONSTRAINTS="jax-0.12").returncode == 0
    calls = pip_calls(tree.root)
    assert len(calls) == 2
    assert all(f" -c {file} " in call for call in calls)
    (tmp_path / "mine.txt").touch()
    assert tree("setup_env.sh", CONSTRAINTS="mine.txt").returncode == 0
    assert f" -c {tmp_path}/mine.txt " in pip_calls(tree.root)[2]


def test_tested_versions_are_the_default_and_none_is_a_choice_that_is_kept(tree):
    fake_venv(tree.root)
    assert tree("setup_env.sh").returncode == 0
    assert tree("setup_env.sh", CONSTRAINTS="none").returncode == 0
    assert tree("setup_env.sh", "gguf").returncode == 0
    tested, none, kept = pip_calls(tree.root)
    name = "jax-0.10.txt" if sys.version_info < (3, 13) else "jax-0.12.txt"
    assert f" -c {tree.root}/coa_jax/config/constraints/{name} " in tested
    assert " -c " not in none + kept


def test_a_compiler_that_an_extra_needs_is_named_before_anything_is_installed(tree, tmp_path):
    fake_venv(tree.root)
    (tmp_path / "pycosat.py").write_text("raise ImportError")
    done = tree("setup_env.sh", "tasks", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and not pip_calls(tree.root)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.stderr.endswith(f"as root: apt-get install gcc {version}-dev\n")
    if gcc := shutil.which("gcc"):
        done = tree("setup_env.sh", "tasks", PYTHONPATH=str(tmp_path), CC=gcc)
        assert done.returncode == 0 and len(pip_calls(tree.root)) == 1


def test_the_help_of_the_installation_installs_nothing(tree):
    done = tree("setup_env.sh", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CONSTRAINTS=none" in done.stdout and "shellcheck" not in done.stdout
    assert not (tree.root / ".venv").exists()


def test_constraints_that_there_are_not_get_one_line(tree):
    result = tree("setup_env.sh", CONSTRAINTS="jax-9")
    assert result.returncode == 1
    assert result.stderr == (
        "[setup] error: CONSTRAINTS=jax-9: no such file, and none in coa_jax/config/constraints\n"
    )


def test_a_second_environment_stands_beside_the_first(tree):
    fake_venv(tree.root)
    (tree.root / ".venv").rename(tree.root / ".venv-b")
    assert tree("setup_env.sh", COA_JAX_VENV=".venv-b").returncode == 0
    assert (tree.root / ".venv-b" / ".coa_jax").is_file()
    assert not (tree.root / ".venv").exists()


# --- .ci/run -------------------------------------------------------------------------------


@pytest.fixture
def ci(tree):
    """A function that runs `.ci/run` where installing and testing only say how they are called."""
    shutil.copytree(REPOSITORY / ".ci", tree.root / ".ci")
    for name in ("setup_env.sh", "test.sh"):
        program(tree.root / "launch", name, f'echo "{name} $CONSTRAINTS $PYTHON $*"')
    shutil.copy(REPOSITORY / "README.md", tree.root)
    for name in ("timeout", "head"):
        (tree.tools / name).symlink_to(str(shutil.which(name)))
    program(tree.tools, "coa-jax", 'echo "coa-jax $* Vilnius Ulaanbaatar"')
    program(tree.root / ".venv" / "bin", "python", 'echo "$@"')

    def call():
        env = {"PATH": str(tree.tools), "CONSTRAINTS": "", "PYTHON": ""}
        done = run("bash", str(tree.root / ".ci" / "run"), env=env)
        return done.returncode, done.stdout.splitlines()

    return call


def test_without_python_3_13_the_newest_jax_is_left_out_in_one_line(ci):
    status, (*_, small, _, _, fetch, ask, setup, tests, _, site, line) = ci()
    assert (status, fetch) == (0, "coa-jax fetch smollm2 Vilnius Ulaanbaatar")
    assert "--model=released/recall/policy" in small
    assert ask.startswith("coa-jax ask --model=released/smollm2/adapter --config=")
    assert setup.split() == ["setup_env.sh", "test", "tpu", "gpucompiler", "tokamax", "docs"]
    assert (tests.split(), site) == (["test.sh"], "docs/site/build.py")
    assert line == "no Python 3.13 in PATH or of pyenv: the tests with jax 0.12 are left out"


@pytest.mark.parametrize("passed", [True, False])
def test_a_python_3_13_of_pyenv_runs_the_tests_of_what_runs_on_jax(ci, tree, tmp_path, passed):
    python = tmp_path / "3.13.1" / "bin" / "python3.13"
    program(python.parent, python.name, "true")
    program(tree.tools, "python3.13", "exit 127")  # what pyenv puts into PATH for all versions
    listed = f'[ "$1" = prefix ] && echo "{tmp_path}/$2" || printf "3.11.7\\n3.13.1\\n"'
    program(tree.tools, "pyenv", listed)
    own = tree.root / ".venv-jax-0.12" / "bin"
    program(own, "python", f'echo "$@"; [ {passed} = True ]')
    status, (*before, tests) = ci()
    assert status == (not passed)
    assert f"setup_env.sh  {python} testjax tpu" in before
    start, paths = "-m pytest -n 2 --dist worksteal ", tests.split()[6:]
    assert tests.startswith(start)
    assert {"tests/train/test_step.py", "tests/engine/test_engine.py"} <= set(paths)
    assert all((REPOSITORY / path.partition("::")[0]).exists() for path in paths)
