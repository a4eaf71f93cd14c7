"""Fields, roles and marks of published conversations decide what is learned."""

from __future__ import annotations

import json

import pyarrow
import pytest
from pyarrow import parquet

from coa_jax.data.records import read_records, records_of_rows
from coa_jax.data.row_formats import convert_row
from coa_jax.data.text_parts import Unusable
from coa_jax.data.trajectory import part_violations
from coa_jax.protocol import parse_code
from tests.data.published import HOPS, RIVER, SUMS, alpaca, message, sharegpt
from tests.data.test_row_formats import assert_same, wanted


@pytest.mark.parametrize("reply", ["{}", "<observation>\n{}\n</observation>"])
def test_the_users_reply_to_a_call_is_an_observation_and_roles_ignore_case(reply):
    turns = [("User", message(RIVER)), ("Assistant", RIVER.said[0])]
    for seen, said in zip(RIVER.seen, RIVER.said[1:], strict=True):
        turns += [("user", reply.format(seen)), ("ASSISTANT", said)]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert_same(convert_row(row, "x", "web").record, wanted(RIVER))


@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss": False}, {"train": False}])
def test_a_turn_that_its_file_does_not_learn_is_not_learned(mark):
    turns = sharegpt(RIVER, "role", "content", ("user", "assistant", "tool"))
    for turn in turns[1::2]:
        turn |= dict.fromkeys(mark, 1)
    assert_same(convert_row({"messages": turns}, "x").record, wanted(RIVER))
    turns[3] |= mark
    with pytest.raises(Unusable, match="marked as excluded from training"):
        convert_row({"messages": turns}, "x")
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **mark}]
    turns[3] |= dict.fromkeys(mark, 1)
    context = (("user", "a"), ("assistant", "b"))
    assert_same(
        convert_row({"messages": earlier + turns}, "x").record, wanted(RIVER, context=context)
    )


def test_reasoning_in_a_field_of_its_own_is_a_thought():
    thought, rest = HOPS.said[1].split("\n", 1)
    turns = sharegpt(HOPS, "role", "content", ("user", "assistant", "tool"))
    turns[3] |= {"reasoning_content": thought[7:-8], "content": rest}
    assert_same(convert_row({"messages": turns}, "x", "mhqa").record, wanted(HOPS))


def test_an_empty_column_of_a_table_does_not_hide_the_form_of_a_row():
    columns = ("conversations", "messages", "instruction", "output", "parts", "system")
    empty = dict.fromkeys(columns)
    row = {**empty, **alpaca(RIVER)}
    assert_same(convert_row(row, "x").record, wanted(RIVER))
    row = {**empty, "messages": sharegpt(RIVER)}
    assert_same(convert_row(row, "x").record, wanted(RIVER))


@pytest.mark.parametrize("fences", ["{}", "```py\n{}\n```", "```python\n{}\n```\n"])
def test_a_program_in_a_function_call_is_fenced_once(fences):
    program = 'print("<observation>", 6 * 7)'
    called = {"name": "code", "arguments": json.dumps({"code": fences.format(program)})}
    chat = [
        {"role": "user", "content": message(SUMS)},
        {
            **{"role": "assistant", "content": SUMS.said[0].partition("\n<code>")[0]},
            "tool_calls": [{"id": "1", "function": called}],
        },
        {"role": "tool", "tool_call_id": "1", "content": SUMS.seen[0]},
        {"role": "assistant", "content": SUMS.said[1]},
    ]
    record = convert_row({"messages": chat}, "x", "code").record
    assert part_violations("code", record.parts) == []
    body = record.parts[0][1].partition("<code>")[2].removesuffix("</code>")
    assert parse_code(body) == (program, None)


def conversation(calls, results):
    made = [{"id": i, "function": {"name": i, "arguments": "{}"}} for i in calls]
    return {"messages": [
        {"role": "user", "content": "Q?"},
        {"role": "assistant", "content": None, "tool_calls": made},
        *({"role": "tool", "tool_call_id": i, "content": text} for i, text in results),
        {"role": "assistant", "content": "Done."},
    ]}  # fmt: skip


@pytest.mark.parametrize(
    ("results", "order"),
    [
        ([("b", "B"), ("a", "A")], "AB"),
        ([("x", "B"), ("y", "A")], "BA"),  # ids of no call say nothing
        ([(None, "B"), (None, "A")], "BA"),
    ],
)
def test_results_of_parallel_calls_have_the_order_of_the_calls(results, order):
    record = convert_row(conversation("ab", results), "x").record
    seen = [text for author, text in record.parts if author == "environment"]
    assert [text.split("\n")[2] for text in seen] == list(order)


def test_a_parallel_call_without_a_result_is_not_learned():
    with pytest.raises(Unusable, match="a call has no result"):
        convert_row(conversation("ab", [("b", "B")]), "x")


def test_fields_that_a_table_adds_to_calls_and_tools_are_left_out(tmp_path):
    def row(name, arguments):
        properties = {key: {"type": "string"} for key in arguments}
        tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
        call = {"function": {"name": name, "arguments": arguments}}
        return {
            "tools": [{"type": "function", "function": tool}],
            "messages": [
                {"role": "user", "content": "Q?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "seen"},
                {"role": "assistant", "content": "Done."},
            ],
        }

    rows = [row("find", {"what": "x"}), row("add", {"a": "1", "b": "2"})]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = read_records(path)
    for record, plain in zip(read, records_of_rows(rows), strict=True):
        assert (record.parts, record.metadata) == (plain.parts, plain.metadata)
    tagged = {"role": "assistant", "content": "<answer>Done.</answer>"}
    rows = [row("wiki_search", {"query": "x"}), row("code", {"source": "1"})]
    rows = [{"messages": [*each["messages"][:3], tagged]} for each in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [r.parts for r in read_records(path)] == [r.parts for r in records_of_rows(rows)]
