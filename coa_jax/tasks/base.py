"""The task: a question with answers that can be checked."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from coa_jax.errors import UserError

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
    """

    id: str
    question: str
    protocol: str
    gold: tuple[str, ...]
    source: str
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: str = ""


def check_split(split: str) -> None:
    """Raises UserError unless ``split`` names a split."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")
