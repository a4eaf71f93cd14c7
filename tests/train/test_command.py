"""Shared behaviour of the training commands."""

from __future__ import annotations

import importlib.metadata

import pytest

from coa_jax.parallel import processes
from coa_jax.train import command


@pytest.mark.parametrize(("process", "lines"), [(0, 1), (1, 0)])
def test_the_first_line_of_a_run_says_that_its_versions_are_not_tested(
    monkeypatch, tmp_path, capsys, process, lines
):
    monkeypatch.setattr(processes, "index", lambda: process)
    monkeypatch.setattr(importlib.metadata, "version", {"jax": "0.99.0"}.__getitem__)
    with command.run_at(tmp_path, {}):
        told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count(" with jax 0.99.0 is not tested ") == told.err.count("\n") == lines
