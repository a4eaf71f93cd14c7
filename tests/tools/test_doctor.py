"""The doctor describes this machine correctly."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coa_jax
from coa_jax.perf.device.doctor import main
from coa_jax.sandbox import attacks, isolation
from coa_jax.tools import doctor

ROOT = Path(coa_jax.__file__).resolve().parent


def test_it_names_isolation_and_overhead_and_proves_it(capsys):
    assert main(["--backend", "landlock"]) == 0
    text = capsys.readouterr().out
    assert "isolation    landlock" in text
    assert re.search(r"overhead     \d+\.\d ms", text)
    assert re.search(r"trainer      keeps \d+% of a processor", text)
    assert text.count("  pass  ") >= 14
    assert "FAIL" not in text
    assert text.endswith("all contained\n")


def test_without_isolation_it_ends_with_code_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(isolation, "_why_not", lambda backend: "not on this machine")
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: no isolation available: bubblewrap: not on this machine")
    assert captured.err.count("\n") == 1


def test_versions_that_are_not_tested_are_said_first(monkeypatch, capsys):
    monkeypatch.setattr(isolation, "_why_not", lambda backend: "not on this machine")
    monkeypatch.setattr(importlib.metadata, "version", {"jax": "0.99.0"}.__getitem__)
    assert main([]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: Python ") and " with jax 0.99.0 is not tested " in first
    assert second.startswith("error: no isolation available")


def test_a_program_that_escapes_makes_it_fail(monkeypatch, capsys):
    escaped = attacks.Attack("escape", "print('BROKEN: escaped')")
    monkeypatch.setattr(doctor, "list_attacks", lambda targets: (escaped,))
    monkeypatch.setattr(doctor, "_TIMED_CALLS", 1)
    assert main([]) == 1
    text = capsys.readouterr().out
    assert "FAIL  escape" in text
    assert "BROKEN: escaped" in text


def test_an_unknown_back_end_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--backend", "chroot"])
    assert caught.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", isolation.BACKENDS)
def test_it_holds_for_a_caller_without_rights(backend, tmp_path_factory):
    if os.geteuid() != 0:
        command = [sys.executable]
    else:
        command = ["setpriv", "--reuid", "65533", "--regid", "65533", "--clear-groups"]
        command.append(isolation.find_interpreter().path)
    place = Path("/tmp") / f"coa_jax_unprivileged_{backend}_{os.getpid()}"
    try:
        (place / "home").mkdir(parents=True)
        shutil.copytree(ROOT, place / "coa_jax", ignore=shutil.ignore_patterns("__pycache__"))
        if os.geteuid() == 0:
            for path in (place, *place.rglob("*")):
                os.chown(path, 65533, 65533)
        environment = {"HOME": str(place / "home"), "PATH": os.environ["PATH"]}
        answer = subprocess.run(
            [*command, "-m", "coa_jax.perf.device.doctor", "--backend", backend],
            capture_output=True,
            text=True,
            cwd=place,
            env=environment,
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "the calling user" in answer.stdout
