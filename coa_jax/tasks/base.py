"""The task: a question with verifiable answers."""

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
    """A question with its accepted answers.

    Attributes:
        id: id that is unique within its source and stable between runs.
        question: question for the policy, without instructions.
        protocol: name of the protocol in which the policy must answer.
        gold: accepted answers, any of which is right. An answer that contains "|" is a set, all of
            whose members must be given.
        source: source from which the task was loaded.
        metadata: JSON values; generated sources set ``hops`` (number of searches), ``kind`` and
            ``entities``.
        prompt: whole user message (instructions and question) from the source of the task; "" if
            the source has none. Used with the prompt style ``data``.
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

    def __post_init__(self) -> None:
        if isinstance(self.gold, str):  # its letters would be the accepted answers
            raise UserError(
                f"task {self.id!r}: gold is a tuple of accepted answers; write ({self.gold!r},)"
            )

    @property
    def is_program(self) -> bool:
        """Whether the answer is a program, and ``gold`` the tests that grade it."""
        return self.metadata.get("grader") == "code"

    def without_tests(self) -> Task:
        """Returns the task without tests, which can have megabytes, for use in trajectories."""
        return dataclasses.replace(self, gold=()) if self.is_program else self


Leveled = TypeVar("Leveled", bound=Any)


def with_level(asked: Sequence[Leveled], level: str, form: str = "") -> list[Leveled]:
    """Returns tasks or records with another protocol level, or another format.

    Args:
        asked: tasks or records; the parts of records are rewritten in the format.
        level: level of the protocols; "" keeps the present level.
        form: format of the protocols; "" keeps the present format.

    Raises:
        UserError: the level or the format is unknown, or a record is in a format other than tags.
    """
    return [one_with_level(a, level, form) for a in asked]


def one_with_level(asked: Leveled, level: str, form: str = "") -> Leveled:
    """Returns a single task or record with another protocol level, or another format.

    Args:
        asked: a task or a record.
        level: see `with_level`.
        form: see `with_level`.

    Raises:
        UserError: see `with_level`.
    """
    name = at_level(asked.protocol, level, form)
    changed: dict[str, Any] = {"protocol": name}
    if hasattr(asked, "parts"):
        before, after = get_protocol(asked.protocol), get_protocol(name)
        if before.format is not after.format:
            changed["parts"] = in_format(before, after, asked.parts)
    return dataclasses.replace(asked, **changed)


def check_split(split: str) -> None:
    """Raises UserError unless ``split`` is the name of a split."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")
