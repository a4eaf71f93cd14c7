"""Defines the task: a question with its accepted answers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from coa_jax.config.extensions import ExtensionKind, bind, read_options
from coa_jax.config.fields import Split
from coa_jax.errors import UserError
from coa_jax.protocol import at_level, get_protocol, in_format, parse_boxed, split_level

SPLITS: tuple[str, ...] = get_args(Split)
_SALT = "1"
_SHARES = (("train", 0.6), ("validation", 0.7), ("test", 1.0))  # cumulative shares

L = TypeVar("L", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Licence:
    """The licence of the texts of a task source, for cards of data and models.

    Attributes:
        text: name of the data and of its licence, for readers.
        identifier: identifier of the licence on the Hub; "" if unknown.
        data: name of the data; "" if unknown.
        language: language of the texts, such as "en"; "" if unknown.
    """

    text: str
    identifier: str = ""
    data: str = ""
    language: str = ""

    def of(self, load: L) -> L:
        """Gives the function of a task source the attribute ``licence``, as a decorator."""
        load.__dict__["licence"] = self
        return load


@dataclasses.dataclass(frozen=True)
class Task:
    """A question with its accepted answers.

    Attributes:
        id: identifier of the task. No other task of the same source has this id, and the id is the
            same in every run.
        question: question for the policy, without instructions.
        protocol: name of the protocol in which the policy must answer.
        gold: accepted answers, of which the policy must give at least one. An accepted answer of
            the form "A|B" is a set, and the policy must give all its members.
        source: source from which the task was loaded, see `load_tasks`.
        metadata: further facts about the task, as JSON values. The key ``grader`` names the reward
            of the task. Generated tasks have the keys ``hops`` (number of searches that the answer
            needs), ``kind`` (kind of question), ``relation`` (property for which it asks) and
            ``entities`` (names on the way to the answer).
        prompt: user message, with instructions and question, as the data set contains the message;
            "" if the data set has none. Only the prompt style ``data`` uses this message.
        context: (role, text) of each message before ``prompt``, such as a system message.
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
        """Whether the answer to the task is a program; ``gold`` then contains its tests."""
        return self.metadata.get("grader") == "code"

    def unboxed(self, answer: str | None) -> str | None:
        r"""Returns the part of an answer that graders compare with the accepted answers.

        In the protocol ``code``, which also serves mathematical questions, this is the content of
        ``\boxed``. Without a box, and in other protocols, this is the whole answer.
        """
        if answer is not None and split_level(self.protocol)[0] == "code":
            return parse_boxed(answer) or answer
        return answer

    def without_tests(self) -> Task:
        """Returns a copy of the task without the tests of programs, for storage in trajectories.

        Tests can take up several megabytes.
        """
        return dataclasses.replace(self, gold=()) if self.is_program else self


Leveled = TypeVar("Leveled", bound=Any)


def with_level(asked: Sequence[Leveled], level: str, form: str = "") -> list[Leveled]:
    """Returns copies of tasks or records with another protocol level (strictness) or format.

    Args:
        asked: tasks, or distilled records (trajectories for SFT). The text of a record is rewritten
            in the new format.
        level: new level, ``lenient`` or ``paper`` (stricter, see docs/protocol.md); "" keeps the
            present level.
        form: new format of the protocols, such as ``hermes``; "" keeps the present format.

    Raises:
        UserError: the level or the format is unknown, or a new format is given for a record whose
            text is not in the format ``tags``. Only texts in this format can be rewritten.
    """
    return [one_with_level(a, level, form) for a in asked]


def one_with_level(asked: Leveled, level: str, form: str = "") -> Leveled:
    """Returns a copy of a task or record with another protocol level or another format.

    Args:
        asked: a task, or a distilled record (a trajectory for SFT). The text of a record is
            rewritten in the new format.
        level: new level of the protocol; "" keeps the present level.
        form: new format of the protocol; "" keeps the present format.

    Raises:
        UserError: the level or the format is unknown, or a new format is given for a record whose
            text is not in the format ``tags``. Only texts in this format can be rewritten.
    """
    name = at_level(asked.protocol, level, form)
    changed: dict[str, Any] = {"protocol": name}
    if hasattr(asked, "parts"):
        before, after = get_protocol(asked.protocol), get_protocol(name)
        if before.format is not after.format:
            changed["parts"] = in_format(before, after, asked.parts)
    return dataclasses.replace(asked, **changed)


def check_split(split: str) -> None:
    """Checks that a text is the name of a split.

    Raises:
        UserError: the text is neither ``train`` nor ``validation`` nor ``test``.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")


Options = TypeVar("Options")


def parse_options(kind: Callable[..., Options], source: str) -> Options:
    """Parses the options of a task source, for example ``factbook:hops=1-2,templates=1``.

    Args:
        kind: dataclass whose fields are the options.
        source: name of the source and, after a colon, the options.

    Raises:
        UserError: an option is unknown, or its value is invalid.
    """
    name, _, rest = source.partition(":")
    where = f"tasks={source}"
    sources = ExtensionKind("task source", "", {name: kind})
    options: Options = bind(sources, name, read_options(rest, where), where, text=True)()
    return options


def fraction(*parts: object) -> float:
    """Returns a number in [0, 1), a hash of the arguments, for reproducible random choices."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


@functools.cache
def split_of(entity: str) -> str:
    """Returns the split of an entity, by a hash of its name: ``train``, ``validation`` or ``test``.

    About 60 % of the entities belong to ``train``, 10 % to ``validation`` and 30 % to ``test``.
    """
    share = fraction(_SALT, entity)
    return next(split for split, limit in _SHARES if share < limit)


TASK_TOOLS = ExtensionKind("source of tools", "coa_jax.task_tools", {}, offers=("protocol",))
"""Functions that return the tools that only one task has, by tag, from the task's protocol.

The metadata key ``task_tools`` of a task names its function. ``Task.source`` cannot, because a
mixture changes it.
"""


def tools_of(task: Task) -> Mapping[str, Any]:
    """Returns the tools that only this task has: tag -> `Tool`; {} for most tasks.

    For example, the tasks of `coa_jax.demo.drawn_tools` differ in the descriptions of their tools.
    """
    name = task.metadata.get("task_tools")
    if not name:
        return {}
    tools: Mapping[str, Any] = bind(TASK_TOOLS, name, {}, "tasks")(protocol=task.protocol)
    return tools
