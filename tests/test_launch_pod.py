"""A run on a slice of four hosts from its request to its model, with a preemption in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import tiny_policy
from tests.test_launch import REPOSITORY, program
from tests.train.tiny_runs import rows

pytestmark = pytest.mark.slow

MESH = ("--config.mesh.fsdp=-1", "--config.rows=4", "--config.row_length=192")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What all hosts mount: policies and data."""
    path = tmp_path_factory.mktemp("shared")
    tiny_policy.write_sft_inputs(path)
    tiny_policy.write_rl_inputs(path)
    corpus = [{"title": p.title, "text": p.text} for p in tiny_policy.PASSAGES]
    (path / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in corpus))
    return path


def commands(shared):
    """The command of each stage, without its work directory."""
    sft = {"model": shared / "base", "data": shared / "data.jsonl", "validation": "",
           "batch_size": 6, "checkpoint_every": 2, "optimizer.total_steps": 24}  # fmt: skip
    rl = {"model": shared / "model", "tasks": shared / "tasks.jsonl", "num_tasks": 3, "groups": 4,
          "group_size": 4, "max_sampled": 2.0, "temperature": 1.2, "algorithm.overlong_buffer": 0,
          "engine.max_length": 192, "rollout.max_tokens": 192, "rollout.max_turn_tokens": 0,
          "rollout.max_tool_calls": 3, "rollout.max_observation_tokens": 48,
          "tools.wiki_search.corpus": shared / "corpus.jsonl", "optimizer.learning_rate": 1e-3,
          "optimizer.total_steps": 6, "checkpoint_every": 1}  # fmt: skip
    return {
        stage: (stage, f"--config=configs/{stage}/tiny.py", *MESH,
                *(f"--config.{name}={value}" for name, value in given.items()))
        for stage, given in (("sft", sft), ("rl", rl))
    }  # fmt: skip


class Cloud:
    """A gcloud of this machine, and the scripts that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program(folder / "bin", "gcloud", f'exec {sys.executable} -m tests.local_gcloud "$@"')

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """`tpu_queue.sh run`; the hosts have the packages of this Python."""
        flags = ("--name", name, "--zone", "z", "--type", "v5p-32", "--poll", "1", "--preset",
                 "none", "--env", f"COA_JAX_VENV={sys.prefix}", "--check")  # fmt: skip
        env = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder),
               "PYTHONPATH": str(REPOSITORY), "LOCAL_CLOUD": str(self.folder),
               "COA_JAX_PYTHON": sys.executable, "TMPDIR": str(self.folder)}  # fmt: skip
        script = str(REPOSITORY / "launch" / "tpu_queue.sh")
        return subprocess.run(
            ["bash", script, *flags, "run", *words],
            capture_output=True, text=True, env=env, cwd=self.folder, timeout=1500,
        )  # fmt: skip

    def preempt(self, name: str, when) -> threading.Thread:
        """Takes a slice away as soon as `when` is true: its hosts die at once."""

        def take() -> None:
            while not when():
                time.sleep(0.02)
            groups = (self.folder / name / "groups").read_text().split()
            (self.folder / name / "state").write_text("SUSPENDED")
            for group in groups:
                os.killpg(int(group), signal.SIGKILL)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        return thread


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_run_whose_slice_is_taken_away_ends_with_the_parameters_of_one_that_keeps_it(
    shared, tmp_path, stage
):
    cloud, words = Cloud(tmp_path), commands(shared)[stage]
    whole, parts = shared / f"{stage}-whole", shared / f"{stage}-parts"
    done = cloud.run("kept", *words, f"--workdir={whole}")
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    assert done.stdout.count("ready") == 4  # each host was checked
    log = (tmp_path / "log").read_text()
    assert log.count("queued-resources create") == 1

    taken = cloud.preempt("taken", lambda: len(rows(parts, stage)) >= 3)
    done = cloud.run("taken", *words, f"--workdir={parts}")
    taken.join(1)
    assert not taken.is_alive()
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    assert "taken is gone" in done.stderr
    log = (tmp_path / "log").read_text()
    assert log.count("queued-resources create") == 3 and log.count("setup_env.sh") == 3

    assert [row["step"] for row in rows(parts, stage)] == [r["step"] for r in rows(whole, stage)]
    left, right, start = (
        load_file(path / "model.safetensors")
        for path in (
            whole / "model",
            parts / "model",
            shared / ("base" if stage == "sft" else "model"),
        )
    )
    assert any((left[name] != start[name]).any() for name in left)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
