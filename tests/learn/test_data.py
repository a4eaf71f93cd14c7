"""The input pipeline: every record once an epoch, and a position that is one integer."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from coa_jax.errors import UserError
from coa_jax.learn.batch import record_example
from coa_jax.learn.data import example_stream, fitting_records, next_batches
from coa_jax.protocol import Prompt
from coa_jax.small.bpe import train_bpe
from coa_jax.trajectory import DistilledRecord

RECORDS = [
    DistilledRecord(
        str(i),
        f"Who is number {i}?",
        "generalist",
        (f"Name{i}",),
        (("policy", f"<think>{'so ' * (i % 4)}</think>\n<answer>Xabier {i}</answer>"),),
        f"{i}",
    )
    for i in range(12)
]


@functools.cache
def tokenizer():
    return train_bpe(["who is the number"], 300)


def stream(seed=0, change=None):
    return example_stream(
        tokenizer(),
        [RECORDS],
        prompt=Prompt("brief"),
        length=200,
        seed=seed,
        change=change,
    )


def epoch(of, number):
    return [tuple(of[number * 12 + i].tokens.tolist()) for i in range(12)]


def test_parts_are_mixed_by_their_weights():
    def text(example):
        return tokenizer().decode(example.tokens)

    parts = [RECORDS[:4], RECORDS[4:]]
    mixed = example_stream(
        tokenizer(), parts, prompt=Prompt("brief"), length=200, seed=0, weights=(3.0, 1.0)
    )
    numbers = [int(text(mixed[i]).partition("number ")[2].partition("?")[0]) for i in range(40)]
    assert sum(number < 4 for number in numbers) == 30
    assert sorted(set(numbers)) == list(range(12))


def test_each_epoch_has_every_record_once_in_another_order():
    expected = {
        tuple(record_example(tokenizer(), r, Prompt("brief")).tokens.tolist()) for r in RECORDS
    }
    epochs = [epoch(stream(), number) for number in range(3)]
    for one in epochs:
        assert len(one) == 12
        assert set(one) == expected
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == epoch(stream(), 0)
    assert epochs[0] != epoch(stream(seed=1), 0)


def test_the_cursor_alone_says_where_a_run_goes_on():
    def batches(of, cursor, count):
        for _ in range(count):
            parts, cursor = next_batches(of, cursor, batch_size=5, rows=2, length=200)
            yield cursor, parts

    whole = list(batches(stream(), 0, 5))
    again = list(batches(stream(), whole[1][0], 3))
    for (cursor, parts), (expected_cursor, expected) in zip(again, whole[2:], strict=True):
        assert cursor == expected_cursor
        for part, other in zip(parts, expected, strict=True):
            for left, right in zip(part, other, strict=True):
                np.testing.assert_array_equal(left, right)
    assert whole[-1][0] == 25


def test_an_update_holds_each_of_its_examples_once():
    of = stream()
    parts, cursor = next_batches(of, 7, batch_size=6, rows=2, length=200)
    packed = sum(int(part.segment_ids.astype(bool).sum()) for part in parts)
    assert packed == sum(len(of[i].tokens) for i in range(7, 13))
    assert cursor == 13
    assert {part.tokens.shape for part in parts} == {(2, 200)}


def number_at_random(record, rng):
    return dataclasses.replace(record, question=f"Who is number {rng.integers(1000)}?")


def test_a_change_depends_on_the_position_alone():
    left, right = stream(change=number_at_random), stream(change=number_at_random)
    assert epoch(left, 1) == epoch(right, 1)
    assert left[30].tokens.tolist() == right[30].tokens.tolist()
    assert set(epoch(left, 1)) != set(epoch(left, 2)) != set(epoch(stream(), 1))
    assert epoch(left, 1) != epoch(stream(seed=1, change=number_at_random), 1)


def test_a_record_that_would_be_too_long_once_changed_is_used_as_it_was():
    grown = stream(change=lambda record, rng: dataclasses.replace(record, question="Who? " * 99))
    assert epoch(grown, 1) == epoch(stream(), 1)


def test_records_that_are_too_long_are_left_out(caplog):
    lengths = [len(record_example(tokenizer(), r, Prompt("brief")).tokens) for r in RECORDS]
    limit = sorted(lengths)[5]
    kept, longest = fitting_records(
        tokenizer(), RECORDS, prompt=Prompt("brief"), length=limit, source="data.jsonl"
    )
    assert longest == limit
    assert kept == [r for r, n in zip(RECORDS, lengths, strict=True) if n <= limit]
    assert "data.jsonl: 6 of 12 records have more than" in caplog.text
    with pytest.raises(UserError, match="none of the 12 records fits in 9 tokens"):
        fitting_records(tokenizer(), RECORDS, prompt=Prompt("brief"), length=9, source="data.jsonl")
