"""Existing trajectories pass through the filters unchanged."""

from __future__ import annotations

import dataclasses
import json

import pytest

from coa_jax.data.records import read_records
from coa_jax.data.trajectory import write_records
from coa_jax.distillation.convert import convert
from coa_jax.distillation.messages import Kind
from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.distillation.recorded import log_of, with_figures
from coa_jax.distillation.traces import TraceFilesConfig, distill_traces
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from tests.data.published import HOPS, RIVER, STORIES, alpaca
from tests.distillation.test_export import RECORDS


def test_the_messages_of_a_record_are_those_it_was_converted_from():
    for record in RECORDS[:2]:
        log = log_of(record)
        known = {name: record.metadata[name] for name in ("hops", "source", "invented")}
        assert convert(log, record.protocol, record.gold, known) == record
        assert with_figures(record, log) == record
    log = log_of(RIVER.record())
    assert [tool for tool, _ in log.calls] == ["web_search", "crawl_page"]
    assert log.answer == RIVER.answer
    assert next(m.content for m in log.messages if m.kind is Kind.OBSERVATION) in RIVER.seen[0]
    assert log_of(dataclasses.replace(RIVER.record(), parts=(("policy", "x"),))).answer is None


@pytest.fixture
def published(tmp_path):
    rows = [alpaca(story) for story in STORIES]
    rows[2]["instruction"] = f"Search.\n\nQuestion: {HOPS.question}"
    rows[1]["protocol"] = "code"
    rows += [{**alpaca(RIVER), "gold": "another sea"}, {**alpaca(RIVER), "gold": RIVER.answer}]
    rows += [{**alpaca(RIVER), "output": "<web_search>q</web_search><observation>x"}]
    path = tmp_path / "set.json"
    path.write_text(json.dumps(rows))
    return path


def distilled(published, folder, **changes):
    values = load_config("configs/distill/traces.py:records")
    source = dataclasses.replace(
        build_config(TraceFilesConfig, values.traces), files=(str(published),)
    )
    filters = dataclasses.replace(build_config(DistillConfig, values.teacher), **changes)
    selection = dataclasses.replace(filters.selection, min_tool_calls=1, near_duplicate=0.0)
    return distill_traces(source, dataclasses.replace(filters, selection=selection), folder)


def test_filters_choose_published_records_and_change_nothing(published, tmp_path):
    records, told = distilled(published, tmp_path / "out")
    dropped = {name: n for name, n in told["filters"]["dropped"].items() if n}
    assert dropped == {"wrong_answer": 1}
    assert [record.parts for record in records[:3]] == [story.record().parts for story in STORIES]
    assert [record.metadata["tool_calls"] for record in records] == [2, 1, 1, 2]
    assert read_records(tmp_path / "out" / "train.jsonl") == list(records)
    (refused,) = map(json.loads, (tmp_path / "out" / "refused" / "train.jsonl").open())
    assert refused == {
        **{"path": str(published), "line": 6},
        "reason": "an observation is never closed",
    }
    assert told["reading"][0]["records"] == 6 == told["reading"][0]["used"] + 1


def test_a_run_without_an_accepted_answer_is_no_wrong_answer(published, tmp_path):
    records, told = distilled(published, tmp_path, keep_without_gold=False)
    dropped = {name: n for name, n in told["filters"]["dropped"].items() if n}
    assert dropped == {"no_accepted_answer": 3, "wrong_answer": 1}
    assert [record.gold for record in records] == [(RIVER.answer,)]


def test_our_own_records_are_filtered_again_with_their_figures(tmp_path):
    path = tmp_path / "train.jsonl"
    write_records(path, [*RECORDS[:2], RECORDS[0]])
    records, told = distilled(path, tmp_path / "out")
    assert [record.id for record in records] == ["e0", "e1", "train.jsonl:3:e0"]
    assert records[0].metadata == RECORDS[0].metadata
    assert told["filters"]["kept"] == 3
