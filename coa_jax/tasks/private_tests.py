"""Tests that are kept apart from the question file, one file a question.

``ID.json`` holds what a question file would (see ``coa_jax.tasks.code_tests.read_tests``), or
LiveCodeBench's own fields.  ``ID.pkl`` is what the release's download script writes: it is read
without running anything in it, every class it names being replaced by a plain record.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.tasks.code_tests import Case, Tests, read_tests


class _Record:
    """Stands for an object of any class."""

    def __init__(self, *arguments: Any, **fields: Any):
        self.__dict__.update(fields)
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Record


def find_private_tests(folder: str, question_id: str) -> Path | None:
    """The file with the tests of a question, or None if the folder has none for it.

    Raises:
        UserError: the folder is not there, or the id is no file name.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"{root}: the folder of private tests is not there")
    if not question_id or Path(question_id).name != question_id or question_id.startswith("."):
        raise UserError(f"{root}: {question_id!r} cannot name a file of tests")
    paths = (root / f"{question_id}.json", root / f"{question_id}.pkl")
    return next((path for path in paths if path.is_file()), None)


def load_private_tests(folder: str, question_id: str) -> Tests | None:
    """The tests of a question, or None if the folder has none for it.

    Raises:
        UserError: the folder is not there, the id is no file name, or the file is malformed.
    """
    path = find_private_tests(folder, question_id)
    if path is None:
        return None
    try:
        value = _load(path)
        return livecodebench_tests(value) if _is_livecodebench(value) else read_tests(value)
    except (ValueError, TypeError, KeyError, AttributeError, EOFError) as error:
        raise UserError(f"{path}: no tests can be read from it: {error}") from error
    except (pickle.UnpicklingError, zlib.error, IndexError, ImportError) as error:
        raise UserError(f"{path}: no tests can be read from it: {error}") from error


def _load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if path.suffix == ".json":
        value = json.loads(data)
    else:
        value = _plain(_Unpickler(io.BytesIO(data)).load())
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return value


def _plain(value: Any) -> Any:
    """Records as dicts; the value of an enumeration is what it was made from."""
    if isinstance(value, _Record):
        fields = {k: v for k, v in vars(value).items() if k != "arguments"}
        if not fields and len(value.arguments) == 1:
            return _plain(value.arguments[0])
        return {key: _plain(item) for key, item in fields.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _is_livecodebench(value: dict[str, Any]) -> bool:
    return "public_test_cases" in value


def livecodebench_tests(row: dict[str, Any]) -> Tests:
    """The tests of a row of LiveCodeBench, public and private.

    Raises:
        ValueError: a field is not in the form of the benchmark.
    """
    listed = _test_list(row["public_test_cases"]) + _test_list(row.get("private_test_cases") or [])
    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    cases: list[Case] = []
    for test in listed:
        call = test.get("testtype", "stdin") == "functional"
        cases.append(Case("call" if call else "stdin", str(test["input"]), str(test["output"])))
    if not cases:
        raise ValueError("there are no tests")
    entry = str(metadata.get("func_name") or "")
    if any(case.kind == "call" for case in cases) and not entry:
        raise ValueError("the function of the tests is not named")
    return Tests(tuple(cases), entry)


def _test_list(value: Any) -> list[dict[str, Any]]:
    """A list, as JSON, or as the benchmark packs private tests: base64, zlib, pickle, JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                packed = zlib.decompress(base64.b64decode(value, validate=True))
                inner = _Unpickler(io.BytesIO(packed)).load()
            except Exception as error:  # broken pickles raise what they like
                raise ValueError(f"packed tests cannot be unpacked: {error}") from error
            value = json.loads(inner) if isinstance(inner, str) else inner
    if not isinstance(value, list) or not all(isinstance(test, dict) for test in value):
        raise ValueError("tests must be a list of objects")
    return value
