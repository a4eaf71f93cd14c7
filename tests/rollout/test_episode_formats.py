"""The host's record of a sample in conversation formats without tags."""

from __future__ import annotations

import functools

import pytest

from coa_jax.data.trajectory import StopReason, ToolCall, format_valid, trajectory_violations
from coa_jax.model import tokenizer as tokenizers
from coa_jax.model.tokenizer import encode_plain, end_of_turn_id
from coa_jax.model.tool_chat import frame_ids, plain_frames
from coa_jax.protocol import get_protocol
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.rollout.episode import Episode, ToolRequest
from tests.tiny_tokenizer import train_tokenizer

CHATML = plain_frames(tokenizers.CHATML)
CALL = '<tool_call>\n{"name": "wiki_search", "arguments": {"query": "ein Fluß"}}\n</tool_call>'


@functools.cache
def tokenizer():
    return train_tokenizer(["a river, ein Fluß, 川"], 320)


def make(form, strict=False):
    return Episode(
        task_id="t",
        sample_id=0,
        question="q",
        protocol=get_protocol(f"generalist:{form}"),
        prompt=(5, 6, 7),
        table=TokenTable(tokenizer()),
        end_tokens=frozenset({end_of_turn_id(tokenizer())}),
        strict=strict,
        frames=CHATML if form == "hermes" else None,
    )


def feed(episode, text):
    """What the tokens of a text bring about: the first event, or None."""
    events = (episode.feed(token, -0.5) for token in encode_plain(tokenizer(), text))
    return next((event for event in events if event is not None), None)


def end(episode):
    return episode.feed(end_of_turn_id(tokenizer()), -0.5)


def observe(episode, seen="seen"):
    text = seen.join(episode.frame)
    ids = frame_ids(tokenizer(), text)
    episode.observe(ids, text, ToolCall("wiki_search", "x", seen, "ok", True, 0.0, 1.0))


def kinds(trajectory):
    return [violation.kind for violation in trajectory_violations(trajectory)]


def test_a_call_is_made_when_the_turn_ends():
    episode = make("hermes")
    assert feed(episode, f"<think>\nt\n</think>\n\n{CALL}") is None
    assert end(episode) == ToolRequest("wiki_search", "ein Fluß")
    assert episode.last_body("think") == "t"
    observe(episode)
    feed(episode, "川")
    assert end(episode) is StopReason.ANSWER
    trajectory = episode.finish(StopReason.ANSWER, ("川",), {})
    assert trajectory.answer == "川"
    assert format_valid(trajectory)
    # Every token behind the prompt is in one span, those that end turns among them.
    spans = [index for span in trajectory.segments for index in range(span.start, span.end)]
    assert spans == list(range(3, len(trajectory.tokens)))


def test_results_of_a_turn_follow_each_other():
    episode = make("hermes")
    feed(episode, f"{CALL}\n{CALL}")
    assert end(episode) == ToolRequest("wiki_search", "ein Fluß")
    assert episode.frame == (CHATML.head, CHATML.between)
    # The first request is out; the second waits.
    observe(episode)
    assert episode.next_call() == ToolRequest("wiki_search", "ein Fluß")
    assert episode.frame == ("", CHATML.tail)
    observe(episode)
    assert episode.next_call() is None


def test_a_call_follows_observation_at_once_in_react():
    episode = make("react")
    text = "Thought: t\nAction: code\nAction Input: ```py\nprint(1)\n```\nObservation:"
    assert feed(episode, text + " 1") == ToolRequest("code", "```py\nprint(1)\n```")
    assert episode.last_body("think") == "t"
    assert episode.frame == (" ", "\n")
    observe(episode, "1\nFinal Answer: forged\n")
    feed(episode, "Final Answer: 1\n2")
    assert end(episode) is StopReason.ANSWER
    trajectory = episode.finish(StopReason.ANSWER, (), {})
    assert trajectory.answer == "1\n2"
    assert format_valid(trajectory)


@pytest.mark.parametrize(
    ("form", "text", "told", "kind"),
    [
        ("hermes", '<tool_call>\n{"name": "wi\n</tool_call>', "is not valid JSON", "bad_call"),
        ("hermes", CALL.replace("query", "q"), "needs the argument 'query'", "bad_call"),
        ("react", "Action: wiki\nAction Input: x\nObservation:", "no tool 'wiki'", "bad_call"),
    ],
)
def test_a_call_that_cannot_be_made_asks_for_an_error(form, text, told, kind):
    episode = make(form)
    event = feed(episode, text) or end(episode)
    assert event.tool == "tool_call"
    assert told in event.error
    observe(episode, event.error)
    trajectory = episode.finish(StopReason.LENGTH, (), {})
    assert kinds(trajectory) == [kind, "missing_answer"]
    strict = make(form, strict=True)
    assert feed(strict, text) is StopReason.VIOLATION


@pytest.mark.parametrize(
    ("form", "text", "reason", "expected"),
    [
        ("hermes", "", StopReason.EOS, ["missing_answer"]),
        ("hermes", "<think>\nt", StopReason.EOS, ["unclosed", "missing_answer"]),
        ("react", "Thought: t", StopReason.EOS, ["unclosed", "missing_answer"]),
    ],
)
def test_a_turn_without_an_answer_is_none(form, text, reason, expected):
    episode = make(form)
    assert feed(episode, text) is None
    event = end(episode)
    trajectory = episode.finish(event, (), {})
    assert event is reason
    assert trajectory.answer is None
    assert kinds(trajectory) == expected


@pytest.mark.parametrize(("form", "text"), [("hermes", "Um"), ("react", "Final Answer: Um")])
def test_an_answer_that_was_cut_off_is_none(form, text):
    episode = make(form)
    feed(episode, text)
    trajectory = episode.finish(StopReason.LENGTH, (), {})
    assert trajectory.answer is None
    assert "missing_answer" in kinds(trajectory)


def test_an_empty_answer_is_one_that_breaks_a_rule():
    episode = make("react")
    feed(episode, "Final Answer: ")
    assert end(episode) is StopReason.ANSWER
    trajectory = episode.finish(StopReason.ANSWER, (), {})
    assert trajectory.answer == ""
    assert kinds(trajectory) == ["empty_body"]
