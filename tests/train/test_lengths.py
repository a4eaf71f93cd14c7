"""Token counts of records: exact, taken once, and of the files as they are."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from coa_jax.data.records import Records
from coa_jax.data.trajectory import write_records
from coa_jax.errors import UserError
from coa_jax.protocol import Prompt
from coa_jax.train import lengths
from coa_jax.train.batch import pack
from coa_jax.train.data import RecordReader
from coa_jax.train.examples import record_example
from coa_jax.train.lengths import fitting, measure
from tests.train.test_data import BRIEF, RECORDS, tokenizer


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("COA_JAX_LENGTHS", str(tmp_path / "cache"))
    write_records(tmp_path / "train.jsonl", RECORDS)
    return tmp_path / "train.jsonl"


def reader(path, prompt=BRIEF):
    return RecordReader(Records(path), tokenizer(), prompt)


def cached(path):
    return sorted((path.parent / "cache").glob("*"))


def test_lengths_and_losses_are_those_of_the_packed_records(path):
    found = measure(reader(path), 0, 60.0)
    made = [record_example(tokenizer(), record, BRIEF) for record in RECORDS]
    assert found.sizes.tolist() == [len(example.tokens) for example in made]
    packed = [pack([example], 200).mask.sum() for example in made]
    assert found.losses.tolist() == packed


def test_chunks_come_together_in_the_order_of_the_rows(path, monkeypatch):
    whole = measure(reader(path), 0, 60.0)
    monkeypatch.setattr(lengths, "_CHUNK", 5)
    cached(path)[0].unlink()
    parts = measure(reader(path), 0, 60.0)
    assert parts.sizes.tolist() == whole.sizes.tolist()
    assert parts.wording == whole.wording


def test_a_second_run_tokenises_one_record_only(path, monkeypatch):
    first = measure(reader(path), 0, 60.0)
    made = []
    monkeypatch.setattr(RecordReader, "example", lambda this, r: made.append(r) or example(this, r))
    again = measure(reader(path), 0, 60.0)
    assert made == RECORDS[:1]  # tells versions of the package apart
    assert again.sizes.tolist() == first.sizes.tolist()
    assert again.losses.tolist() == first.losses.tolist()
    assert (again.counts, again.wording) == (first.counts, first.wording)


example = RecordReader.example


@pytest.mark.parametrize("what", ["file", "prompt", "damage"])
def test_what_is_kept_is_not_used_for_anything_else(path, what):
    before = measure(reader(path), 0, 60.0).sizes
    (kept,) = cached(path)
    if what == "file":
        write_records(path, [dataclasses.replace(r, question="Why?" * 9) for r in RECORDS])
    if what == "damage":
        kept.write_bytes(kept.read_bytes()[:-30])
    style = BRIEF if what != "prompt" else Prompt("full")
    after = measure(reader(path, style), 0, 60.0).sizes
    assert (after == before).all() == (what == "damage")
    assert len(cached(path)) == (1 if what == "damage" else 2)


def test_a_cache_that_cannot_be_written_costs_time_only(path, monkeypatch):
    (path.parent / "file").touch()
    monkeypatch.setenv("COA_JAX_LENGTHS", str(path.parent / "file"))
    assert (measure(reader(path), 0, 60.0).sizes > 0).all()


def test_what_is_left_out_is_said_each_time(path, caplog):
    rows = [json.dumps(record.to_json()) for record in RECORDS]
    broken = {"instruction": "q", "output": "<web_search>a</web_search>\n<observation>b"}
    path.write_text("\n".join([*rows, json.dumps(broken)]) + "\n")
    sizes = [len(record_example(tokenizer(), r, BRIEF).tokens) for r in RECORDS]
    limit = sorted(sizes)[5]
    for _ in range(2):
        caplog.clear()
        examples = fitting(reader(path), measure(reader(path), 0, 60.0), limit)
        assert f"{path}: 6 of 12 records have more than {limit} tokens" in caplog.text
        assert "rows left out: 1, because" in caplog.text
        assert f"({path}:13)" in caplog.text
        assert examples.indices.tolist() == [i for i, n in enumerate(sizes) if n <= limit]
        assert [len(examples[i].tokens) for i in range(6)] == examples.sizes.tolist()


def test_a_file_from_which_nothing_can_be_learned_is_refused(path):
    found = measure(reader(path), 0, 60.0)
    words = r"none of the 12 records fits in 9 tokens, the shortest has \d+: raise row_length"
    with pytest.raises(UserError, match=words):
        fitting(reader(path), found, 9)
    path.write_text("")
    with pytest.raises(UserError, match=r"train\.jsonl: holds no record"):
        fitting(reader(path), measure(reader(path), 0, 60.0), 9)
    path.write_text('{"messages": [{"role": "assistant", "content": "hello"}]}\n')
    with pytest.raises(UserError, match="there is no user message; none of the 1 rows can be used"):
        fitting(reader(path), measure(reader(path), 0, 60.0), 9)


def test_a_file_that_changes_during_a_run_is_refused(path):
    of = reader(path)
    examples = fitting(of, measure(of, 0, 60.0), 200)
    longer = [dataclasses.replace(record, question="Why? " * 9) for record in RECORDS]
    write_records(path, longer)
    with pytest.raises(UserError, match=f"^{path}: .*data changed"):
        examples[0]


def test_many_records_take_few_bytes_of_memory(path):
    examples = fitting(reader(path), measure(reader(path), 0, 60.0), 200)
    arrays = (examples.sizes, examples.losses, examples.owner, examples.indices)
    assert sum(array.itemsize for array in arrays) == 20
    assert all(isinstance(array, np.ndarray) for array in arrays)
