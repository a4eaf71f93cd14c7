"""Private tests are untrusted: no code in them runs, and small files cannot expand."""

from __future__ import annotations

import base64
import json
import os
import pickle
import time
import zlib

import pytest

from coa_jax.errors import UserError
from coa_jax.tasks import private_tests
from coa_jax.tasks.private_tests import load_private_tests

CASE = {"input": "1", "output": "1", "testtype": "stdin"}


class Runs:
    def __reduce__(self):
        return os.mkdir, ("/tmp/ran-by-a-pickle",)


def deep(levels):
    return b"\x80\x04" + b"]" * levels + b"a" * (levels - 1) + b"."


def laughs():
    """A list that holds a list twice, which holds a list twice, ..."""
    value = ["x"]
    for _ in range(60):
        value = [value, value]
    return pickle.dumps(value)


PICKLES = {
    "deep": deep(100_000),
    "laughs": laughs(),
    "a memo of 16 GB": b"\x80\x04]r" + (2**31 - 1).to_bytes(4, "little") + b".",
    "a bytearray of a TiB": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a frame of a TiB": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"].",
    "an object elsewhere": b"\x80\x04Px\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "cut off": pickle.dumps({"public_test_cases": [CASE]})[:-9],
    "nothing": b"",
    "noise": b"\x00\xff" * 99,
    "a deep tuple as a key": b"\x80\x04})" + b"\x85" * 900_000 + b"Ns.",
    "a deep tuple in a set": b"\x80\x04\x8f()" + b"\x85" * 900_000 + b"\x90.",
    "appends to a record": b"\x80\x04cos\nmkdir\n]a.",
    "a call": pickle.dumps(Runs()),
}


def packed(data):
    return json.dumps({"public_test_cases": base64.b64encode(data).decode()}).encode()


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_damaged_or_hostile_pickle_is_one_line(tmp_path, name, wrapped):
    data = PICKLES[name]
    file = tmp_path / ("q.json" if wrapped else "q.pkl")
    file.write_bytes(packed(zlib.compress(data)) if wrapped else data)
    start = time.process_time()
    with pytest.raises(UserError, match=rf"{file.name}: no tests can be read from it: ") as caught:
        load_private_tests(str(tmp_path), "q")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert time.process_time() - start < 30
    assert not os.path.exists("/tmp/ran-by-a-pickle")


def test_nothing_in_a_pickle_is_run(tmp_path):
    row = {"public_test_cases": [CASE], "metadata": {"a": Runs()}}
    (tmp_path / "q.pkl").write_bytes(pickle.dumps(row))
    assert load_private_tests(str(tmp_path), "q").cases[0].given == "1"
    assert not os.path.exists("/tmp/ran-by-a-pickle")


def test_packed_tests_are_inflated_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(private_tests, "_INFLATED", 1 << 20)
    for size, good in ((1000, True), (1 << 21, False)):
        text = json.dumps([{**CASE, "input": "1" * size}])
        (tmp_path / "q.json").write_bytes(packed(zlib.compress(pickle.dumps(text))))
        if good:
            assert len(load_private_tests(str(tmp_path), "q").cases[0].given) == size
        else:
            with pytest.raises(UserError, match="the packed tests have 1,048,576 bytes or more"):
                load_private_tests(str(tmp_path), "q")
