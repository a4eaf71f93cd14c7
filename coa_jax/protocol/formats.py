"""Conversation formats: how thoughts, calls, results and the answer are written.

The format of a chain of agents are tags, ``tags``.  Two others are the baselines that the paper
compares it with: calls as JSON in turns of a chat (``hermes``: Hermes and Qwen), and ``react`` (Yao
et al., arXiv 2210.03629).  A policy trained on either has the same tools and no further agents.

A format reads the policy's text alone.  What a tool returned is never parsed.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

from coa_jax.errors import UserError
from coa_jax.extensions import Kind, find, is_path, refuse_result

if typing.TYPE_CHECKING:
    from coa_jax.protocol.parser import Segment, Violation
    from coa_jax.protocol.spec import Protocol

FORMATS = Kind(
    "format",
    "coa_jax.formats",
    {
        "hermes": "coa_jax.protocol.hermes:Hermes",
        "react": "coa_jax.protocol.react:React",
    },
)
"""A subclass of `Format`, made without arguments."""

TAGS = "tags"
"""The format of a chain of agents."""

BAD_CALL = "tool_call"
"""Role of a call that cannot be made: no JSON, no such tool, no such arguments."""


class Reader(typing.Protocol):
    """Parses the policy's text as it arrives, like `coa_jax.protocol.parser.Parser`.

    The segments of all methods together are contiguous and cover the text.  A segment has a role
    only if it is complete: ``think``, a tool (with the text that the tool takes as its body),
    `BAD_CALL`, or the protocol's ``answer``.
    """

    violations: list[Violation]

    @property
    def open_role(self) -> str | None:
        """Role of what is open now; None where that is not known."""

    @property
    def open_body(self) -> str:
        """Its body so far, which begins that of its segment; "" where the role is not known."""

    def feed(self, chunk: str) -> list[Segment]:
        """Reads more text; returns the segments that it completed."""

    def end_turn(self) -> list[Segment]:
        """The policy has ended its turn, by a token that is no text."""

    def interrupt(self) -> None:
        """A tool has answered: the next text is not the continuation of the last."""

    def finish(self) -> list[Segment]:
        """There will be no more text, and the turn has not been ended."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of an episode, for `Format.write`.

    Attributes:
        thoughts: what the policy thought before.
        tool: tag of the tool that it called then; "" for the last step.
        text: the call's arguments, or the answer ("" for none).
        observation: what the tool returned.
    """

    thoughts: tuple[str, ...]
    tool: str
    text: str
    observation: str = ""


class Format:
    """A conversation format; a subclass has at least `reader`, `write` and `instructions`.

    Attributes:
        turns: whether calls run when the policy ends its turn, and results are a turn of their own,
            as the model's chat template writes it; else a result follows within the turn, between
            ``head`` and ``tail``.
        templated: whether the chat template describes the tools to the policy, as JSON schemas.
        tags: marks that are tokens of their own where the vocabulary has them.
        head, tail: around a result in texts that no chat template has written.
    """

    turns: bool = False
    templated: bool = False
    tags: tuple[str, ...] = ()
    head: str = "\n"
    tail: str = "\n"

    def reader(self, protocol: Protocol) -> Reader:
        """A new reader of a policy's text."""
        raise TypeError(f"{type(self).__name__} has no method 'reader'")

    def write(self, protocol: Protocol, steps: Sequence[Step]) -> tuple[tuple[str, str], ...]:
        """An episode as parts of a `DistilledRecord`; results stand between `head` and `tail`."""
        raise TypeError(f"{type(self).__name__} has no method 'write'")

    def instructions(self, protocol: Protocol, brief: bool) -> str:
        """What stands before the question; brief for policies that learn the format from data."""
        raise TypeError(f"{type(self).__name__} has no method 'instructions'")

    def error(self, protocol: Protocol, segment: Segment) -> str:
        """What the policy is told in place of a result, for a segment with the role `BAD_CALL`."""
        return "The call could not be understood."

    def marks(self, protocol: Protocol, text: str) -> list[tuple[int, int]]:
        """Where in a text of the policy `tags` are meant as such: (start, end), in order."""
        return []

    def quote(self, text: str) -> str:
        """A tool's text such that it does not look like the end of a result."""
        return text


_named: set[str] = set()  # by path, in a setting of this process


def find_format(name: str, by_setting: bool = False) -> Format:
    """The format of a name: built in, of an installed package, or ``package.module:name``.

    Args:
        name: the name.
        by_setting: whether a setting has it.  A path in a file of data, or in the card of a model,
            imports nothing that no setting has named.

    Raises:
        UserError: there is none, it is no `Format`, or no setting names its path.
    """
    if by_setting:
        _named.add(name)
    if is_path(name) and name not in _named:
        raise UserError(
            f"the format {name} is code that no setting names; give it as the setting 'format'"
        )
    return _made(name)


@functools.cache
def _made(name: str) -> Format:
    try:
        found: Any = find(FORMATS, name, "format")()
    except TypeError as error:
        raise UserError(f"format: {name} cannot be made: {error}") from None
    own = ("reader", "write", "instructions")
    if not isinstance(found, Format) or any(
        getattr(type(found), method) is getattr(Format, method) for method in own
    ):
        wanted = f"a subclass of coa_jax.protocol.formats.Format with {', '.join(own)}"
        raise refuse_result(FORMATS, name, found, wanted, "format")
    return found
