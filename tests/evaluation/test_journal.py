"""What an evaluation stores, and how a later process takes it up."""

from __future__ import annotations

import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.files import durable
from tests.evaluation.tiny_evaluation import ONE, refuse, results, run
from tests.tiny_policy import TASKS


def rewards(folder):
    return [trace.reward for trace in read_trajectories(folder / "traces.jsonl")]


def test_rewards_that_a_kill_kept_from_the_traces_are_added_by_the_next_start(
    tmp_path, monkeypatch
):
    run(tmp_path / "whole", ONE)
    replace = durable.replace_with

    def killed(path, *given, **named):
        if path.name == "traces.jsonl":
            raise KeyboardInterrupt
        replace(path, *given, **named)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(durable, "replace_with", killed)
        run(tmp_path / "killed", ONE)
    assert rewards(tmp_path / "killed") == [None] * len(TASKS)
    run(tmp_path / "killed", ONE, refuse)
    assert rewards(tmp_path / "killed") == rewards(tmp_path / "whole")
    assert None not in rewards(tmp_path / "killed")
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    # Then nothing is left to add.
    before = (tmp_path / "killed" / "traces.jsonl").stat()
    run(tmp_path / "killed", ONE, refuse)
    assert (tmp_path / "killed" / "traces.jsonl").stat().st_ino == before.st_ino
