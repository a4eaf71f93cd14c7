"""The task: a question with answers that can be checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

from coa_jax.errors import UserError
from coa_jax.protocol import at_level, get_protocol, in_format

Split = Literal["train", "validation", "test"]
SPLITS: tuple[str, ...] = get_args(Split)


@dataclasses.dataclass(frozen=True)
class Task:
    """One question.

    Attributes:
        id: unique within its source and stable between runs.
        question: what the policy is asked, without instructions.
        protocol: name of the protocol in which it is to be solved.
        gold: accepted answers, any of which is right; one that holds "|" is a set of answers all of
            which must be given.
        source: the source it was loaded from.
        metadata: JSON values; generated sources give ``hops`` (number of searches), ``kind`` and
            ``entities``.
        prompt: the whole user message (instructions and question) that the source of the task
            gives; "" where the source gives none. Used with the prompt style ``data``.
        context: (role, text) of the turns before that message, as in `DistilledRecord`.
    """

    id: str
    question: str
    protocol: str
    gold: tuple[str, ...]
    source: str
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: str = ""
    context: tuple[tuple[str, str], ...] = ()


Leveled = TypeVar("Leveled", bound=Any)


def with_level(asked: Sequence[Leveled], level: str, form: str = "") -> list[Leveled]:
    """Returns tasks or records whose protocols have another level, or another format.

    Args:
        asked: tasks or records; the parts of records are written in the format.
        level, form: see `at_level`; "" keeps those that they have.

    Raises:
        UserError: no level or no format has this name, or a record is in a third format.
    """
    return [one_with_level(a, level, form) for a in asked]


def one_with_level(asked: Leveled, level: str, form: str = "") -> Leveled:
    """One task or record as `with_level` returns it."""
    name = at_level(asked.protocol, level, form)
    changed: dict[str, Any] = {"protocol": name}
    if hasattr(asked, "parts"):
        before, after = get_protocol(asked.protocol), get_protocol(name)
        if before.format is not after.format:
            changed["parts"] = in_format(before, after, asked.parts)
    return dataclasses.replace(asked, **changed)


def check_split(split: str) -> None:
    """Raises UserError unless ``split`` names a split."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")
