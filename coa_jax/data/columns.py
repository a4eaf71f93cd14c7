"""Renames the columns, keys and roles of rows as LLaMA-Factory's ``dataset_info.json`` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files import durable


def columns_of(path: Path) -> dict[str, Any]:
    """Returns the entry of a data file in LLaMA-Factory's ``dataset_info.json``.

    That file must be in the folder of the data file. The result is {} if the folder has no
    ``dataset_info.json``, or if it has no entry for the data file.

    Raises:
        UserError: the ``dataset_info.json`` cannot be read.
    """
    info = path.parent / "dataset_info.json"
    if not info.is_file() or (path.parent / "features.json").is_file():
        return {}
    try:
        entries = [e for e in durable.read_json_object(info).values() if isinstance(e, dict)]
    except RecursionError:
        raise UserError(f"{info}: nested too deeply; correct or remove the file") from None
    return next((entry for entry in entries if entry.get("file_name") == path.name), {})


def rename_columns(row: Any, info: Mapping[str, Any]) -> Any:
    """Returns a row with the standard column names of LLaMA-Factory, such as ``output``.

    Args:
        row: a row of a data file.
        info: entry of the data file in ``dataset_info.json``. For example, its mapping ``columns``
            ``{"response": "reply"}`` renames the column ``reply`` to ``output``. Columns that have
            a standard name, but are not in the mapping, are then dropped, as in LLaMA-Factory. The
            mapping ``tags`` renames keys and roles of messages.
    """
    if not isinstance(row, dict) or not info:
        return row
    renamed = _texts(info, "columns").items()
    columns = {old: _COLUMNS[key] for key, old in renamed if key in _COLUMNS}
    ignored = STANDARD_NAMES if columns else ()
    row = {
        columns.get(key, key): value
        for key, value in row.items()
        if key in columns or key not in ignored
    }
    tags = _texts(info, "tags")
    turns = row.get("conversations")
    if tags and isinstance(turns, list):
        row["conversations"] = [_turn(turn, tags) for turn in turns]
    return row


_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
_COLUMNS |= {"history": "history", "messages": "conversations"}
STANDARD_NAMES = frozenset(
    [*_COLUMNS.values(), "messages", "conversation", "prompt", "query", "response", "completion"]
)
"""Names of columns from which `data.row_formats` reads the text of a row."""
_ROLES = {f"{name}_tag": name for name in ("user", "assistant", "observation", "system")}
_ROLES["function_tag"] = "function_call"


def _turn(turn: Any, tags: Mapping[str, str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    roles = {tags[tag]: name for tag, name in _ROLES.items() if tag in tags}
    rest = {key: value for key, value in turn.items() if key not in (role, content)}
    label = turn.get(role)
    target_role = roles.get(label, label) if isinstance(label, str) else label
    return {**rest, "role": target_role, "content": turn.get(content)}


def _texts(info: Mapping[str, Any], key: str) -> dict[str, str]:
    texts = info.get(key)
    texts = {} if texts is None else texts
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UserError(f"dataset_info.json: {key!r} must be an object whose values are strings")
    return texts
