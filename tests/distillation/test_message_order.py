import dataclasses

import pytest

from coa_jax.data.records import read_records
from coa_jax.data.trajectory import write_records
from coa_jax.distillation.inspect import page
from coa_jax.distillation.message_order import (
    Completion,
    Unconvertible,
    reorder_messages,
    trajectory_of,
)
from coa_jax.distillation.messages import Kind
from coa_jax.distillation.readers.base import Trace
from coa_jax.distillation.recorded import log_of as log_of_record
from coa_jax.distillation.recorded import with_figures
from coa_jax.protocol import get_protocol, spec
from tests.distillation.logs import INVENTING, log_of


def reviewed(words):
    """(review, thought before the answer) of a run of the code protocol."""
    rows = [("plan", "1. compute"), ("call", "```py\n1\n```", "I do.", "code")]
    rows += [("observation", "42", "", "code"), ("answer", "42", words)]
    messages = reorder_messages(log_of(*rows), "code").messages
    (review,) = (m.content for m in messages if m.kind is Kind.REFLECTION)
    return review, messages[-1].thought


@pytest.mark.parametrize(
    ("words", "review", "rest"),
    [
        ("It printed 42. Good.", "It printed 42.", "Good."),
        ("1. The result is right.\n2. Done.", "1. The result is right.", "2. Done."),
        ("It is approx. 42, as wanted. So.", "It is approx. 42, as wanted.", "So."),
        ("As J. Smith says, e.g. here. So.", "As J. Smith says, e.g. here.", "So."),
        ("Good. It works. So.", "Good. It works.", "So."),
        ("It works as wanted", "It works as wanted", ""),
        (
            "\u7ed3\u679c\u6b63\u786e\u3002\u7b54\u6848\u662f",
            "\u7ed3\u679c\u6b63\u786e\u3002",
            "\u7b54\u6848\u662f",
        ),
    ],
)
def test_a_review_is_a_whole_sentence_that_says_something(words, review, rest):
    assert reviewed(words) == (review, rest)


@pytest.mark.parametrize("words", ["1.", "ok", "1. Good.", "\n...\n"])
def test_words_that_say_nothing_are_no_review(words):
    with pytest.raises(Unconvertible, match="a result is not reviewed"):
        reviewed(words)


def test_a_long_text_without_words_is_looked_through_once():
    with pytest.raises(Unconvertible, match="a result is not reviewed"):
        reviewed("! " * 100_000)


def answered(suggested, answer, verdict="4"):
    rows = [("plan", "1. look"), ("suggestion", suggested), ("verdict", verdict)]
    return trajectory_of(Trace(log_of(*rows, ("answer", answer))), "web", INVENTING)[1].text


@pytest.mark.parametrize(
    ("suggested", "answer"),
    [
        ("Paris", "paris."),
        ("1,000", "1000"),
        ("Paris", "It is Paris, in France."),
        ("Paris, the capital of France", "Paris"),
        ("15 December 1832", "December 1832"),
    ],
)
def test_an_answer_may_say_in_other_words_what_was_checked(suggested, answer):
    text = answered(suggested, answer)
    assert text.count("<suggested_answer>") == 1
    assert text.endswith(f"<answer>{answer}</answer>")


@pytest.mark.parametrize(
    ("suggested", "answer"),
    [
        ("Paris", "Lyon"),
        ("Lyon", "Paris, not Lyon"),
        ("Paris or Lyon", "Paris"),
        ("5", "5 million"),
        ("5", "-5"),
        ("Par", "Paris"),
        ("", "Paris"),
    ],
)
def test_an_answer_that_nobody_checked_is_refused_where_another_one_passed(suggested, answer):
    with pytest.raises(Unconvertible, match="another one than the suggested answer that passed"):
        answered(suggested, answer)


def test_a_verdict_in_other_words_passes_the_answer():
    assert answered("Paris", "Paris", "I would say 3 of 4").count("<double_check>") == 1


def test_a_verdict_without_a_score_is_refused():
    with pytest.raises(Unconvertible, match="the answer is not verified"):
        answered("Paris", "Paris", "Doubtful; seen in 2024 only")


def test_what_the_level_paper_demands_is_written_out_or_refused():
    found = [("call", "capital of Peru", "I look."), ("observation", "Lima."), ("answer", "Lima")]
    assert [m.kind for m in reorder_messages(log_of(*found), "mhqa").messages][1] is Kind.CALL
    log, record = trajectory_of(Trace(log_of(*found), ("Lima",)), "mhqa:paper", INVENTING)
    assert [m.kind for m in log.messages][1] is Kind.PLAN
    assert record.protocol == "mhqa:paper"
    ran = [("plan", "1. compute"), ("call", "```py\n1\n```", "I do.", "code")]
    ran += [("observation", "42", "", "code"), ("answer", "42", "It printed 42.")]
    trajectory_of(Trace(log_of(*ran), ("42",)), "generalist", INVENTING)
    with pytest.raises(Unconvertible, match="has neither a review nor a grade"):
        trajectory_of(Trace(log_of(*ran), ("42",)), "generalist:paper", INVENTING)


FOREIGN = [("plan", "1. look"), ("call", "capital of Peru"), ("observation", "Lima.")]


@pytest.mark.parametrize(
    ("protocol", "how", "gold", "reason"),
    [
        ("web_wiki", None, ("Lima",), "the answer is not verified .traces.completion.verification"),
        ("mhqa", None, ("Lima",), "no thought before <plan> .traces.completion.thoughts"),
        ("web_wiki", Completion(verification=True), ("Lima",), "no thought before <plan>"),
        ("web_wiki", INVENTING, ("Quito",), "equals no accepted answer"),
        ("web_wiki", INVENTING, (), "equals no accepted answer"),
    ],
)
def test_nothing_is_invented_by_default_and_no_score_without_a_right_answer(
    protocol, how, gold, reason
):
    with pytest.raises(Unconvertible, match=reason):
        trajectory_of(Trace(log_of(*FOREIGN, ("answer", "Lima")), gold), protocol, how)


@pytest.mark.parametrize(
    ("result", "answer", "gold", "score"),
    [
        ("The capital is LIMA, since 1535.", "Lima", ("Lima",), 4),
        ("It printed 1,000", "1000", ("1000",), 4),
        ("lima", "\\boxed{Lima}", ("Lima",), 4),
        ("Limassol is in Cyprus.", "Lima", ("Lima",), 3),
        ("no results", "Lima", ("Lima",), 3),
    ],
)
def test_an_invented_score_says_whether_a_result_contains_the_answer(result, answer, gold, score):
    run = [*FOREIGN[:2], ("observation", result), ("answer", answer)]
    _, record = trajectory_of(Trace(log_of(*run), gold), "web_wiki", INVENTING)
    assert (
        f"<double_check>The score of the suggested answer is {score}.</double_check>" in record.text
    )


def test_an_invented_score_must_pass_under_the_protocol(monkeypatch):
    strict = dataclasses.replace(get_protocol("web_wiki"), pass_score=4)
    monkeypatch.setattr(spec, "_PROTOCOLS", {**spec._PROTOCOLS, "web_wiki": strict})
    run = [*FOREIGN[:2], ("observation", "no results"), ("answer", "Lima")]
    with pytest.raises(Unconvertible, match="not verified and no tool result contains it"):
        trajectory_of(Trace(log_of(*run), ("Lima",)), "web_wiki", INVENTING)


def test_a_run_that_says_enough_is_converted_without_inventions():
    said = [(*row, "I think so.") if row[0] != "observation" else row for row in FOREIGN]
    _, record = trajectory_of(Trace(log_of(*said, ("answer", "Lima", "Seen."))), "mhqa")
    assert "invented" not in record.metadata and "I use" not in record.text


def test_invented_segments_are_marked_kept_and_not_counted(tmp_path):
    _, record = trajectory_of(
        Trace(log_of(*FOREIGN, ("answer", "Lima", "It is Lima.")), ("Lima",)), "web_wiki", INVENTING
    )
    # Segments: think, plan, think, wiki_search, think, suggested_answer, think, double_check, ...
    assert record.metadata["invented"] == [0, 2, 5, 6, 7]
    assert record.metadata["double_checks"] == 0
    write_records(tmp_path / "data.jsonl", [record])
    (again,) = read_records(tmp_path / "data.jsonl")
    assert with_figures(again, log_of_record(again)).metadata["double_checks"] == 0
    lines = [line for line in page(again).splitlines() if "[invented]" in line]
    assert [line.split()[0] for line in lines] == [
        *("think", "think", "suggested_answer", "think", "double_check")
    ]
