"""Untrusted files are read within bounds, and only if they are regular files."""

from __future__ import annotations

import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.records import iterate_records
from coa_jax.errors import UserError
from coa_jax.files import durable, jsonl, untrusted
from coa_jax.model.api import load_model
from coa_jax.tasks import load_tasks
from tests.damage.mutations import IN_PLACE

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_json_is_read_as_the_standard_library_reads_it(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert untrusted.parse_json(text) == value
        if "\\ud" not in text and not any("\ud800" <= c <= "\udfff" for c in text):
            assert untrusted.parse_json(b"\xef\xbb\xbf" + text.encode()) == value


def drop_nothing(path):
    durable.drop_last_rows(path, lambda row: False)


@pytest.mark.parametrize("name", sorted(set(IN_PLACE) - {"nothing"}))
def test_what_is_no_file_is_refused_without_waiting(tmp_path, name):
    path = tmp_path / "x.jsonl"
    IN_PLACE[name](path)
    for read in (untrusted.read_bytes, untrusted.read_json, jsonl.read_objects,
                 durable.cut_torn_line, drop_nothing,
                 lambda p: list(jsonl.read_lines(p, dict))):  # fmt: skip
        if name == "a loop of links" and read in (durable.cut_torn_line, drop_nothing):
            continue  # it is not there, which is not its matter
        with pytest.raises(UserError, match=r"x\.jsonl") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_a_pipe_that_nobody_reads_is_an_error_of_writing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        durable.append(tmp_path / "pipe", b"x")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 50_000, "nested too deeply"),
        (b"[" * 101 + b"]" * 101, "nested more than 100 levels deep"),
        (b'{"a": ' + b"9" * 400 + b"}", "a number has 400 digits"),
        (b"9" * 5000, "a number has 5,000 digits"),
        (gzip.compress(b"{}", mtime=0), "compressed with gzip; unpack it first"),
        ("{}".encode("utf-16"), "encoded in UTF-16; save it as UTF-8"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7"),
        (b"{}\n}", "not JSON: Extra data at column 1 of line 2"),
        (b"", "not JSON: Expecting value at column 1"),
        (b'{"a": "b', "not JSON: Unterminated string at column 7"),
        (b'{"a": "\n"}', "not JSON: Invalid control character at column 8"),
        (b'{"a": "\\q"}', "not JSON: Invalid \\escape at column 8"),
    ],
)
def test_why_json_is_refused(tmp_path, data, why):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(UserError) as caught:
        untrusted.read_json(tmp_path / "x.json")
    assert str(caught.value) == f"{tmp_path}/x.json: {why}; correct the file or fetch it again"


def test_what_is_within_the_bounds_is_read():
    deep = "[" * 100 + "]" * 100
    assert untrusted.parse_json(deep) is not None
    assert untrusted.parse_json(json.dumps("[" * 1000 + "9" * 1000)) == "[" * 1000 + "9" * 1000
    assert untrusted.parse_json("9" * 308) == 10**308 - 1


def test_a_file_beyond_its_limit_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b" " * 11)
    assert len(untrusted.read_bytes(tmp_path / "x", 11)) == 11
    with pytest.raises(UserError, match="it has 11 bytes, the limit is 10"):
        untrusted.read_bytes(tmp_path / "x", 10)
    assert untrusted.read_bytes("/proc/self/status")  # has no size


def test_compressed_json_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "values.json.gz"
    text = json.dumps(["a" * 1000] * 100).encode()
    packed = gzip.compress(text)
    path.write_bytes(packed)
    assert untrusted.read_json(path, len(text)) == json.loads(text)
    with pytest.raises(UserError, match=rf"{path}: .*{len(text) - 1:,} bytes"):
        untrusted.read_json(path, len(text) - 1)  # although the file itself is far smaller
    for damaged in (packed[:-9], packed[:5], b"", text, packed[:-8] + bytes(8)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{path}: damaged"):
            untrusted.read_json(path, len(text))


@pytest.mark.parametrize(
    ("read", "path", "command"),
    [
        (load_model, "runs/debug/scratch/model", "debug-files"),
        (lambda path: load_tasks(path, "train"), "runs/debug/questions.jsonl", "debug-files"),
        (lambda path: next(iterate_records(path)), "runs/debug/distill/x.jsonl", "debug-files"),
        (load_model, "weights/SmolLM2-135M-Instruct", "fetch smollm2"),
    ],
)
def test_a_missing_file_of_ours_names_the_command_that_makes_it(
    tmp_path, monkeypatch, read, path, command
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=rf"^{path}.*`coa-jax {command}` makes it"):
        read(path)
    other = path.replace("debug", "mine").replace("weights", "mine")
    with pytest.raises(UserError) as refused:
        read(other)
    assert "coa-jax" not in str(refused.value)
