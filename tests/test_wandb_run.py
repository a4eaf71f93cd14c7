"""Metrics at W&B: offline, with the run's own steps, and continued by a resumed run."""

from __future__ import annotations

import json
import sys

import pytest

from coa_jax.errors import UserError
from coa_jax.run_dir import RunDir


def test_a_resumed_run_continues_the_same_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for first in (1, 2):
        with RunDir(tmp_path / "run", wandb_project="tests") as run:
            run.write_config({"seed": 3})
            run.metrics(first, "rl", loss=0.5)
            run.metrics(first + 1, "rl", loss=float("nan"))
    known = json.loads((tmp_path / "run" / "wandb.json").read_text())
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert {path.stem for path in files} == {f"run-{known['id']}"}
    for path in files:
        data = path.read_bytes()
        assert b"rl/loss" in data and b"rl/step" in data and b"seed" in data


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        RunDir(tmp_path / "run", wandb_project="tests") as run,
        pytest.raises(UserError, match=r"pip install 'coa_jax\[wandb\]'"),
    ):
        run.metrics(1, "rl", loss=0.5)
