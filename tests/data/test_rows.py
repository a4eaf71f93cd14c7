"""Rows by their number: any file, in any order, in any process, without the others in memory."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data import rows as rows_module
from coa_jax.data.records import ReadRecord, Records, SkippedRow, iterate_records, read_records
from coa_jax.data.rows import open_rows
from coa_jax.data.trajectory import write_records
from coa_jax.distillation.export import write_tfds
from coa_jax.errors import UserError
from tests import tiny_policy
from tests.rows import write

ROWS = [{"instruction": f"Grüße {i} 東京 🙂", "output": "[]{},\\ " * (i % 5)} for i in range(40)]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=bool(i % 2)) + "\n" for i, row in enumerate(rows))


def write_form(path, form):
    text = {
        "lines": lines(ROWS),
        "blank lines": "\n" + lines(ROWS).replace("\n", "\n \n"),
        "no last line end": lines(ROWS).rstrip("\n"),
        "bom": "\ufeff" + lines(ROWS),
        "list": json.dumps(ROWS, ensure_ascii=False, indent=1),
        "list with bom": "\ufeff " + json.dumps(ROWS, ensure_ascii=False),
        "wrapped": json.dumps({"rows": ROWS}),
        "wrapped lines": json.dumps({"version": ["1"], "Data": ROWS, "more": [3]}, indent=1),
    }.get(form)
    if text is None:
        write(path, ROWS)
    else:
        path.write_text(text, encoding="utf-8")


FORMS = ("lines", "blank lines", "no last line end", "bom", "list", "list with bom", "wrapped",
         "wrapped lines", "parquet", "array_record", "csv", "tsv")  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_in_any_order_and_in_another_process(tmp_path, form):
    # The content of a file, and not its name, determines the format of JSON and parquet.
    path = tmp_path / (f"data.{form}" if form in ("array_record", "csv", "tsv") else "data.bin")
    write_form(path, form)
    wanted = ROWS
    if form in ("csv", "tsv"):  # an empty cell is a missing value
        wanted = [{key: value or None for key, value in row.items()} for row in ROWS]
    rows = pickle.loads(pickle.dumps(open_rows(path)))
    assert len(rows) == 40
    order = list(range(40))
    random.Random(0).shuffle(order)
    for index in order:
        assert rows[index].value == wanted[index]
    assert [row.value for row in open_rows(path)] == wanted
    numbers = [row.number for row in open_rows(path)]
    first = 2 if form in ("csv", "tsv") else 1
    assert numbers == (
        [2 * i + 2 for i in range(40)] if form == "blank lines" else [*range(first, first + 40)]
    )
    with pytest.raises(IndexError):
        rows[40]


def test_an_object_of_several_lines_is_a_row(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"a": [1], "data": {"rows": [2]}}, indent=1))
    assert [row.value for row in open_rows(path)] == [{"a": [1], "data": {"rows": [2]}}]
    path.write_text('{"data": [1]}\n{"data": [2]}\n')  # two rows, and no list of rows
    assert [(row.number, row.value) for row in open_rows(path)] == [
        (1, {"data": [1]}),
        (2, {"data": [2]}),
    ]


# --- CSV -------------------------------------------------------------------------------------


CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    st.lists(st.tuples(CELLS, CELLS.filter(bool)), max_size=9),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([",", "\t"]),
    st.sampled_from(["", "\ufeff"]),
)
def test_a_table_has_the_cells_that_were_written(tmp_path_factory, rows, end, delimiter, bom):
    path = tmp_path_factory.mktemp("table") / ("a.tsv" if delimiter == "\t" else "a.csv")
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(bom)
        table = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
        table.writerows([("é", "b"), *rows])
    opened = open_rows(path)
    order = [*range(len(rows))][::-1]
    assert [opened[i].value for i in order] == [{"é": rows[i][0] or None, "b": rows[i][1]}
                                                for i in order]  # fmt: skip


def test_a_row_of_a_table_is_named_by_its_first_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n\n1,"x\ny"\n3,4\n')
    assert [(row.where, row.value) for row in open_rows(path)] == [
        (f"{path}:3", {"a": "1", "b": "x\ny"}),
        (f"{path}:5", {"a": "3", "b": "4"}),
    ]
    for text, fault in (
        (b'a,b\n1,"x\ny"\n3\n', ":4: the number of cells is 1, but the table has 2 columns"),
        (b'a,b\n1,2\n3,"4\n5', ":3: not a table: unexpected end of data"),
        (b"a,b\n1,\xff\n", ":2: not a table: not UTF-8"),
        (b"a,b,b\n1,2,3\n", ":1: several columns have the name 'b'"),
        ("a,b\n1,2\n".encode("utf-16"), "encoded in UTF-16; save it as UTF-8"),
    ):
        path.write_bytes(text)
        with pytest.raises(UserError, match=rf"a\.csv(.*){fault}"):
            open_rows(path)


def test_a_cell_may_be_long_but_a_row_has_a_limit(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + '"' + "x\n" * 100_000 + '",2\n')
    assert open_rows(path)[0].value["a"] == "x\n" * 100_000
    for text in ("a,b\n" + '"' + "x\n" * 100_000, "a,b\n1," + "x" * 200_000):
        path.write_text(text)
        with pytest.raises(UserError, match=r"a\.csv:2: a row of more than 0 MiB"):
            open_rows(path, longest=100_000)


# --- parquet ---------------------------------------------------------------------------------


def test_only_the_columns_that_are_used_are_read_from_parquet(tmp_path):
    moment = datetime.datetime(2024, 9, 1, tzinfo=datetime.UTC)
    rows = [{"a": i, "b": {"c": b"x", "d": decimal.Decimal("1.5")}, "e": moment, "f": b"\xff"}
            for i in range(200)]  # fmt: skip
    write(tmp_path / "x.parquet", rows)
    opened = open_rows(tmp_path / "x.parquet")
    value = {"b": {"c": "x", "d": "1.5"}, "e": "2024-09-01T00:00:00+00:00", "f": b"\xff"}
    assert opened[150].value == {"a": 150, **value}
    assert [row.value for row in opened] == [{"a": i, **value} for i in range(200)]
    opened = open_rows(tmp_path / "x.parquet", columns={"a", "absent"}.intersection)
    assert opened[150].value == {"a": 150}
    assert [(row.number, row.value) for row in opened] == [(i + 1, {"a": i}) for i in range(200)]


# --- JSON ------------------------------------------------------------------------------------


def test_a_task_may_be_longer_than_a_record(tmp_path):
    path = tmp_path / "x.jsonl"
    for text, place in (('{"a": "%s"}\n', ":1: a line"), ('[{"a": "%s"}]', ": row 1: a row")):
        path.write_text(text % ("x" * (17 << 20)))
        assert len(open_rows(path)[0].value["a"]) == 17 << 20
        with pytest.raises(UserError, match=f"{place} of more than 16 MiB"):
            read_records(path)


def test_a_long_list_is_indexed_over_many_chunks(tmp_path):
    rows = [{"n": i, "text": "é🙂x" * (i % 7) * 100} for i in range(5000)]
    path = tmp_path / "long.json"
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    assert path.stat().st_size > 4 << 20
    opened = open_rows(path)
    assert [opened[i].value for i in (4999, 0, 2500, 1234)] == [
        rows[i] for i in (4999, 0, 2500, 1234)
    ]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_rows_of_a_list_do_not_depend_on_where_the_blocks_end(tmp_path, monkeypatch, block):
    monkeypatch.setattr(rows_module, "_BLOCK", block)
    path = tmp_path / "data.json"
    values = [
        {},
        {"a": 'a "quoted\\" \\\\ text\\'},
        {"]": '}"', "": [[], {}]},
        {"a": "\\\\" * 5},
        ROWS[3],
    ]
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")
    assert [row.value for row in open_rows(path)] == values
    path.write_text(" [ \n] \n")
    assert not open_rows(path)
    for text, fault in (
        ("[1] 2", "text follows"),
        ('["a\\', "row 1: not JSON"),
        ("[1}", "row 2: not JSON: expected"),
        ('["a', "row 1: not JSON: Unterminated string$"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=fault):
            open_rows(path)


def test_a_list_that_another_process_truncates_during_the_scan_is_an_error(tmp_path):
    path = tmp_path / "data.json"
    write(path, [{"a": "x" * 1000}] * 5000)

    class Truncated(io.FileIO):
        """A file that another process truncates after the second block has been read."""

        blocks = 0

        def read(self, size=-1):
            block = super().read(size)
            self.blocks += 1
            if self.blocks == 2:  # a file that is mapped into memory would end this process here
                os.truncate(path, 4096)
            return block

    with Truncated(path) as file:
        with pytest.raises(UserError, match=r"row \d+: not JSON"):
            rows_module._list_items(path, file, 1 << 20)
        assert file.blocks > 2


@pytest.mark.parametrize("form", ["parquet", "array_record"])
def test_a_file_that_is_written_anew_is_read_anew(tmp_path, form):
    path = tmp_path / f"data.{form}"
    write(path, ROWS)
    assert open_rows(path)[0].value == ROWS[0]
    ROWS.reverse()
    try:
        write(path, ROWS)
        assert open_rows(path)[0].value == ROWS[0]
    finally:
        ROWS.reverse()


def test_a_damaged_row_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n{"a": "b\n{"a": 3}\n{"a": 4')
    rows = open_rows(path)
    assert rows[2].value == {"a": 3}
    with pytest.raises(UserError, match=r"jsonl:2: not JSON: Unterminated string at column 7$"):
        rows[1]
    with pytest.raises(UserError, match=r"data.jsonl:4: not JSON.* \(the last line is cut off\)"):
        rows[3]


def test_an_array_record_without_its_end_is_refused(tmp_path):
    path = tmp_path / "data.array_record"
    write(path, ROWS)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"^{path}: .*ArrayRecord"):
        open_rows(path)


def test_records_of_several_files_have_one_numbering(tmp_path):
    records = tiny_policy.records()
    write_records(tmp_path / "a.jsonl", records[:2])
    broken = {"instruction": "q", "output": "<web_search>a</web_search>\n<observation>b"}
    (tmp_path / "b.json").write_text(json.dumps([broken, records[2].to_json()]))
    source = f"{tmp_path}/a.jsonl,{tmp_path}/b.json"
    found = pickle.loads(pickle.dumps(Records(source)))
    assert len(found) == 4
    by_number = [found[i] for i in (3, 1, 2, 0)]
    kinds = [type(one) for one in by_number]
    assert kinds == [ReadRecord, ReadRecord, SkippedRow, ReadRecord]
    assert [one.record for one in by_number if isinstance(one, ReadRecord)] == [
        *(records[2], records[1], records[0]),
    ]
    assert by_number[2].row.where == f"{tmp_path}/b.json: row 1"
    assert [found[i] for i in range(4)] == list(iterate_records(source))


def test_no_file_is_opened_before_the_rows_of_earlier_files_are_read(tmp_path):
    record = tiny_policy.records()[0]
    write_records(tmp_path / "a.jsonl", [record])
    (tmp_path / "b.jsonl").write_bytes(b"\x1f\x8b\x08\x00")
    rows = iterate_records(f"{tmp_path}/*.jsonl")
    assert next(rows).record == record
    with pytest.raises(UserError, match=r"b\.jsonl: compressed with gzip"):
        next(rows)


@pytest.mark.parametrize("source", ["{}/train", "tfds:{}:train"])
def test_a_slice_of_a_tfds_split_is_read(tmp_path, source):
    records = tiny_policy.records()
    named = source.format(write_tfds(records, tmp_path, "train"))
    assert len(records) == 3
    for part, found in (("", records), ("[:2]", records[:2]), ("[1:]", records[1:])):
        assert read_records(named + part) == list(found)
    assert read_records(f"{named}[-1:],{named}[:34%]") == [records[2], records[0]]
    with pytest.raises(UserError, match=r"there is no split 'dev\[:2\]'; there are train"):
        read_records(named.replace("train", "dev") + "[:2]")
