"""Renaming changes names that could be memorised, and leaves the task as it is."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.trajectory import DistilledRecord, part_violations
from coa_jax.demo.bpe import train_bpe
from coa_jax.protocol import Prompt
from coa_jax.train.renaming import NamePieces, rename, renaming

RECORD = DistilledRecord(
    id="x",
    question="Add the populations of Chad and Peru.",
    protocol="generalist",
    gold=("1,234,569",),
    parts=(
        (
            "policy",
            "<think>Find both.</think>\n<plan>1. Chad\n2. Peru</plan>\n<think>Step 1.</think>\n"
            "<wiki_search>population of Chad</wiki_search>",
        ),
        (
            "environment",
            "\n<observation>\nDoc 1 (Title: Chad: Population)\nChad has 1,234,567.\n"
            "</observation>\n\n",
        ),
        (
            "policy",
            "<think>#1 is 1,234,567. Add 2.</think>\n<code>```py\nprint(1234567 + 2)\n```</code>",
        ),
        ("environment", "\n<observation>\n[EXECUTED]\n1234569\n</observation>\n\n"),
        (
            "policy",
            "<think>Done.</think>\n<reflection>information_conflict: Good\n"
            "tool_effectiveness: Fair\ntrajectory_monitoring: Good</reflection>\n"
            "<think>So.</think>\n<suggested_answer>1234569</suggested_answer>\n"
            "<think>Right.</think>\n<double_check>The score of the suggested answer is 4."
            "</double_check>\n<answer>1234569</answer>",
        ),
    ),
    answer="1234569",
)
KEEP = frozenset({"Step", "The", "Add"})
PIECES = NamePieces(("Ban", "Ko", "Uru"), ("do", "ka", "mi", "quel", "sta"))


@given(st.integers(0, 2**32 - 1))
def test_a_renamed_record_is_consistent_and_obeys_the_protocol(seed):
    renamed = rename(RECORD, KEEP, PIECES, np.random.default_rng(seed))
    assert part_violations("generalist", renamed.parts) == part_violations(
        "generalist", RECORD.parts
    )
    whole = renamed.question + renamed.text
    assert "Chad" not in whole and "Peru" not in whole and "1234567" not in whole
    name = renamed.parts[0][1].split("population of ")[1].split("<")[0]
    assert f"Title: {name}: " in renamed.parts[1][1] and f"of {name} and" in renamed.question
    number = renamed.parts[1][1].split("has ")[1].split(".")[0]
    assert f"#1 is {number}." in renamed.parts[2][1]
    assert f"print({number.replace(',', '')} + 2)" in renamed.parts[2][1]
    assert renamed.answer == renamed.gold[0].replace(",", "") != RECORD.answer


def test_a_number_that_only_the_accepted_answer_has_is_replaced_too():
    # A run that was wrong; only unfiltered sets have such.
    wrong = dataclasses.replace(RECORD, gold=("7,654,321", "about 1,234,569"))
    renamed = rename(wrong, KEEP, PIECES, np.random.default_rng(0))
    known = rename(RECORD, KEEP, PIECES, np.random.default_rng(0))
    assert (renamed.question, renamed.parts) == (known.question, known.parts)
    assert renamed.gold[0] != wrong.gold[0] and len(renamed.gold[0]) == 9
    assert renamed.gold[1] == f"about {known.gold[0]}"


def test_template_words_grades_and_authors_stay():
    renamed = rename(RECORD, KEEP, PIECES, np.random.default_rng(0))
    assert [author for author, _ in renamed.parts] == [author for author, _ in RECORD.parts]
    for word in ("Step 1.", "Add the", "Doc 1 (Title: ", "[EXECUTED]", ": Fair", "The score"):
        assert word in renamed.question + renamed.text


def test_the_same_generator_gives_the_same_record():
    first, second = (rename(RECORD, KEEP, PIECES, np.random.default_rng(7)) for _ in range(2))
    assert first == second


def test_every_piece_of_the_vocabulary_is_asked_for():
    class Tokenizer:
        tokens = ("<think>", "A", "Ban", " Ko", "do", " mi", "12", "...", "QX", "\ufffd")

        def __len__(self):
            return len(self.tokens)

        def decode(self, ids):
            return "".join(self.tokens[index] for index in ids)

    pieces = NamePieces.of(Tokenizer())
    assert pieces == NamePieces(("A", "Ban", "Ko"), ("do", "mi"))
    rng = np.random.default_rng(0)
    names = {pieces.name(rng) for _ in range(200)}
    assert all(name.isalpha() and len(name) > 2 for name in names)
    starts = ("A", "Ban", "Ko", "Do", "Mi", "do", "mi")
    assert all(any(name.startswith(start) for name in names) for start in starts)


def test_a_share_of_the_records_is_renamed_each_time_anew():
    assert renaming(0.0) is None
    tokenizer, prompt = train_bpe(["The tokens of new names"], 300), Prompt("brief")
    # A word of most records belongs to their template.
    others = [dataclasses.replace(RECORD, question=f"Add {i}.", parts=()) for i in range(19)]
    change = renaming(0.4)(tokenizer, [RECORD, *others], prompt)
    made = [change(RECORD, np.random.default_rng(seed)) for seed in range(200)]
    renamed = [record for record in made if record != RECORD]
    assert 60 < len(renamed) < 100
    assert all(record.metadata["renamed"] for record in renamed)
    assert all("Chad" not in r.text and r.question.startswith("Add the") for r in renamed)
    assert len({r.text for r in renamed}) == len(renamed)
    again = change(RECORD, np.random.default_rng(3))
    assert again == made[3]
