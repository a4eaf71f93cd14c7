"""What a notebook shows: runs as values, trajectories and tokens as HTML."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import coa_jax
from coa_jax.data.trajectory import Author, Reward, StopReason
from coa_jax.errors import UserError
from coa_jax.report.notebook import table
from tests.report.run_files import HOSTILE, episode, write_run


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_a_run_is_read_with_its_results_curves_and_trajectories(tmp_path):
    run = coa_jax.read_run(write_run(tmp_path / "run", tasks=2))
    assert list(run.results) == ["teacher", "base", "sft", "rl"]
    assert run.results["rl"]["pass_at_1"] == 0.71
    assert [len(run.of_stage(stage)) for stage in ("base", "rl", "none")] == [2, 2, 0]
    steps, values = run.curve("rl", "reward/mean")
    assert len(steps) == len(values) == 299  # one of 300 steps has no value
    assert run.curve("rl", "loss") == ([], [])


def test_a_run_that_is_under_way_has_what_it_has_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "rl", "reward/mean": 0.5}\n')
    run = coa_jax.read_run(tmp_path)
    assert (run.results, run.trajectories) == ({}, [])
    assert run.curve("rl", "reward/mean") == ([1.0], [0.5])
    with pytest.raises(UserError, match="nothing: no such run directory; pass the --workdir"):
        coa_jax.read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": Reward(1.0, {})}, ""),
        ({"reward": Reward(None, {})}, ""),
        ({}, "read the answer, wrote another"),
        ({"stop_reason": StopReason.LENGTH}, "stopped without an answer: length"),
        ({"tool_calls": ()}, "answered without a tool"),
        ({"gold": ("Maseru",)}, "no tool returned the answer"),
    ],
)
def test_a_wrong_trajectory_has_one_reason(changes, reason):
    assert coa_jax.failure_of(episode("Lesotho", "sft", False, **changes)) == reason


def test_a_failed_call_is_a_reason():
    one = episode("Lesotho", "sft", False, gold=("Maseru",))
    failed = dataclasses.replace(one.tool_calls[0], ok=False, outcome="timeout")
    one = dataclasses.replace(one, tool_calls=(failed,))
    assert coa_jax.failure_of(one) == "a tool call failed"


def test_trajectories_are_shown_side_by_side_and_their_text_is_escaped():
    shown = coa_jax.show(episode("Chad", "sft", True), episode("Laos", "sft", False))._repr_html_()
    assert shown.count("flex:1 1") == 2
    assert "area of Chad" in shown and "area of Laos" in shown
    assert shown.count("written by the tool") == 4
    assert "reward 1" in shown and "reward 0" in shown
    assert HOSTILE not in shown and "&lt;script&gt;" in shown
    assert "<td>&lt;b&gt;</td>" in table(("a",), [("<b>",)]).text


def test_each_token_is_shown_with_its_author_and_its_log_probability():
    one = dataclasses.replace(
        episode("Chad", "sft", True),
        tokens=np.array([ord(c) for c in "a<b"]),
        author=np.array([Author.PROMPT, Author.POLICY, Author.ENVIRONMENT]),
        logp=np.array([0.0, -0.5, 0.0]),
        segments=(),
    )
    shown = coa_jax.show_tokens(one, Letters(), trained=[0, 1, 0]).text
    titles = ("prompt, id 97", "policy, id 60, log p -0.500", "tool, id 98")
    assert [shown.count(f'title="{title}"') for title in titles] == [1, 1, 1]
    assert shown.count("border-bottom") == 1 and "&lt;</span>" in shown
