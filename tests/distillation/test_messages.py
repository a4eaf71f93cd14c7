import json

import hypothesis
import pytest
from hypothesis import strategies as st

from coa_jax.distillation.messages import Ending, Kind, Message, MessageLog, from_json, to_json

TEXT = st.text(max_size=40)


@st.composite
def any_log(draw):
    count = draw(st.integers(1, 6))
    messages = tuple(
        Message(
            i,
            draw(TEXT),
            draw(TEXT),
            draw(st.sampled_from(Kind)),
            draw(TEXT),
            draw(TEXT),
            draw(st.none() | st.sampled_from(["ok", "error", "fault"])),
            draw(st.none() | st.just("query")),
        )
        for i in range(count)
    )
    ending = draw(st.sampled_from(Ending))
    return MessageLog(draw(TEXT), draw(TEXT), draw(TEXT), messages, ending, draw(TEXT))


@hypothesis.given(any_log())
def test_a_log_comes_back_from_json_unchanged(log):
    assert from_json(json.loads(json.dumps(to_json(log)))) == log


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop("episode"),
        lambda row: row.update(ending="bored"),
        lambda row: row.update(messages=[]),
        lambda row: row["messages"][0].update(index=3),
        lambda row: row["messages"][0].update(kind="shout"),
        lambda row: row["messages"][0].pop("sender"),
        lambda row: row.update(messages=7),
    ],
)
def test_what_is_not_a_log_is_refused(damage):
    question = Message(0, "user", "manager", Kind.QUESTION, "Q?")
    row = to_json(MessageLog("e", "Q?", "generalist", (question,), Ending.LIMIT))
    damage(row)
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json(row)


def test_answer_calls_and_slips_are_read_off_the_messages():
    messages = (
        Message(0, "user", "manager", Kind.QUESTION, "Q?"),
        Message(1, "search", "wiki_search", Kind.CALL, "a", slip="query"),
        Message(2, "wiki_search", "search", Kind.OBSERVATION, "b", outcome="ok"),
        Message(3, "manager", "user", Kind.ANSWER, "42"),
    )
    log = MessageLog("e", "Q?", "generalist", messages, Ending.ANSWER)
    assert (log.answer, log.calls, log.mistakes) == ("42", (("wiki_search", "a"),), ("query",))
    unanswered = MessageLog("e", "Q?", "generalist", messages[:3], Ending.LIMIT)
    assert unanswered.answer is None
