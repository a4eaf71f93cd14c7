"""Writes rows to a file in the format that its name says."""

from __future__ import annotations

import csv
import json

import pytest
from array_record.python.array_record_module import ArrayRecordWriter


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".array_record":
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for row in rows:
            writer.write(json.dumps(row).encode())
        writer.close()
    elif path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            table = csv.DictWriter(file, rows[0], delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return str(path)
