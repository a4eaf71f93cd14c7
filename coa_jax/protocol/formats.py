"""Defines protocols and conversation formats, and the segments into which texts are parsed.

A format says how thoughts, tool calls, tool results and the answer are written.

A chain of agents uses the format ``tags``. Two other formats are baselines in the Chain-of-Agents
paper: ``hermes`` writes tool calls as JSON in the turns of a chat, as Hermes and Qwen do, and
``react`` is ReAct (Yao et al., arXiv 2210.03629). In these two formats the policy can call the same
tools, but the other agents of a chain do not exist.

A format parses only the text of the policy. The results of tools are never parsed.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from coa_jax.config.extensions import ExtensionKind, find, is_path, refuse_result
from coa_jax.errors import UserError

FORMATS = ExtensionKind(
    "format",
    "coa_jax.formats",
    {
        "hermes": "coa_jax.protocol.hermes:Hermes",
        "react": "coa_jax.protocol.react:React",
    },
)
"""The setting ``format``, which names a subclass of `Format`. It is constructed without arguments.
"""

TAGS = "tags"
"""Name of the format of a chain of agents."""

BAD_CALL = "tool_call"
"""Role of an invalid call, which is not JSON, names an unknown tool, or has wrong arguments."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a text: the text of one tag, or text between two tags.

    Attributes:
        role: name of the tag; None for text outside tags.
        body: text between the opening and the closing tag, or the text outside tags.
        start: offset of the first character, including the opening tag.
        end: offset one past the last character, including the closing tag.
        closed: False if the text ended before the closing tag. Text outside tags is always closed.
    """

    role: str | None
    body: str
    start: int
    end: int
    closed: bool


@dataclasses.dataclass(frozen=True)
class Violation:
    """A violation of a rule of the protocol.

    Attributes:
        kind: kind of the violation. The parser reports ``nested``, ``unexpected_close``,
            ``unknown_tag`` and ``unclosed``. ``coa_jax.protocol.automaton`` lists all other kinds.
        position: offset of the violation in the text, in characters.
        message: sentence that explains the violation.
    """

    kind: str
    position: int
    message: str


class Reader(typing.Protocol):
    """An interface for parsers of the policy's text, which arrives in pieces.

    The segments that the methods return are contiguous, and together cover the whole text. In the
    format ``tags``, the role of a segment is the name of its tag. In all other formats, a complete
    segment has the role ``think``, the tag of a tool (the body is then the text that the tool
    takes), `BAD_CALL`, or the protocol's ``answer``. All other text has the role None.

    Attributes:
        violations: violations found so far, in the order in which they were found.
    """

    violations: list[Violation]

    @property
    def open_role(self) -> str | None:
        """Role of the segment that is being read; None while the role is unknown."""

    @property
    def open_body(self) -> str:
        """Body, as far as read, of the segment that is being read; "" while its role is unknown."""

    def feed(self, chunk: str) -> list[Segment]:
        """Parses a further piece of text; returns the segments that this piece completes."""

    def end_turn(self) -> list[Segment]:
        """Tells the parser that the policy has ended its turn; returns the segments that end here.

        The parser cannot see the end of a turn, because the token that ends a turn has no text.
        """

    def interrupt(self) -> None:
        """Tells the parser that a tool has answered, before the policy's next text is fed.

        If a mark such as ``<tool_call>`` is incomplete at this point, it stays plain text. The
        policy's next text cannot complete it.
        """

    def finish(self) -> list[Segment]:
        """Ends the parsing, even within a turn; returns the segments of the remaining text."""


@dataclasses.dataclass(frozen=True)
class EpisodeStep:
    """One step of an episode (thoughts, then a call or the answer), for `Format.write`.

    Attributes:
        thoughts: thoughts of the policy before the tool call or the answer.
        tool: tag of the called tool; "" in the last step, which has no tool call.
        text: argument of the tool call. In the last step, the answer, or "" if there is none.
        observation: result of the tool; "" in the last step.
    """

    thoughts: tuple[str, ...]
    tool: str
    text: str
    observation: str = ""


class Format(abc.ABC):
    """A conversation format. A subclass must define `reader`, `write` and `instructions`.

    Attributes:
        turns: whether tools run only when the policy ends its turn. If True, the model's chat
            template writes the results as a separate turn. If False, a tool runs as soon as its
            call is complete, and its result follows in the same turn, between ``head`` and
            ``tail``.
        templated: whether the chat template describes the tools to the policy, as JSON schemas.
        tags: texts of the format, such as ``<tool_call>``, that are encoded as single tokens if the
            vocabulary has these tokens.
        head: text before the result of a tool, if the chat template does not write the result.
        tail: text after the result of a tool, if the chat template does not write the result.
    """

    turns: bool = False
    templated: bool = False
    tags: tuple[str, ...] = ()
    head: str = "\n"
    tail: str = "\n"

    @abc.abstractmethod
    def reader(self, protocol: Protocol) -> Reader:
        """Returns a new parser of the policy's text in this format."""

    @abc.abstractmethod
    def write(
        self, protocol: Protocol, steps: Sequence[EpisodeStep]
    ) -> tuple[tuple[str, str], ...]:
        """Writes the steps of an episode as text in this format, for training data.

        Args:
            protocol: protocol with the tools.
            steps: steps in order; the last step has the answer.

        Returns:
            The parts of a `DistilledRecord`: (``"policy"`` or ``"environment"``, text) in order.
            The result of a tool stands between `head` and `tail`.
        """

    @abc.abstractmethod
    def instructions(self, protocol: Protocol, brief: bool) -> str:
        """Returns the instructions that precede the question in a prompt.

        Args:
            protocol: protocol with the tools.
            brief: whether to return short instructions, which suffice for a policy that was trained
                on the format.
        """

    def error(self, protocol: Protocol, segment: Segment) -> str:
        """Returns the observation that explains an invalid call to the policy.

        Args:
            protocol: protocol with the tools.
            segment: the call, a segment with the role `BAD_CALL`.
        """
        return "The call could not be understood."

    def marks(self, protocol: Protocol, text: str) -> list[tuple[int, int]]:
        """Finds the places in a text of the policy that must be encoded as single tokens.

        At these places, the text uses one of `tags`, such as ``<tool_call>``, as a mark.

        Returns:
            (start, end) of each place, as offsets in characters, in ascending order. A place where
            the text only quotes one of `tags` is not included.
        """
        return []

    def quote(self, text: str) -> str:
        """Returns a tool's text, escaped so that it cannot contain the mark that ends a result."""
        return text


ThinkRule = Literal["required", "optional", "forbidden"]
BodyForm = Literal["text", "grades", "score", "code", "urls", "inspection", "solution"]
"""The form that the body of a tag must have.

* ``text``: any text that is not blank.
* ``grades``: three ``criterion: grade`` pairs.
* ``score``: a sentence with one integer from 1 to 4.
* ``code``: a program in a Markdown code block, and optionally its standard input in another block.
* ``urls``: URLs joined by ``|``.
* ``inspection``: a JSON object with the key ``file_path``.
* ``solution``: ``\\boxed{...}``, or one program in a Markdown code block.
"""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A set of tags, with the rules for the order and the bodies of the tags.

    Attributes:
        name: name of the protocol, with which `get_protocol` finds it.
        roles: names of all tags. ``think`` comes first, and the others follow in the order in which
            prompts explain them.
        tools: names of the tags that call a tool. An observation follows each of these tags.
        next_actions: action -> the actions that may follow. The key ``START`` stands for the
            beginning of the text. Actions are all tags except ``think``, whose places
            ``think_rule`` determines, and the observation, which always follows a tool call.
        think_rule: action -> whether a ``think`` right before the action is ``required``,
            ``optional`` or ``forbidden``.
        body_form: tag -> form of its body, see `BodyForm`. A tag without an entry has the form
            ``text``.
        verbatim: tags whose bodies may contain other tags, because these bodies quote programs or
            the text of the environment.
        described: tag -> description for the policy. Only tools that are not built in need a
            description.
        notes: tag -> a sentence about the tool that prompts add, such as the packages that its
            programs can import.
        pass_score: lowest score of a ``double_check`` that passes, so that ``answer`` may follow.
        must_end: whether ``answer`` must follow a ``double_check`` that passes.
        observation: name of the tag around text of the environment.
        answer: name of the tag that ends the episode.
        schemas: tag -> JSON schema of the arguments, for tools whose body is a JSON object.
        format: conversation format; None for the format ``tags``.
    """

    name: str
    roles: tuple[str, ...]
    tools: tuple[str, ...]
    next_actions: Mapping[str, frozenset[str]]
    think_rule: Mapping[str, ThinkRule]
    body_form: Mapping[str, BodyForm]
    verbatim: frozenset[str]
    described: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pass_score: int = 3
    must_end: bool = False
    observation: str = "observation"
    answer: str = "answer"
    schemas: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    format: Format | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Closing tags at which decoding stops: a tool must run, or the episode ends."""
        return tuple(f"</{role}>" for role in (*self.tools, self.answer))

    def form_of(self, role: str) -> BodyForm:
        """Returns the name of the form that the body of a tag must have, such as ``urls``."""
        return self.body_form.get(role, "text")


_named: set[str] = set()  # import paths that settings of this process have named


def find_format(name: str, by_setting: bool = False) -> Format:
    """Returns the format with a given name.

    Args:
        name: name of a format that is built in or comes with an installed package, or the import
            path ``package.module:name`` of a format.
        by_setting: True if the user gave the name in a setting, False if it comes from a data file
            or a model card. Such a file must not make a process import code: its import paths are
            accepted only if the user has given the same path in a setting before, in this process.

    Raises:
        UserError: the format does not exist, the object is not a `Format`, or the import path is
            refused.
    """
    if by_setting:
        _named.add(name)
    if is_path(name) and name not in _named:
        raise UserError(
            f"the format {name} is code that no setting names; name it in the setting 'format'"
        )
    return _create_format(name)


@functools.cache
def _create_format(name: str) -> Format:
    try:
        created: Any = find(FORMATS, name, "format")()
    except TypeError as error:
        raise UserError(f"format: {name} cannot be created: {error}") from None
    if not isinstance(created, Format):
        raise refuse_result(FORMATS, name, created, "a coa_jax.protocol.formats.Format", "format")
    return created
