"""Metrics at W&B: offline, with the run's own steps, and continued by a resumed run."""

from __future__ import annotations

import json
import sys
import time

import pytest

from coa_jax.errors import UserError
from coa_jax.run.run_dir import RunDir


@pytest.mark.slow
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
    # A process of its own writes them, which may come later than the end of the run.
    wanted, deadline = (b"rl/loss", b"rl/step", b"seed"), time.monotonic() + 30
    for path in files:
        while not all(word in path.read_bytes() for word in wanted):
            assert time.monotonic() < deadline, path.read_bytes()
            time.sleep(0.1)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        RunDir(tmp_path / "run", wandb_project="tests") as run,
        pytest.raises(UserError, match="--wandb_project needs wandb; run: "),
    ):
        run.metrics(1, "rl", loss=0.5)


def test_a_missing_key_is_told_before_the_run_has_loaded_anything(tmp_path, monkeypatch):
    pytest.importorskip("wandb").teardown()  # forgets the mode of the runs before
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))  # where `wandb login` leaves the key
    with (
        RunDir(tmp_path / "run", wandb_project="tests") as run,
        pytest.raises(UserError, match=r"W&B project tests: .*run `wandb login`, or set WANDB_"),
    ):
        run.write_config({"seed": 3})
