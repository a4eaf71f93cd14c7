"""The input pipeline: the same updates whoever reads them, and a position that is one integer."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.records import Records
from coa_jax.data.trajectory import DistilledRecord, write_records
from coa_jax.errors import UserError
from coa_jax.protocol import Prompt
from coa_jax.train.batch import Example, first_fit, pack, split_rows
from coa_jax.train.data import (
    RecordReader,
    Updates,
    examples_in_memory,
    examples_of,
    join,
    read_ahead,
    shuffled,
)
from coa_jax.train.examples import record_example
from coa_jax.train.lengths import fitting, measure
from tests.tiny_tokenizer import train_tokenizer

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
BRIEF = Prompt("brief")
LENGTH = 200


@functools.cache
def tokenizer():
    return train_tokenizer(["who is the number"], 300)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    write_records(path, RECORDS)
    return RecordReader(Records(path), tokenizer(), BRIEF)


@pytest.fixture(scope="module")
def examples(reader):
    return fitting(reader, measure(reader, 0, 60.0), LENGTH)


def updates(examples, **changes):
    values = {
        "order": shuffled([len(examples)], (1.0,), changes.pop("seed", 0)),
        "cursor": 0,
        "number": 9,
        "batch_size": 5,
        "rows": 2,
        "length": LENGTH,
        "own": range(2),
    }
    return Updates(examples=examples, **{**values, **changes})


def epoch(of, number):
    """Tokens of the 12 examples of a pass, in their order."""
    whole = dataclasses.replace(of, cursor=12 * number, number=12, batch_size=1, rows=1, own=[0])
    return [tuple(whole[i].batches[0].tokens[0, : whole[i].lengths[0]].tolist()) for i in range(12)]


def same(left, right):
    assert (left.rows, left.lengths, left.tokens, left.cursor) == (
        *(right.rows, right.lengths, right.tokens, right.cursor),
    )
    for one, other in zip(left.batches, right.batches, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


# --- what an update has ----------------------------------------------------------------------


def test_each_epoch_has_every_record_once_in_another_order(examples):
    expected = {tuple(record_example(tokenizer(), r, BRIEF).tokens.tolist()) for r in RECORDS}
    epochs = [epoch(updates(examples), number) for number in range(3)]
    for one in epochs:
        assert len(one) == 12
        assert set(one) == expected
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == epoch(updates(examples), 0)
    assert epochs[0] != epoch(updates(examples, seed=1), 0)


def test_parts_are_mixed_by_their_weights():
    order = shuffled([4, 8], (3.0, 1.0), 0)
    numbers = [order[i] for i in range(40)]
    assert sum(number < 4 for number in numbers) == 30
    assert sorted(set(numbers)) == list(range(12))


def test_an_update_is_packed_as_its_examples_are(examples):
    of = updates(examples)
    indices = [of.order[i] for i in range(5, 10)]
    records = [record_example(tokenizer(), RECORDS[i], BRIEF) for i in indices]
    wanted, found = split_rows(pack(records, LENGTH), 2), of[1]
    for one, other in zip(found.batches, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert found.tokens == sum(batch.mask.sum() for batch in wanted)
    assert sorted(found.lengths) == sorted(len(example.tokens) for example in records)


def test_the_cursor_alone_says_where_a_run_goes_on(examples):
    whole = updates(examples)
    again = updates(examples, cursor=whole[1].cursor, number=3)
    for number, update in enumerate(again):
        same(update, whole[number + 2])
    assert whole[4].cursor == 25
    same(updates(examples, cursor=7, batch_size=6)[0], updates(examples, cursor=1, batch_size=6)[1])


@pytest.mark.parametrize("changed", [False, True])
def test_the_rows_of_all_processes_are_those_of_one(examples, changed):
    change = number_at_random if changed else None
    rows = {"rows": 4, "batch_size": 11, "change": change, "length": 120}
    whole = updates(examples, own=range(4), **rows)
    for shares in ([[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1, 2, 3], [2]]):
        for share in shares:
            part = updates(examples, own=share, **rows)
            for number in range(3):
                mine, all_ = part[number], whole[number]
                own = [jax.tree.map(lambda x: x[share], batch) for batch in all_.batches]  # noqa: B023
                same(mine, dataclasses.replace(all_, batches=own))


def test_a_process_makes_only_the_examples_of_its_own_rows(examples):
    made = []

    def noted(place):
        made.append(place)
        return examples[place]

    sizes, losses = examples.sizes, examples.losses
    some = examples_of(noted, sizes, losses, np.arange(len(examples)))
    seen = []
    for row in range(4):
        made.clear()
        updates(some, own=[row], rows=4, batch_size=12, length=120)[0]
        seen.append(sorted(made))
    assert all(len(one) <= 6 for one in seen)
    assert sorted(place for one in seen for place in one) == list(range(12))


@given(st.lists(st.integers(1, 20), max_size=30))
def test_the_longest_sequence_goes_first_into_the_first_row_with_room(sizes):
    rows: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        room = [row for row in rows if sum(sizes[i] for i in row) + sizes[number] <= 20]
        (room[0] if room else rows.append([]) or rows[-1]).append(number)
    assert first_fit(sizes, 20) == rows


def test_sequences_in_memory_and_records_are_one_set(examples):
    zeros = np.zeros(3, np.float32)
    short = Example(np.arange(3, dtype=np.int32), np.ones(3, np.float32), zeros, zeros)
    both = join([examples_in_memory([short, short]), examples])
    assert len(both) == 14
    assert both.sizes[:2].tolist() == [3, 3]
    assert both.losses[:2].tolist() == [2, 2]  # the first token has no loss
    assert both[1] is short
    assert both[5].tokens.tolist() == examples[3].tokens.tolist()


# --- changes of records ----------------------------------------------------------------------


def number_at_random(record, rng):
    return dataclasses.replace(record, question=f"Who is number {rng.integers(1000)}?")


def test_a_change_depends_on_the_position_alone(examples):
    left, right = (updates(examples, change=number_at_random) for _ in range(2))
    assert epoch(left, 1) == epoch(right, 1)
    same(left[6], updates(examples, cursor=30, change=number_at_random)[0])
    assert set(epoch(left, 1)) != set(epoch(left, 2)) != set(epoch(updates(examples), 1))
    assert epoch(left, 1) != epoch(updates(examples, seed=1, change=number_at_random), 1)


def test_a_record_that_would_be_too_long_once_changed_is_used_as_it_was(examples):
    def grown(record, rng):
        return dataclasses.replace(record, question="Who? " * 99)

    assert epoch(updates(examples, change=grown), 1) == epoch(updates(examples), 1)


# --- reading ahead ---------------------------------------------------------------------------


class Slow:
    """Items that take a while."""

    def __init__(self):
        self.made = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        time.sleep(0.05)
        self.made.append(index)
        if index == 4:
            raise UserError("row 4 is damaged")
        return index


def test_items_are_made_before_they_are_asked_for_and_errors_come_in_their_turn():
    source = Slow()
    with read_ahead(source, 0, buffer=3) as ahead:
        deadline = time.monotonic() + 30
        while len(source.made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert source.made == [0, 1, 2]
        assert [next(ahead) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(UserError, match="row 4 is damaged"):
            next(ahead)


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, number_at_random])
def test_worker_processes_give_the_updates_of_a_thread(examples, change):
    source = updates(examples, change=change)
    with read_ahead(source, 0) as ahead:
        by_thread = list(ahead)
    with read_ahead(source, 2) as ahead:
        by_workers = list(ahead)
    assert len(by_thread) == len(by_workers) == 9
    for one, other in zip(by_thread, by_workers, strict=True):
        same(one, other)
    with read_ahead(Slow(), 2) as ahead, pytest.raises(UserError, match="row 4 is damaged"):
        assert list(ahead)


WORKING = """
import sys, time
from coa_jax.train.data import read_ahead
from tests.train.test_data import Slow
if __name__ == "__main__":
    with read_ahead(Slow(), 2) as ahead:
        next(ahead)
        print("ready", flush=True)
        time.sleep(600)
"""


@pytest.mark.slow
def test_no_worker_outlives_a_process_that_is_killed(tmp_path):
    (tmp_path / "working.py").write_text(WORKING)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, tmp_path / "working.py"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    for worker in workers:
        worker.send_signal(signal.SIGTERM)  # is for the process that trains
    time.sleep(0.5)
    assert sum(worker.is_running() for worker in workers) >= 2
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(workers, timeout=30)
    assert left == []
