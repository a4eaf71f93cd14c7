"""Programs that solve tasks through the endpoint of a live engine."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, StopReason, Trajectory
from coa_jax.errors import UserError
from coa_jax.model import tokenizer as tokenizer_module
from coa_jax.rollout import scheduler
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.rollout.request import RolloutConfig
from coa_jax.serve import service
from tests import tiny_policy
from tests.rollout.small_loop import engine
from tests.serve.agents.functions import LOOK
from tests.serve.agents.live import LENGTH, one, sampler, solve


def trainer_logps(trajectory: Trajectory) -> np.ndarray:
    """Log-probabilities of all tokens but the first, from one pass over the whole."""
    scores = tiny_policy.policy()(trajectory.tokens[None])[0]
    logps = np.asarray(jax.nn.log_softmax(scores, axis=-1))
    return logps[np.arange(len(trajectory.tokens) - 1), trajectory.tokens[1:]]


def assert_as_sampled(trajectory: Trajectory) -> None:
    """The policy's tokens have the log-probabilities that the trainer finds."""
    written = trajectory.author[1:] == Author.POLICY
    gap = np.abs(trainer_logps(trajectory) - trajectory.logp[1:])[written]
    assert gap.max() < 1e-4
    assert not trajectory.logp[1:][~written].any()


@pytest.mark.slow
def test_over_ten_turns_no_text_is_encoded_twice_and_nothing_sampled_ever_is(monkeypatch):
    on, wanted, encoded = sampler("conversation"), [one()], []
    plain_ids = tokenizer_module._ids

    def counted(plain, text):
        encoded.append(text)
        return plain_ids(plain, text)

    monkeypatch.setattr(tokenizer_module, "_ids", counted)
    (found,) = solve(on, wanted)
    assert found.stop_reason == StopReason.ANSWER
    assert found.metadata["agent_turns"] == 10 and not found.branches
    assert len(found.tokens) <= LENGTH
    # Every turn of the user once; besides these only the frame of a turn.
    said = [text for text in encoded if text.startswith("user\n")]
    asked = [f"user\n{found.question}", *(f"user\nGo on, {turn}." for turn in range(9))]
    assert said == asked
    frame = {" ", "\n", "assistant\n", ""}
    assert {text for text in encoded if text not in said} <= frame
    # What the program was told, turn by turn, is what is learned.
    told = [logp for turn in json.loads(found.answer) for logp in turn]
    ends = set(np.flatnonzero(np.isin(found.tokens, tokenizer_module.eos_ids(
        tiny_policy.policy().tokenizer))).tolist())  # fmt: skip
    policy = np.flatnonzero(found.author == Author.POLICY)
    kept = [place for place in policy.tolist() if place not in ends]
    np.testing.assert_array_equal(np.float32(told), found.logp[kept])
    assert_as_sampled(found)


def test_the_same_seed_gives_the_same_samples_in_any_order():
    hot = one(3, temperature=4.0)
    few = solve(sampler("conversation", options={"turns": 2}, concurrency=1), [hot])
    many = solve(sampler("conversation", options={"turns": 2}), [hot])
    for left, right in zip(few, many, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
    assert len({tuple(t.tokens.tolist()) for t in many}) == 3


def test_helpers_and_second_tries_are_branches_of_the_sample():
    (found,) = solve(sampler("team"), [one()])
    assert found.stop_reason == StopReason.ANSWER
    assert found.metadata["given_reward"] == 0.25
    # Five requests, one of two samples: the manager's conversation, two helpers, the other try.
    assert found.metadata["agent_turns"] == 6
    assert len(found.branches) == 3
    sampled = [np.flatnonzero(t.author == Author.POLICY) for t in found.sequences]
    # Every answer is learned once: three of the manager, and one of each branch.
    runs = [int((np.diff(places) > 1).sum()) + 1 for places in sampled]
    assert runs == [3, 1, 1, 1]
    assert found.num_policy_tokens == sum(map(len, sampled))
    for sequence in found.sequences:
        assert_as_sampled(sequence)
        assert sequence.metadata["policy_versions"] == [[0, 0]]
    (other,) = [t for t in found.branches if t.tokens[:20].tolist() == found.tokens[:20].tolist()]
    start = int(np.argmax(other.author == Author.POLICY))
    # The plan before the second try is read there, not learned again.
    assert start > int(np.argmax(found.author == Author.POLICY))
    back = Trajectory.from_json(json.loads(json.dumps(found.to_json())))
    for left, right in zip(back.sequences, found.sequences, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.author, right.author)


def test_a_stop_string_that_the_program_writes_again_belongs_to_what_was_sampled():
    (found,) = solve(sampler("streamed"), [one()])
    assert found.metadata["agent_turns"] == 2
    assert not found.branches
    assert found.text.startswith(found.answer + "</think>")
    assert_as_sampled(found)


def test_a_reward_may_come_by_a_call():
    (found,) = solve(sampler("rewarded_by_call"), [one()])
    assert found.stop_reason == StopReason.ANSWER
    assert found.metadata["given_reward"] == 0.5
    assert 0 < found.num_policy_tokens <= 4


def test_a_full_context_and_too_many_requests_are_the_policys_ends():
    (full,) = solve(sampler("to_the_end"), [one()])
    assert full.stop_reason == StopReason.LENGTH
    assert LENGTH - 60 < len(full.tokens) <= LENGTH
    (many,) = solve(sampler("to_the_end", max_requests=2, options={"tokens": 2}), [one()])
    assert many.stop_reason == StopReason.TURNS
    assert many.metadata["agent_turns"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_programs_functions_stay_exact_tokens(monkeypatch, stream):
    class Calls(TokenTable):
        """Every token reads as a whole call, because random weights write none."""

        def __init__(self) -> None:
            pass

        def __getitem__(self, token_id: int) -> bytes:
            return b'<tool_call>{"name": "look", "arguments": {"at":[1,"x"]}}</tool_call>!'

    monkeypatch.setattr(service, "token_table", lambda _: Calls())
    budget = RolloutConfig(max_tokens=640)
    on = sampler("caller", length=640, budget=budget, options={"stream": stream})
    (found,) = solve(on, [one()])
    assert found.stop_reason == StopReason.ANSWER
    ends, said = json.loads(found.answer)
    assert ends == ["tool_calls"] * 2
    function = {"name": "look", "arguments": json.dumps({"at": [1, "x"]}, indent=1)}
    assert [call["function"] for call in said] == [function]
    assert found.metadata["agent_turns"] == 2 and not found.branches
    assert (found.author == Author.POLICY).sum() == 2
    assert_as_sampled(found)
    between = [s.text for s in found.segments if s.author is Author.ENVIRONMENT]
    frame = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
    frame += "<|im_start|>assistant\n"
    assert between == [frame.format(f"Seen, {turn}.") for turn in range(1)]
    prompt = tiny_policy.policy().tokenizer.decode(found.tokens[found.author == Author.PROMPT])
    assert json.dumps(LOOK) in prompt


def test_a_function_that_fails_masks_its_sample_and_one_that_always_fails_ends_the_run():
    (found,) = solve(sampler("broken"), [one()])
    assert found.stop_reason == StopReason.FAULT
    assert found.metadata["fault"] == f"ValueError: no luck with {found.question}"
    with pytest.raises(UserError, match="failed 8 times and never succeeded: ValueError: no luck"):
        solve(sampler("broken"), [one(20)])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("silent", "the endpoint refused its requests: model: is missing"),
        ("elsewhere", "it sent no request to the policy"),
    ],
)
def test_a_program_that_got_no_completion_is_masked_and_ends_the_run_if_all_do(function, reason):
    (found,) = solve(sampler(function), [one()])
    assert found.stop_reason == StopReason.FAULT
    assert found.metadata["fault"].startswith(reason)
    assert found.num_policy_tokens == 0
    with pytest.raises(UserError, match=f"failed 8 times and never succeeded: {reason}"):
        solve(sampler(function), [one(20)])


def test_samples_of_a_policy_without_finite_logits_are_masked():
    params = jax.tree.map(lambda x: x * jnp.nan, tiny_policy.policy().params)
    (found,) = solve(sampler("forgiving", params=params), [one()])
    assert found.stop_reason == StopReason.FAULT
    assert found.metadata["fault"] == "the policy's log-probabilities are not finite"


def test_a_first_request_beyond_the_context_is_told_with_the_settings(caplog):
    found = solve(sampler("verbose"), [one(9)])
    assert {t.stop_reason for t in found} == {StopReason.LENGTH}
    assert all(t.metadata["policy_versions"] == [[0, 0]] for t in found)
    (told,) = [r.getMessage() for r in caplog.records if "without a completion" in r.getMessage()]
    assert f"{LENGTH} tokens" in told
    assert "rollout.max_tokens" in told and "(stop reason length)" in told


def test_a_deadline_and_a_cancelled_request_leave_the_engine_free():
    began = time.monotonic()
    (late,) = solve(sampler("asleep", seconds=1.0), [one()])
    assert late.stop_reason == StopReason.DEADLINE
    request = one(6)
    found = solve(sampler("asleep"), [request], begun=lambda on: on.cancel(request))
    assert {t.stop_reason for t in found} == {StopReason.CANCELLED}
    assert [t.sample_id for t in found] == [0, 1, 2, 3, 4, 5]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "blocking"}, "is not async; write 'async def'"),
        ({"function": "nobody"}, "has no 'nobody'"),
        ({"function": "client"}, "needs 'base_url'|takes|is not async"),
        ({"command": "run 'it"}, "command cannot be parsed as a command line: No closing quot"),
        ({"command": "run", "function": "broken"}, "command and function are both set"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        sampler(**settings)


def test_a_turn_prefills_only_what_is_new_and_no_bit_depends_on_that(monkeypatch):
    found, computed = {}, {}
    for reuse in (True, False):
        if not reuse:
            monkeypatch.setattr(scheduler, "source_of", lambda *_: (None, 0))
        before = engine(max_length=LENGTH).meter.extended_tokens
        (found[reuse],) = solve(sampler("conversation"), [one(temperature=3.0)])
        computed[reuse] = engine(max_length=LENGTH).meter.extended_tokens - before
    assert found[True].metadata["agent_turns"] == 10
    np.testing.assert_array_equal(found[True].tokens, found[False].tokens)
    np.testing.assert_array_equal(found[True].logp, found[False].logp)
    # Programs compute blocks of 64 tokens: one for each later turn, against one to six.
    assert computed[True] < computed[False] / 2
