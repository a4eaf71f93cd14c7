"""Folders that ``coa-jax new`` writes: their tests pass, and mistakes are one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.cli.new import kinds, main, write_new
from coa_jax.config.extensions import bind
from coa_jax.distillation.readers import READERS
from coa_jax.errors import UserError
from coa_jax.protocol import FORMATS
from coa_jax.rollout.environments import ENVIRONMENTS
from coa_jax.tasks import SOURCES
from coa_jax.tasks.checks import REWARDS
from coa_jax.tools.make import TOOLS
from coa_jax.train.algorithms import ADVANTAGES, LOSSES

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "tool": TOOLS,
    "reward": REWARDS,
    "tasks": SOURCES,
    "environment": ENVIRONMENTS,
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "reader": READERS,
    "format": FORMATS,
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_tests_of_new_folders_pass_and_what_is_in_them_fits_its_kind(here, monkeypatch):
    assert set(KINDS) <= set(kinds())
    for kind in kinds():
        names = {path.name for path in write_new(kind, f"new_{kind}")}
        log = {"log.jsonl"} if kind == "reader" else set()
        assert names == {f"new_{kind}.py", f"test_new_{kind}.py", "README.md", *log}
        assert "NAME" not in (here / f"new_{kind}" / "README.md").read_text()
        monkeypatch.syspath_prepend(str(here / f"new_{kind}"))
        if kind in KINDS:
            bind(KINDS[kind], f"new_{kind}:new_{kind}", {}, kind)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(kinds())} passed" in done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("rewards", "mine", "there is no kind 'rewards'; did you mean 'reward'?"),
        ("reward", "a/b", "'a/b' cannot name a module; give a small letter, then small"),
        ("reward", "class", "'class' cannot name a module"),
        ("reward", "", "'' cannot name a module"),
        ("reward", "json", "json is the name of another module"),
        ("tool", "Dice", "'Dice' cannot name a module; give a small letter"),
        ("environment", "load", "the new module uses the name load for something else"),
        ("loss", "jnp", "the new module uses the name jnp for something else"),
        ("reward", "there", "there exists; choose another name, or remove it"),
    ],
)
def test_nonsense_is_refused_and_nothing_is_written(here, kind, name, message):
    (here / "there").symlink_to("nowhere")
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        write_new(kind, name)
    assert [path.name for path in here.iterdir()] == ["there"]


def test_a_mistake_is_one_line_of_the_command(here):
    done = subprocess.run(
        [sys.executable, "-m", "coa_jax", "new", "loss"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: give a kind and a name: coa-jax new advantage|")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_command_in_the_readme_of_a_new_reader_makes_training_data(here):
    write_new("reader", "mine")
    readme = (here / "mine" / "README.md").read_text()
    command = readme[readme.index("coa-jax distill") :].partition("```")[0].replace("\\\n", " ")
    done = subprocess.run(
        [sys.executable, "-m", "coa_jax", *command.split()[1:]],
        cwd=here / "mine", env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = (here / "mine" / "runs" / "mine" / "train.jsonl").read_text().splitlines()
    assert len(records) == 2


def test_who_has_no_pytest_is_told_how_to_get_it(here, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    main(["new", "reward", "mine"])
    assert capsys.readouterr().err == "the test needs pytest: pip install pytest\n"
    assert "\npip install pytest " in (here / "mine" / "README.md").read_text()
