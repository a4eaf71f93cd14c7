"""Recorded rollouts are reproduced exactly, and a changed record is detected."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, StopReason, Trajectory
from coa_jax.engine.config import SamplingParams
from coa_jax.errors import UserError
from coa_jax.model.api import save_model
from coa_jax.model.params import init_params
from coa_jax.rollout import replay as command
from coa_jax.rollout.compare import describe_difference
from coa_jax.rollout.replay import read_recordings, recording, replay
from coa_jax.tools.base import Observation
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, requests, run
from tests.trajectory_files import write_trajectories

HOT = SamplingParams(temperature=1.3, top_p=0.95, top_k=50)


@dataclasses.dataclass
class Changes:
    """A tool that says something else at every call."""

    name: str
    deadline: float = 5.0
    made: int = 0

    async def __call__(self, arguments, context):
        self.made += 1
        return Observation(f"The river Ume is {self.made} km long.", True, "ok", 0.0)


def marked(trajectory: Trajectory, **metadata) -> Trajectory:
    return dataclasses.replace(trajectory, metadata={**trajectory.metadata, **metadata})


@pytest.fixture(scope="module")
def sampled() -> list[Trajectory]:
    """Twelve trajectories as `RunDir.traces` marks them."""
    groups = run(requests(4, HOT), tools=[Changes("wiki_search"), Changes("code")])
    return [marked(t, phase="evaluate-a", step=1) for group in groups for t in group]


@pytest.fixture
def traces(sampled, tmp_path):
    path = tmp_path / "traces.jsonl"
    write_trajectories(path, sampled)
    return str(path)


def again(trajectories, model=None, **shapes):
    model = model or tiny_policy.policy()
    return replay(model, [recording(t) for t in trajectories], shapes)


def first_observed(trajectory: Trajectory) -> int:
    return int(np.argmax(trajectory.author == Author.ENVIRONMENT))


def with_call(trajectory: Trajectory, **changes) -> Trajectory:
    first, *rest = trajectory.tool_calls
    return dataclasses.replace(
        trajectory, tool_calls=(dataclasses.replace(first, **changes), *rest)
    )


def other_model():
    model = tiny_policy.policy()
    return model.replace(params=init_params(model.config, jax.random.key(5)))


@pytest.mark.parametrize("shapes", [{}, {"slots": 3, "chunk": 5, "extend_buckets": (16, 48)}])
def test_rollouts_with_tools_come_out_again(sampled, traces, shapes):
    recordings = read_recordings(traces, "evaluate-a", 1, 0)
    comparisons = replay(tiny_policy.policy(), recordings, shapes)
    assert sum(len(t.tool_calls) for t in sampled) >= len(sampled)
    for trajectory, comparison in zip(sampled, comparisons, strict=True):
        assert comparison.identical
        assert comparison.same == len(trajectory.tokens)
        assert comparison.replayed.tokens.tolist() == trajectory.tokens.tolist()
        assert comparison.replayed.text == trajectory.text
        assert comparison.replayed.stop_reason is trajectory.stop_reason
        assert comparison.logp_gaps().max() < 1e-4


def test_every_budget_is_kept_in_a_replay():
    budgets = [
        {"strict": True},
        {"max_turn_tokens": 12},
        {"max_tool_calls": 0},
        {"max_observation_tokens": 3},
        {"max_tokens": 90},
    ]
    configs = [dataclasses.replace(BUDGET, **budget) for budget in budgets]
    mixed = [t for c in configs for group in run(requests(2, HOT), config=c) for t in group]
    reasons = {t.stop_reason for t in mixed}
    assert reasons >= {StopReason.TURN_LENGTH, StopReason.TURNS, StopReason.LENGTH}
    assert all(comparison.identical for comparison in again(mixed))


def test_a_changed_token_is_found_where_it_is(sampled):
    index = first_observed(sampled[0]) - 3
    tokens = sampled[0].tokens.copy()
    tokens[index] += 1
    changed, same = again([dataclasses.replace(sampled[0], tokens=tokens), sampled[1]])
    assert same.identical
    assert not changed.identical
    assert changed.same == index
    text = describe_difference(tiny_policy.policy().tokenizer, changed)
    assert text.startswith(f"{sampled[0].task_id}, sample 0: token {index} differs")
    assert f"recorded  {tokens[index]} by the policy" in text
    assert f"replayed  {tokens[index] - 1} by the policy" in text


def test_a_changed_observation_is_found_in_its_tokens(sampled):
    start = first_observed(sampled[0])
    longer = "X" + sampled[0].tool_calls[0].observation
    (comparison,) = again([with_call(sampled[0], observation=longer)])
    assert not comparison.identical
    # The opening tag is the same, the body begins with another token.
    assert start < comparison.same
    assert sampled[0].author[start : comparison.same + 1].tolist() == (
        [Author.ENVIRONMENT] * (comparison.same + 1 - start)
    )
    text = describe_difference(tiny_policy.policy().tokenizer, comparison)
    assert "in the observation of call 1 is wiki_search" in text
    assert "X" in text.splitlines()[-1]


def test_another_call_than_the_recorded_gets_no_result(sampled):
    (comparison,) = again([with_call(sampled[0], arguments="river Skane")])
    assert not comparison.identical
    assert comparison.recorded.author[comparison.same] == Author.ENVIRONMENT
    text = describe_difference(tiny_policy.policy().tokenizer, comparison)
    assert "recorded is wiki_search with 'river Skane'" in text
    assert comparison.replayed.tool_calls[0].outcome == "fault"


def test_a_changed_end_is_found(sampled):
    (comparison,) = again([dataclasses.replace(sampled[0], stop_reason=StopReason.VIOLATION)])
    assert not comparison.identical
    assert comparison.same == len(sampled[0].tokens)
    text = describe_difference(tiny_policy.policy().tokenizer, comparison)
    assert "end differently" in text
    assert "recorded  the end: violation" in text


def test_another_model_differs(sampled):
    comparisons = again(sampled, other_model())
    assert not any(comparison.identical for comparison in comparisons)
    for comparison in comparisons:
        assert comparison.recorded.author[comparison.same] == Author.POLICY


def test_a_model_of_another_vocabulary_is_refused(sampled):
    model = tiny_policy.policy()
    small = model.replace(config=dataclasses.replace(model.config, vocab_size=9))
    with pytest.raises(UserError, match="the model only 9 embeddings: give the --model"):
        again(sampled, small)


def test_what_a_clock_ended_is_compared_up_to_there(sampled):
    whole = sampled[0]
    size = first_observed(whole) + 2
    cut = dataclasses.replace(
        whole,
        tokens=whole.tokens[:size],
        author=whole.author[:size],
        logp=whole.logp[:size],
        stop_reason=StopReason.TOOL_TIME,
    )
    timed = {**whole.metadata["rollout"], "max_seconds": 1e-9, "max_tool_seconds": 1e-9}
    cut = marked(cut, rollout=timed)
    wrong = dataclasses.replace(cut, tokens=np.append(cut.tokens[:-1], cut.tokens[-1] + 1))
    good, bad, short = again([cut, wrong, dataclasses.replace(cut, stop_reason=StopReason.LENGTH)])
    assert good.identical
    assert not bad.identical
    assert bad.same == size - 1
    assert not short.identical


# --- the file and the command --------------------------------------------------------------


def written(path, trajectories) -> str:
    write_trajectories(path, trajectories)
    return str(path)


def test_traces_without_their_settings_are_refused_by_line(sampled, tmp_path):
    old = {k: v for k, v in sampled[1].metadata.items() if k not in ("sampling", "engine")}
    path = written(
        tmp_path / "t.jsonl", [sampled[0], dataclasses.replace(sampled[1], metadata=old)]
    )
    with pytest.raises(
        UserError, match=r"t\.jsonl:2: the metadata lacks sampling, engine, which a replay needs"
    ):
        read_recordings(path, "", None, 0)
    assert len(read_recordings(path, "", None, 1)) == 1


@pytest.mark.parametrize("missing", ["engine", ""])
def test_traces_of_a_served_policy_are_refused_by_their_name(sampled, tmp_path, missing):
    metadata = {k: v for k, v in sampled[1].metadata.items() if k != missing}
    served = dataclasses.replace(sampled[1], tokens=(), author=(), logp=(), metadata=metadata)
    path = written(tmp_path / "t.jsonl", [sampled[0], served])
    with pytest.raises(
        UserError, match=r"t.jsonl:2: .* holds no tokens, because .* behind an endpoint"
    ) as told:
        read_recordings(path, "", None, 0)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("rollout", {"max_tokens": 9}, "'max_tool_calls' is missing"),
        ("sampling", [], "expected an object, found list"),
        ("sampling", {"temperature": 1.0, "top_p": 0.0, "top_k": 0}, "top_p is 0.0; give"),
        ("engine", {"slots": "4"}, "'slots' cannot be str"),
        ("prompt_id", None, "int"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_line(sampled, tmp_path, key, value, fault):
    path = written(tmp_path / "t.jsonl", [marked(sampled[0], **{key: value})])
    with pytest.raises(UserError, match=rf"t\.jsonl:1: .*{fault}"):
        read_recordings(path, "", None, 0)


def test_a_phase_and_a_step_are_chosen(sampled, tmp_path):
    marks = [("evaluate-a", 1), ("rl", 1), ("rl", 2), ("rl", 2)]
    rows = [marked(t, phase=p, step=s) for t, (p, s) in zip(sampled[:4], marks, strict=True)]
    path = written(tmp_path / "t.jsonl", rows)
    (only,) = read_recordings(path, "evaluate-a", None, 0)
    assert only.trajectory.sample_id == 0
    assert len(read_recordings(path, "rl", 2, 0)) == 2
    with pytest.raises(UserError, match="phase rl, step 1 and phase rl, step 2 were sampled with"):
        read_recordings(path, "rl", None, 0)
    with pytest.raises(UserError, match="no trajectory of phase sft; there are evaluate-a"):
        read_recordings(path, "sft", None, 0)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Calls the command with some flags; returns its exit code."""
    save_model(tiny_policy.policy(), tmp_path / "model")
    values = dict.fromkeys(("step", "slots", "chunk", "pages", "extend_buckets"))
    values |= {"model": str(tmp_path / "model"), "phase": "", "format": "", "limit": 0}

    def run_command(*arguments, **given):
        given_flags = types.SimpleNamespace(**{**values, **given})
        monkeypatch.setattr(command, "flags", types.SimpleNamespace(FLAGS=given_flags))
        return command.main(["replay", *arguments])

    return run_command


def test_the_command_tells_that_all_agree(traces, call, capsys):
    assert call(traces) == 0
    out = capsys.readouterr().out
    assert "phase evaluate-a, step 1: 12 trajectories" in out
    assert "identical: 12, different: 0" in out
    assert "largest difference of log-probabilities: " in out


def test_the_command_tells_what_differs(sampled, tmp_path, call, capsys):
    changed = [dataclasses.replace(t, stop_reason=StopReason.VIOLATION) for t in sampled[:5]]
    assert call(written(tmp_path / "t.jsonl", [*changed, *sampled[5:]])) == 1
    out = capsys.readouterr().out
    assert "identical: 7, different: 5" in out
    assert out.count("end differently") == command.SHOWN
    assert "and 2 more" in out


def test_mistakes_are_one_line(traces, call):
    with pytest.raises(UserError, match="coa-jax replay TRACES --model=DIR"):
        call()
    with pytest.raises(UserError, match=r"traces\.jsonlx: "):
        call(traces + "x")
    with pytest.raises(UserError, match=r"traces\.jsonl-model "):
        call(traces, model=traces + "-model")
    with pytest.raises(UserError, match="extend_buckets=64,32: give ascending numbers"):
        call(traces, extend_buckets=["64", "32"])
