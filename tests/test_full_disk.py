"""A full disk ends a command in one line, and the same command goes on when there is space."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DISTILL = (
    "coa_jax.cli.distill",
    "--config=configs/distill/factbook.py",
    "--config.tasks.train=40",
    "--config.tasks.validation=4",
)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system that `enlarge` makes larger."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def enlarge(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)


def assert_disk_full(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "free some space and run the same command again" in done.stderr.splitlines()[-1]
    assert done.stderr.count("No space left on device") == 1


@pytest.mark.slow
def test_distillation_goes_on_after_a_full_disk(disk, tmp_path):
    assert_disk_full(run(*DISTILL, f"--workdir={disk / 'run'}"))
    enlarge(disk, "110k")  # the journal fits, what is made of it does not
    assert_disk_full(run(*DISTILL, f"--workdir={disk / 'run'}"))
    enlarge(disk, "10m")
    assert run(*DISTILL, f"--workdir={disk / 'run'}").returncode == 0
    assert run(*DISTILL, f"--workdir={tmp_path / 'whole'}").returncode == 0
    for name in ("train.jsonl", "validation.jsonl"):
        assert (disk / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_training_goes_on_after_a_full_disk(disk, tmp_path):
    debug = tmp_path / "debug"
    assert run("coa_jax.demo.debug_files", f"--workdir={debug}").returncode == 0
    sft = (
        "coa_jax.cli.sft",
        "--config=configs/sft/tiny.py",
        f"--config.model={debug}/scratch/model",
        f"--config.data={debug}/distill/train.jsonl",
        f"--config.validation={debug}/distill/validation.jsonl",
    )
    assert run(*sft, f"--workdir={tmp_path / 'whole'}").returncode == 0
    for size in ("40k", "300k", "600k", "900k", "1200k"):  # metrics, both checkpoints, the model
        enlarge(disk, size)
        assert_disk_full(run(*sft, f"--workdir={disk / 'run'}"))
    enlarge(disk, "20m")
    assert run(*sft, f"--workdir={disk / 'run'}").returncode == 0
    weights = "model/model.safetensors"
    assert (disk / "run" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
