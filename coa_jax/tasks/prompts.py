"""Builds the prompts that the setting ``prompt_style`` selects.

The setting determines the user message in which the policy gets a question:

==========  =======================================================================================
value       content of the user message
==========  =======================================================================================
``full``    the instructions of coa_jax with every rule of the protocol, and the question
``brief``   the name of the protocol and the question
``data``    the message that the data set has for the question; as ``full`` if there is none
``model``   as ``agent.json`` in the model's directory says; as ``full`` if there is no such file
a path      the instructions in the file with this path, and the question
==========  =======================================================================================

The file with instructions is a text file, an ``agent.json``, or a data file (such as a parquet file
of the release) whose rows all have the same instructions. In a text file, ``{question}`` marks the
place of the question. Without this mark, ``Question: `` and the question follow after a blank line.
``{libraries}`` marks the place of the sentence about the packages that programs can import.

Training writes the file ``agent.json``, called the card, next to the weights. The card contains the
protocol, the prompt and the system message with which the policy was trained.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax.data.rows import SUFFIXES, Fields, open_rows
from coa_jax.errors import UserError
from coa_jax.files import durable, untrusted
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

_MARKS = ("\nTask:", "\nQuestion:")
_COLUMNS = {"prompt", "messages", "conversations", "instruction", "input", "system", "question",
            "extra_info"}  # fmt: skip
_ROLES = {"human": "user", "gpt": "assistant"}
_LARGEST = 2**20  # bytes of a text file


# --- messages of a row -----------------------------------------------------------------------


def read_messages(value: Any) -> Messages:
    """Converts the prompt of a row to chat messages.

    Args:
        value: the user message as a string, or a list of chat messages (mappings with ``role`` and
            ``content``) whose last message is from the user.

    Raises:
        ValueError: the value has another form, or a message has no text.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    value = value or []
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise ValueError("the prompt is neither a string nor a list of messages")
    turns = tuple((turn.get("role"), turn.get("content")) for turn in value)
    roles = [role for role, _ in turns]
    if roles[-1:] != ["user"] or not set(roles[1:]) <= {"user", "assistant"}:
        listed_roles = ", ".join(map(str, roles)) or "no message"
        raise ValueError(f"the prompt has {listed_roles}; the last message must be from the user")
    if not all(isinstance(content, str) for _, content in turns) or not turns[-1][1].strip():
        raise ValueError("a message of the prompt has no text")
    return Messages(turns[-1][1], turns[:-1])


def split_message(message: str, question: str = "") -> tuple[str, str]:
    """Splits a user message into the text before the question, and the question.

    Args:
        message: content of the user message.
        question: the question, if the caller knows it; else "". In the latter case, the question is
            the text after the first ``Task:`` at the start of a line. Without ``Task:``, it is the
            text after the first ``Question:`` at the start of a line. Without both, it is the whole
            message.

    Returns:
        (text before the question, question). The first text is "" if the message is only the
        question.
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
    """Returns the prompt that the setting ``prompt_style`` selects.

    Args:
        style: value of the setting: ``full`` (every rule of the protocol), ``brief`` (only its
            name), ``data`` (the message in the data set), ``model`` (as ``agent.json`` of the model
            says), or the path of a file with instructions.
        model: directory of the policy, or the content of its ``agent.json``. Only the style
            ``model`` uses this argument.

    Raises:
        UserError: the style is unknown, its file cannot be read or contains no instructions, or it
            is a data file whose rows have different instructions.
    """
    if style in PROMPT_STYLES:
        return Prompt(style)
    if style == "model":
        return _prompt_of_model(model)
    path = Path(local(style))
    if not os.path.isfile(path):  # also False for an impossible path
        raise UserError(
            f"prompt_style {style!r} is neither {', '.join(PROMPT_STYLES)}, model nor a file: give "
            "one of these words, or the path of a text, JSON or parquet file with instructions"
        )
    if path.name == CARD:
        return _prompt_of_card(durable.read_json_object(path), path)
    return _prompt_of_rows(path) if path.suffix in SUFFIXES else _prompt_of_text(path)


def _prompt_of_text(path: Path) -> Prompt:
    text = untrusted.read_text(path, _LARGEST).replace("\r\n", "\n").strip()
    if not text:
        raise UserError(f"{path}: the file contains no instructions")
    if text.count(QUESTION) > 1:
        raise UserError(f"{path}: {QUESTION} occurs more than once; keep one")
    return Prompt(text if QUESTION in text else f"{text}\n\nQuestion: {QUESTION}")


def _prompt_of_rows(path: Path) -> Prompt:
    kinds: dict[_Kind, int] = {}
    for row in open_rows(path, columns=_COLUMNS.intersection):
        try:
            messages, question = _asked_in(row.value)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{row.where}: {error}") from error
        kind = _instructions(messages, question)
        kinds[kind] = kinds.get(kind, 0) + 1
    prompt = _common_prompt(kinds)
    if prompt is None and len(kinds) > 1:
        raise UserError(
            f"{path}: its {sum(kinds.values())} rows have {len(kinds)} kinds of instructions: "
            "write those of one kind into a text file, or use prompt_style=data"
        )
    if prompt is None:
        raise UserError(f"{path}: its rows contain no instructions before the question")
    return prompt


def _asked_in(row: Fields) -> tuple[Messages, str]:
    """Returns the messages before the first assistant message of a row, and the question.

    The row may contain a ``prompt``, an ``instruction``, or a list of messages.
    """
    info = row.get("extra_info")
    value = row.get("question") or (info.get("question") if isinstance(info, Mapping) else "")
    question = value if isinstance(value, str) else ""
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


def _instructions(messages: Messages, question: str) -> _Kind:
    """Returns the instructions of a prompt: (text before the question, earlier messages)."""
    return split_message(messages.user, question)[0], messages.context


def _common_prompt(kinds: Iterable[_Kind]) -> Prompt | None:
    """Returns the instructions that all prompts share, as a template.

    The result is None if the instructions differ, are empty, or include earlier messages other than
    a system message.
    """
    distinct = list(kinds)
    if len(distinct) != 1:
        return None
    before, context = distinct[0]
    systems = [text for role, text in context if role == "system"]
    if len(systems) < len(context) or not (before or systems):
        return None
    return Prompt(f"{before}{QUESTION}", systems[0] if systems else None)


# --- the card of a model -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wording:
    """A summary of the prompts of many tasks or records, for `make_card` and `warn_of_prompts`.

    Attributes:
        number: number of tasks or records.
        protocols: names of their protocols, sorted.
        without: number of tasks or records for which the data set has no user message.
        own: number of tasks or records for which the data set has a user message with instructions.
        replaced: whether the prompt of the run replaces the instructions of the data set. Only the
            first task or record with instructions is examined.
        kinds: different sets of instructions in the prompts; at most two are kept, which is enough
            to know that prompts differ. () if the setting ``prompt_style`` is not ``data``.
    """

    number: int = 0
    protocols: tuple[str, ...] = ()
    without: int = 0
    own: int = 0
    replaced: bool = False
    kinds: tuple[_Kind, ...] = ()

    def __add__(self, later: Wording) -> Wording:
        """Returns the summary of two collections of tasks or records together."""
        return Wording(
            self.number + later.number,
            tuple(sorted({*self.protocols, *later.protocols})),
            self.without + later.without,
            self.own + later.own,
            (self if self.own else later).replaced,
            tuple(dict.fromkeys((*self.kinds, *later.kinds)))[:2],
        )


def wording_of(one: Asked, prompt: Prompt) -> Wording:
    """Summarises the prompt of a task or record, such as whether it has instructions of its own.

    The sum of two summaries (operator ``+``) is the summary of both together.

    Args:
        one: the task or record, which may have a prompt of its own.
        prompt: settings of the prompt for all tasks of the run.
    """
    own_prompt = one.prompt.strip() not in ("", one.question.strip())
    style_data = prompt.style == "data"
    messages = messages_of(one, prompt) if style_data or own_prompt else None
    return Wording(
        1,
        (one.protocol,),
        int(not one.prompt),
        int(own_prompt),
        own_prompt and messages is not None and messages.user.strip() != one.prompt.strip(),
        (_instructions(messages, one.question),) if style_data and messages is not None else (),
    )


def make_card(prompt: Prompt, asked: Sequence[Asked] | Wording) -> dict[str, Any]:
    """Builds the content of ``agent.json``, which says how questions are put to a trained policy.

    Args:
        prompt: prompt of the training run.
        asked: tasks or records of the run, or their summary.

    Returns:
        A mapping with three keys. ``protocol`` is the protocol of all tasks, or "" if there are
        several. ``prompt_style`` is a style or the template of a prompt (after training on
        conversations, the question alone); "" if each task has its own instructions (style
        ``data``). ``system`` is the system message, or None
        if the prompt sets no system message.
    """
    wording = _summed_wording(asked, prompt)
    chosen: Prompt | None = prompt
    if prompt.style == "data":
        chosen = _common_prompt(wording.kinds)
    if wording.protocols and not any(get_protocol(name).roles for name in wording.protocols):
        chosen = Prompt(QUESTION)  # conversations have no instructions, whatever the style is
    return {
        "protocol": wording.protocols[0] if len(wording.protocols) == 1 else "",
        "prompt_style": chosen.style if chosen else "",
        "system": chosen.system if chosen else None,
    }


def _summed_wording(items: Sequence[Asked] | Wording, prompt: Prompt) -> Wording:
    if isinstance(items, Wording):
        return items
    return sum((wording_of(one, prompt) for one in items), Wording())


def protocol_of_model(model: str | Path | Mapping[str, Any]) -> str:
    """Returns the name of the protocol in ``agent.json`` of a model.

    The result is "" if there is no such file, or if the file names no protocol.

    Args:
        model: directory of the model, or the content of its ``agent.json``.

    Raises:
        UserError: ``agent.json`` cannot be read.
    """
    return str(_card_of(model)[0].get("protocol", ""))


def _card_of(model: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], Path]:
    """Returns (card, path of the card). A card that is given as a mapping is returned unchanged."""
    if isinstance(model, Mapping):
        return model, Path(CARD)
    return read_card(model) if model else {}, Path(model) / CARD


def _prompt_of_model(model: str | Path | Mapping[str, Any]) -> Prompt:
    card, path = _card_of(model)
    if not card.get("prompt_style"):
        if model and path.parent.exists():  # a missing directory is reported by loading the model
            logging.warning(
                "%s has no %s with a prompt: using prompt_style=full", path.parent, CARD
            )
        return Prompt("full")
    return _prompt_of_card(card, path)


def _prompt_of_card(card: Mapping[str, Any], path: Path) -> Prompt:
    style, system = card.get("prompt_style"), card.get("system")
    if not isinstance(style, str) or not isinstance(system, str | None):
        raise UserError(f"{path}: the fields 'prompt_style' and 'system' must be strings")
    try:
        return Prompt(style, system)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# --- warnings of a run ---------------------------------------------------------------------------


def warn_of_prompts(
    asked: Sequence[Asked] | Wording, prompt: Prompt, what: str, setting: str
) -> None:
    """Logs a warning if the prompt of a run does not suit its tasks or records.

    There are three such cases:

    * The prompt replaces instructions that the data set contains.
    * The style is ``data``, but the data set has no prompt for some questions.
    * The policy's programs can import packages, but a prompt from a file lacks ``{libraries}``, the
      mark that is replaced by the names of the packages.

    Args:
        asked: tasks or records, or their summary.
        prompt: the prompt style and the instructions.
        what: plural noun for the tasks or records in the warning, for example ``tasks``.
        setting: name of the setting in the warning, for example ``config.rollout.prompt_style``.
    """
    wording = _summed_wording(asked, prompt)
    notes = {note for name in wording.protocols for note in get_protocol(name).notes.values()}
    if notes - {""} and prompt.is_template and LIBRARIES not in prompt.style:
        logging.warning(
            "%s: the prompt does not name the packages of tools.code.libraries; write %s at the "
            "place for the sentence about the packages", setting, LIBRARIES,
        )  # fmt: skip
    if prompt.style == "data" and wording.without:
        logging.warning(
            "%d of %d %s have no prompt of their own: %s=data uses our instructions for them",
            wording.without, wording.number, what, setting,
        )  # fmt: skip
    elif wording.own and wording.replaced:
        logging.warning(
            "%d of %d %s have instructions of their own, which %s replaces; %s=data keeps them",
            wording.own, wording.number, what, setting, setting,
        )  # fmt: skip
