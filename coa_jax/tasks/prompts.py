"""The setting ``prompt_style``: in which words questions are put to a policy.

==========  =======================================================================================
value       user message
==========  =======================================================================================
``full``    our instructions, every rule of the protocol, and the question
``brief``   the protocol's name and the question
``data``    the message of the question's own row, word for word; ``full`` where the row has none
``model``   what ``agent.json`` in the model's directory names; ``full`` where the file is missing
a path      the instructions of that file, and the question
==========  =======================================================================================

A path names a text file, or a data file whose rows carry one and the same instructions: parquet,
JSON or JSON lines, such as the release's.  A text file holds instructions, which a blank line,
``Question: `` and the question follow, or ``{question}`` where the question belongs.  The sentence
about the packages that programs can import stands where the file has ``{libraries}``.

``agent.json`` is a card that training writes beside the weights: protocol, prompt and system
message with which the policy was trained.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax import files
from coa_jax.errors import UserError
from coa_jax.model.card import CARD, read_card
from coa_jax.protocol import (
    LIBRARIES,
    PROMPT_STYLES,
    QUESTION,
    Asked,
    Messages,
    Prompt,
    get_protocol,
    messages_of,
)
from coa_jax.storage import local
from coa_jax.tasks.rows import Row, read_rows

_MARKS = ("\nTask:", "\nQuestion:")
_ROW_SUFFIXES = (".parquet", ".json", ".jsonl")
_COLUMNS = ("prompt", "messages", "conversations", "instruction", "input", "system", "question",
            "extra_info")  # fmt: skip
_ROLES = {"human": "user", "gpt": "assistant"}
_LARGEST = 2**20


# --- messages of a row -----------------------------------------------------------------------


def read_messages(value: Any) -> Messages:
    """Reads the prompt of a row: a text, or chat messages that end with the user's message.

    Raises:
        ValueError: the value is neither a text nor such a list, or a message holds no text.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    value = value or []
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise ValueError("the prompt is neither a text nor a list of messages")
    turns = tuple((turn.get("role"), turn.get("content")) for turn in value)
    roles = [role for role, _ in turns]
    if roles[-1:] != ["user"] or not set(roles[1:]) <= {"user", "assistant"}:
        found = ", ".join(map(str, roles)) or "no message"
        raise ValueError(f"the prompt has {found}; expected messages that end with the user's")
    if not all(isinstance(content, str) for _, content in turns) or not turns[-1][1].strip():
        raise ValueError("a message of the prompt holds no text")
    return Messages(turns[-1][1], turns[:-1])


def split_message(message: str, question: str = "") -> tuple[str, str]:
    """Splits a user message into what stands before the question, and the question.

    Args:
        message: content of the user message.
        question: the question, where it is known; else the question begins behind ``Task:`` or
            ``Question:`` at the beginning of a line.

    Returns:
        (text before the question, "" where the message is the question alone; question).
    """
    message, question = message.rstrip(), question.strip()
    if question and message.endswith(question):
        return message[: -len(question)], question
    for mark in _MARKS:
        _, _, rest = message.partition(mark)
        if rest.strip():
            return message[: -len(rest.lstrip())], rest.strip()
    return "", message.strip()


# --- the setting -----------------------------------------------------------------------------


def load_prompt(style: str, model: str | Path | Mapping[str, Any] = "") -> Prompt:
    """Reads what the setting ``prompt_style`` names, once for a whole run.

    Args:
        style: see the module.
        model: directory of the policy, or its card, for the style ``model``.

    Raises:
        UserError: the style is unknown, the file cannot be read, holds no instructions, or rows
            with instructions of several kinds.
    """
    if style in PROMPT_STYLES:
        return Prompt(style)
    if style == "model":
        return _prompt_of_model(model)
    path = Path(local(style))
    if not os.path.isfile(path):  # which is False too for what no path can be
        raise UserError(
            f"prompt_style {style!r} is neither {', '.join(PROMPT_STYLES)}, model nor a file: give "
            "one of these words, or the path of a text, JSON or parquet file with instructions"
        )
    if path.name == CARD:
        return _prompt_of_card(files.read_json_object(path), path)
    return _prompt_of_rows(path) if path.suffix in _ROW_SUFFIXES else _prompt_of_text(path)


def _prompt_of_text(path: Path) -> Prompt:
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path}: instructions of more than {_LARGEST} bytes are not a prompt")
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the instructions cannot be read: {error}") from error
    if not text:
        raise UserError(f"{path}: the file holds no instructions")
    if text.count(QUESTION) > 1:
        raise UserError(f"{path}: {QUESTION} stands in the text more than once; leave one")
    return Prompt(text if QUESTION in text else f"{text}\n\nQuestion: {QUESTION}")


def _prompt_of_rows(path: Path) -> Prompt:
    kinds: dict[_Kind, int] = {}
    for number, row in enumerate(read_rows(path, _COLUMNS), 1):
        try:
            messages, question = _asked_in(row)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: row {number}: {error}") from error
        kind = _kind(messages, question)
        kinds[kind] = kinds.get(kind, 0) + 1
    prompt = _common(kinds)
    if prompt is None and len(kinds) > 1:
        raise UserError(
            f"{path}: its {sum(kinds.values())} rows have {len(kinds)} kinds of instructions: "
            "write those of one kind into a text file, or use prompt_style=data"
        )
    if prompt is None:
        raise UserError(f"{path}: its rows hold no instructions before the question")
    return prompt


def _asked_in(row: Row) -> tuple[Messages, str]:
    """The messages before the assistant's turn in a row of any known form, and the question."""
    info = row.get("extra_info")
    known = row.get("question") or (info.get("question") if isinstance(info, Mapping) else "")
    question = known if isinstance(known, str) else ""
    if row.get("prompt"):
        return read_messages(row["prompt"]), question
    if row.get("instruction"):
        added = row.get("input") or ""
        user = f"{row['instruction']}\n{added}" if added else row["instruction"]
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        return read_messages([*system, {"role": "user", "content": user}]), question or added
    turns = [
        {"role": _ROLES.get(role, role), "content": turn.get("content", turn.get("value"))}
        for turn in row.get("messages") or row.get("conversations") or ()
        for role in (turn.get("role", turn.get("from")),)
    ]
    if not turns:
        raise ValueError("there is no prompt, and no field 'messages' or 'instruction'")
    before = itertools.takewhile(lambda turn: turn["role"] != "assistant", turns)
    return read_messages(list(before)), question


_Kind = tuple[str, tuple[tuple[str, str], ...]]


def _kind(messages: Messages, question: str) -> _Kind:
    """What stands before the question: in its message, and in the turns before."""
    return split_message(messages.user, question)[0], messages.context


def _common(kinds: Iterable[_Kind]) -> Prompt | None:
    """The one kind of instructions as a template; None for several, none, or earlier turns."""
    found = list(kinds)
    if len(found) != 1:
        return None
    before, context = found[0]
    systems = [text for role, text in context if role == "system"]
    if len(systems) < len(context) or not (before or systems):
        return None
    return Prompt(f"{before}{QUESTION}", systems[0] if systems else None)


# --- the card of a model -----------------------------------------------------------------------


def make_card(prompt: Prompt, asked: Sequence[Asked]) -> dict[str, Any]:
    """Describes for ``agent.json`` how a policy is asked.

    Args:
        prompt: prompt of the training run.
        asked: tasks or records of the run.

    Returns:
        ``protocol`` ("" for several), ``prompt_style`` (a style, or a template; "" where the rows
        of the style ``data`` have several kinds of instructions) and ``system``.
    """
    protocols = {one.protocol for one in asked}
    chosen: Prompt | None = prompt
    if prompt.style == "data":
        chosen = _common({_kind(messages_of(one, prompt), one.question) for one in asked})
    return {
        "protocol": protocols.pop() if len(protocols) == 1 else "",
        "prompt_style": chosen.style if chosen else "",
        "system": chosen.system if chosen else None,
    }


def protocol_of_model(model: str | Path | Mapping[str, Any]) -> str:
    """Returns the protocol that the card of a model names; "" where there is none.

    Raises:
        UserError: the card cannot be read.
    """
    card, path = _card_of(model)
    name = card.get("protocol", "")
    if not isinstance(name, str):
        raise UserError(f"{path}: the field 'protocol' must be a text")
    return name


def _card_of(model: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], Path]:
    """A card that is given, or read from the directory of a model, and its path."""
    if isinstance(model, Mapping):
        return model, Path(CARD)
    return read_card(model) if model else {}, Path(model) / CARD


def _prompt_of_model(model: str | Path | Mapping[str, Any]) -> Prompt:
    card, path = _card_of(model)
    if not card.get("prompt_style"):
        if model and path.parent.exists():  # or it is refused when it is loaded
            logging.warning(
                "%s has no %s that names its prompt: prompt_style=full is taken", path.parent, CARD
            )
        return Prompt("full")
    return _prompt_of_card(card, path)


def _prompt_of_card(card: Mapping[str, Any], path: Path) -> Prompt:
    style, system = card.get("prompt_style"), card.get("system")
    if not isinstance(style, str) or not isinstance(system, str | None):
        raise UserError(f"{path}: the fields 'prompt_style' and 'system' must be texts")
    try:
        return Prompt(style, system)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# --- what a run should know ----------------------------------------------------------------------


def warn_of_prompts(asked: Sequence[Asked], prompt: Prompt, what: str, setting: str) -> None:
    """Logs where a prompt replaces instructions that rows carry, or rows lack those it asks for,
    and where a prompt from a file tells nothing of the packages that programs can import.

    Args:
        asked: tasks or records.
        prompt: prompt that was chosen for them.
        what: names them, for example ``tasks``.
        setting: names the setting, for example ``config.rollout.prompt_style``.
    """
    notes = {note for one in asked for note in get_protocol(one.protocol).notes.values() if note}
    if notes and prompt.is_template and LIBRARIES not in prompt.style:
        logging.warning(
            "%s: its prompt does not name the packages of code_libraries; write %s where the "
            "sentence about them belongs", setting, LIBRARIES,
        )  # fmt: skip
    own = [one for one in asked if one.prompt.strip() not in ("", one.question.strip())]
    without = sum(not one.prompt for one in asked)
    if prompt.style == "data" and without:
        logging.warning(
            "%d of %d %s carry no prompt of their own: %s=data asks them with our instructions",
            without, len(asked), what, setting,
        )  # fmt: skip
    elif own and messages_of(own[0], prompt).user.strip() != own[0].prompt.strip():
        logging.warning(
            "%d of %d %s carry instructions of their own, which %s replaces; %s=data keeps them",
            len(own), len(asked), what, setting, setting,
        )  # fmt: skip
