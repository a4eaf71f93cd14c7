"""Conversation formats: how thoughts, tool calls, results and the answer are written.

A chain of agents uses the format ``tags``. Two other formats are the baselines of the paper:
``hermes`` writes calls as JSON in the turns of a chat (Hermes and Qwen), ``react`` is ReAct (Yao et
al., arXiv 2210.03629). A policy trained on either has the same tools but no further agents.

A format parses only the text of the policy. The results of tools are never parsed.
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
"""The setting ``format``: a subclass of `Format`, constructed without arguments."""

TAGS = "tags"
"""The format of a chain of agents."""

BAD_CALL = "tool_call"
"""Role of an invalid call: no JSON, an unknown tool, or wrong arguments."""


class Reader(typing.Protocol):
    """Parses the policy's text as it arrives, like `coa_jax.protocol.parser.Parser`.

    The segments that all methods return are contiguous and together cover the text. A segment has a
    role only if it is complete: ``think``, a tool (its body is the text that the tool takes),
    `BAD_CALL`, or the protocol's ``answer``.
    """

    violations: list[Violation]

    @property
    def open_role(self) -> str | None:
        """The role of the open segment; None where the role is not known yet."""

    @property
    def open_body(self) -> str:
        """The body of the open segment so far, a prefix of the final body.

        The result is "" if the role is unknown.
        """

    def feed(self, chunk: str) -> list[Segment]:
        """Reads more text; returns the segments that this text completed."""

    def end_turn(self) -> list[Segment]:
        """Notes that the policy ended its turn, with a token that has no text."""

    def interrupt(self) -> None:
        """Notes that a tool answered: the next text does not continue the text before."""

    def finish(self) -> list[Segment]:
        """Ends a text whose turn the policy did not end; returns the remaining segments."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of an episode, for `Format.write`.

    Attributes:
        thoughts: thoughts of the policy before the call or the answer.
        tool: tag of the called tool; "" in the last step.
        text: argument of the call, or the answer ("" for none).
        observation: result of the tool.
    """

    thoughts: tuple[str, ...]
    tool: str
    text: str
    observation: str = ""


class Format:
    """A conversation format. A subclass defines at least `reader`, `write` and `instructions`.

    Attributes:
        turns: whether calls run when the policy ends its turn. Then the results form a turn of
            their own, written by the model's chat template. Otherwise a result follows within the
            policy's turn, between ``head`` and ``tail``.
        templated: whether the chat template describes the tools to the policy, as JSON schemas.
        tags: marks of the format that are single tokens where the vocabulary has them.
        head, tail: text before and after a result, where no chat template writes it.
    """

    turns: bool = False
    templated: bool = False
    tags: tuple[str, ...] = ()
    head: str = "\n"
    tail: str = "\n"

    def reader(self, protocol: Protocol) -> Reader:
        """Returns a new reader for the policy's text."""
        raise TypeError(f"{type(self).__name__} has no method 'reader'")

    def write(self, protocol: Protocol, steps: Sequence[Step]) -> tuple[tuple[str, str], ...]:
        """Writes an episode as parts of a `DistilledRecord`.

        Results stand between `head` and `tail`.
        """
        raise TypeError(f"{type(self).__name__} has no method 'write'")

    def instructions(self, protocol: Protocol, brief: bool) -> str:
        """Returns the instructions before the question.

        If ``brief``, the instructions are short, for policies that learn the format from data.
        """
        raise TypeError(f"{type(self).__name__} has no method 'instructions'")

    def error(self, protocol: Protocol, segment: Segment) -> str:
        """Returns the message that answers a segment with the role `BAD_CALL`."""
        return "The call could not be understood."

    def marks(self, protocol: Protocol, text: str) -> list[tuple[int, int]]:
        """Finds where a text of the policy uses `tags` as marks: (start, end) offsets, in order."""
        return []

    def quote(self, text: str) -> str:
        """Escapes the text of a tool, so that it cannot contain the end of the result."""
        return text


_named: set[str] = set()  # import paths that settings of this process have named


def find_format(name: str, by_setting: bool = False) -> Format:
    """Looks up a format: built in, of an installed package, or ``package.module:name``.

    Args:
        name: name or import path of the format.
        by_setting: whether a setting gives the name. An import path that comes from a data file or
            a model card is imported only if a setting has named it too.

    Raises:
        UserError: there is no such format, the object is not a `Format`, or no setting names its
            path.
    """
    if by_setting:
        _named.add(name)
    if is_path(name) and name not in _named:
        raise UserError(
            f"the format {name} is code that no setting names; name it in the setting 'format'"
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
