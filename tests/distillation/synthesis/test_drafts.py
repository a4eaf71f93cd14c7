import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.distillation.synthesis.drafts import (
    Document,
    Draft,
    Duplicates,
    TextRules,
    contains_answer,
    fault_of,
    screen,
)
from coa_jax.tasks.base import split_of

PERU = Document("Peru: Capital", "The capital of Peru is Lima.")
GOOD = Draft(
    "atomic",
    "What is the capital of Peru?",
    ("Lima",),
    (PERU,),
    (("What is the capital of Peru?", "Lima"),),
)


def changed(**fields):
    return dataclasses.replace(GOOD, **fields)


def test_a_good_draft_has_no_fault():
    assert fault_of(GOOD, TextRules()) is None


@pytest.mark.parametrize(
    ("draft", "fault"),
    [
        (changed(question="Capital of Peru?"), "question_length"),
        (changed(question="word " * 81), "question_length"),
        (changed(gold=()), "no_answer"),
        (changed(gold=("...",)), "no_answer"),
        (changed(gold=(" ".join(["Lima"] * 13),)), "answer_length"),
        (changed(question="Which capital does this passage name?"), "speaks_of_the_text"),
        (changed(question="Is Lima the capital of Peru?"), "answer_told"),
        (changed(question="Is LIMA, then, its capital?"), "answer_told"),
        (changed(gold=("Quito|Lima",), question="What about Quito in Peru?"), "answer_told"),
        (changed(hidden=("Peru",)), "intermediate_told"),
        (changed(gold=("Quito",)), "answer_not_in_document"),
        (changed(gold=("Lima|Quito",)), "answer_not_in_document"),
    ],
)
def test_each_fault_is_named(draft, fault):
    assert fault_of(draft, TextRules()) == fault


def test_part_of_a_word_tells_nothing():
    assert not contains_answer(["Oman"], "Who is the most romantic Romanian woman?")
    assert contains_answer(["Côte d'Ivoire"], "the cote divoire, its people")
    assert not contains_answer(["..."], "anything")


WORDS = st.lists(st.sampled_from(["lima", "peru", "river", "of", "ana", "nalima"]), min_size=1)


@given(WORDS, WORDS, WORDS)
def test_an_answer_is_told_exactly_if_its_words_stand_there_in_a_row(before, answer, after):
    text = " ".join([*before, *answer, *after])
    assert contains_answer([" ".join(answer)], text)
    rows = [before[i : i + len(answer)] for i in range(len(before))]
    assert contains_answer([" ".join(answer)], " ".join(before)) == (answer in rows)


def test_what_was_asked_before_is_a_duplicate_and_another_subject_is_not():
    rules, seen = TextRules(), Duplicates(0.8)
    chile = Document("Chile: Capital", "The capital of Chile is Lima.")
    drafts = [
        GOOD,
        changed(question="What is the capital of Peru"),
        changed(question="So what is the capital of Peru?"),
        changed(question="What is the capital of Chile?", documents=(chile,)),
    ]
    assert screen(drafts, rules, seen) == [None, "duplicate", "duplicate", None]
    assert screen([GOOD], rules, seen) == ["duplicate"]


def test_a_faulty_draft_takes_nobodys_place():
    seen = Duplicates(0.8)
    assert screen([changed(hidden=("Peru",)), GOOD], TextRules(), seen)[1] is None


def test_the_split_is_that_of_the_subject():
    assert Document("Peru: Capital", "x").split == split_of("Peru")
    assert Document("", "no title").split == split_of("no title")
