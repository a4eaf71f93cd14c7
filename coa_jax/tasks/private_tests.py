"""Reads private tests: tests that are stored outside the question file, in one file per question.

The file ``ID.json`` or ``ID.pkl`` contains the tests of the question ID. A JSON file contains the
same object as a question file (see ``coa_jax.tasks.code_tests.read_tests``) or the fields of
LiveCodeBench. Pickle files are written by the download script of the release. Reading a pickle
never runs code from the file, because a simple record replaces each class that the file names. The
size of the tests is bounded.
"""

from __future__ import annotations

import base64
import io
import itertools
import pickle
import pickletools
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.storage import local
from coa_jax.tasks.code_tests import Case, Tests, read_tests

_DAMAGED = (*untrusted.MALFORMED, EOFError, ImportError, pickle.UnpicklingError, zlib.error)

_NODES = 1_000_000
"""Maximum number of values in a pickle. A question of LiveCodeBench has about a hundred tests."""
_TUPLES = 10_000
"""Maximum number of tuples in a pickle: Python crashes when it hashes a tuple of greater depth."""
_INFLATED = 1 << 30
"""Maximum size of packed tests in bytes, after decompression."""


class _Record:
    """Stands for an object of any class in a pickle."""

    def __init__(self, *arguments: Any, **fields: Any):
        self.__dict__.update(fields)
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Record


def _unpickled(data: bytes) -> Any:
    """Loads a pickle. Each object becomes the mapping of its fields.

    Raises:
        ValueError: the pickle is damaged, or loading it would take much more memory than its size.
            A damaged pickle may also raise other exceptions.
    """
    tuples = 0
    for count, (code, argument, offset) in enumerate(pickletools.genops(data)):
        if count > _NODES:
            raise ValueError(f"the pickle has more than {_NODES:,} operations")
        tuples += code.name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
        if tuples > _TUPLES:
            raise ValueError(f"the pickle has more than {_TUPLES:,} tuples")
        if "PUT" in code.name and int(argument or 0) > count:  # memo size = largest index
            raise ValueError(f"the pickle is damaged at byte {offset:,}")
        if code.name in ("PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER"):
            raise ValueError(f"the pickle refers to data outside the file ({code.name})")
    return _plain(_Unpickler(io.BytesIO(data)).load(), itertools.count())


def _inflated(data: bytes) -> bytes:
    """Decompresses zlib data.

    Raises:
        ValueError: the decompressed data is too large, or the compressed data is incomplete.
        zlib.error: the data is damaged.
    """
    limit = min(_INFLATED, untrusted.whole_limit())
    inflater = zlib.decompressobj()
    text = inflater.decompress(data, limit)
    if len(text) == limit:
        raise ValueError(f"the packed tests have {limit:,} bytes or more")
    if not inflater.eof:
        raise ValueError("the packed tests are cut off")
    return text


def check_folder(folder: str) -> Path:
    """Returns the path of the folder with private tests.

    Raises:
        UserError: the folder does not exist.
    """
    root = Path(local(folder)).expanduser()
    if not root.is_dir():
        raise UserError(f"{root}: the folder of private tests does not exist")
    return root


def find_private_tests(folder: str, question_id: str) -> Path | None:
    """Returns the path of the file with the private tests of a question.

    The result is None if the folder has no file for the question.

    Raises:
        UserError: the folder does not exist, or the id is not a valid file name.
    """
    root = check_folder(folder)
    if not question_id or Path(question_id).name != question_id or question_id.startswith("."):
        raise UserError(f"{root}: {question_id!r} is not a valid name for a file of tests")
    paths = (root / f"{question_id}.json", root / f"{question_id}.pkl")
    return next((path for path in paths if path.is_file()), None)


def check_tests(folder: str, ids: Sequence[str]) -> None:
    """Checks that all questions have private tests, and that those of the first can be read.

    Otherwise, questions without private tests would be graded with their public sample tests.

    Args:
        folder: folder with the private tests.
        ids: ids of the questions; "" for a task that is not graded by tests.

    Raises:
        UserError: a question has no private tests, or those of the first question cannot be read.
    """
    ids = list(filter(None, ids))
    absent = [name for name in ids if find_private_tests(folder, name) is None]
    if absent:
        shown = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
        of = f"{len(absent)} of {len(ids)} questions ({shown})"
        raise UserError(f"{folder} has no tests for {of}")
    if ids:
        load_private_tests(folder, ids[0])


def load_private_tests(folder: str, question_id: str) -> Tests | None:
    """Reads the private tests of a question.

    The result is None if the folder has no file for the question.

    Raises:
        UserError: the folder does not exist, the id is not a valid file name, or the file is
            malformed.
    """
    path = find_private_tests(folder, question_id)
    if path is None:
        return None
    try:
        data = untrusted.read_bytes(path)
        value = untrusted.parse_json(data) if path.suffix == ".json" else _unpickled(data)
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        livecodebench = "public_test_cases" in value
        return livecodebench_tests(value) if livecodebench else read_tests(value)
    except _DAMAGED as error:
        why = untrusted.reason(error)
        raise UserError(f"{path}: no tests can be read from it: {why}") from error


def _plain(value: Any, seen: Iterator[int], depth: int = 0) -> Any:
    """Converts records to dicts, and enumeration members to their values.

    The number of values is bounded, because a small pickle can stand for very many values: for
    example, a list that contains another list twice, nested many times.
    """
    if next(seen) > _NODES or depth > untrusted.MAX_DEPTH:
        raise ValueError("the pickle contains too many values, or values nested too deeply")
    if isinstance(value, _Record):
        fields = {k: v for k, v in vars(value).items() if k != "arguments"}
        if not fields and len(value.arguments) == 1:
            return _plain(value.arguments[0], seen, depth + 1)
        value = fields
    if isinstance(value, list | tuple):
        return [_plain(item, seen, depth + 1) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, seen, depth + 1) for key, item in value.items()}
    return value


def livecodebench_tests(row: dict[str, Any]) -> Tests:
    """Reads the public and private tests from a row of LiveCodeBench.

    Raises:
        ValueError: a field does not have the format of the benchmark.
    """
    listed = _test_list(row["public_test_cases"]) + _test_list(row.get("private_test_cases") or [])
    metadata = row.get("metadata") or {}
    metadata = untrusted.parse_json(metadata) if isinstance(metadata, str) else metadata
    if not listed:
        raise ValueError("there are no tests")
    calls = [test.get("testtype", "stdin") == "functional" for test in listed]
    entry = str(metadata.get("func_name") or "")
    if any(calls) and not entry:
        raise ValueError("the tests call a function, but the row does not name the function")
    pairs = zip(listed, calls, strict=True)
    return Tests(
        tuple(Case("call" if c else "stdin", str(t["input"]), str(t["output"])) for t, c in pairs),
        entry,
    )


def _test_list(value: Any) -> list[dict[str, Any]]:
    """Reads a list of tests.

    The value is a list, JSON, or packed tests, which are JSON that is pickled, compressed and
    base64-encoded.
    """
    if isinstance(value, str):
        try:
            value = untrusted.parse_json(value)
        except ValueError:
            try:
                inner = _unpickled(_inflated(base64.b64decode(value, validate=True)))
            except Exception as error:  # broken pickles raise any exception
                why = untrusted.reason(error)
                raise ValueError(f"packed tests cannot be unpacked: {why}") from error
            value = untrusted.parse_json(inner) if isinstance(inner, str) else inner
    if not isinstance(value, list) or not all(isinstance(test, dict) for test in value):
        raise ValueError("tests must be a list of objects")
    return value
