"""Incremental, total and exact parser of tagged text.

Total: any string yields segments and a list of violations, never an exception. Exact: the segments
are contiguous, and joined they give the input. Incremental: text may arrive in any chunks. The
result does not depend on the chunks, and the time is linear in the text.

The grammar is flat. A tag is exactly ``<role>`` or ``</role>`` with a role of the protocol. Outside
a segment, an opening tag starts a segment. Inside a segment, only the matching closing tag is
special. Every other tag there belongs to the body; a tag of the protocol is then a ``nested``
violation, except in bodies that quote foreign text (``Protocol.verbatim``). So a segment that is
never closed extends to the end of the text: the parser does not guess, and a streaming parser knows
when a segment is over.

The parser knows no authors. Tool text with ``</observation>`` would end an observation early, so
callers must pass tool text through ``quote_tool_text`` before they put it between tags.
"""

from __future__ import annotations

import dataclasses
import re

from coa_jax.protocol.formats import Reader
from coa_jax.protocol.spec import Protocol

_MAX_NAME = 64
_TAG = re.compile(rf"<(/?)([A-Za-z_][A-Za-z0-9_]{{0,{_MAX_NAME - 1}}})>")
_PARTIAL_TAG = re.compile(rf"</?(?:[A-Za-z_][A-Za-z0-9_]{{0,{_MAX_NAME - 1}}})?")
_MAX_PARTIAL = _MAX_NAME + 2


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of the text: one tagged segment, or the plain text between two.

    Attributes:
        role: the tag, or None for plain text.
        body: text between the tags; for plain text, the text itself.
        start: character offset of the first character, tags included.
        end: character offset after the last character, tags included.
        closed: False where the text ended before the closing tag; plain text is always closed.
    """

    role: str | None
    body: str
    start: int
    end: int
    closed: bool


@dataclasses.dataclass(frozen=True)
class Violation:
    """A broken rule.

    Attributes:
        position: character offset where the rule was broken.
        kind: one word. From the parser: ``nested``, ``unexpected_close``, ``unknown_tag``,
            ``unclosed``. From the automaton: see ``coa_jax.protocol.automaton``.
        message: explanation in a sentence.
    """

    kind: str
    position: int
    message: str


@dataclasses.dataclass(frozen=True)
class Parse:
    """Result of ``parse``: contiguous segments that cover the text, and the lexical violations."""

    segments: tuple[Segment, ...]
    violations: tuple[Violation, ...]


class Parser:
    """Parses text that arrives in chunks.

    ``feed`` returns the segments, plain text included, that the chunk completed; ``finish`` returns
    the rest.  Together they are the segments of ``parse``.
    """

    def __init__(self, protocol: Protocol, start: int = 0):
        """Starts a parser whose first character has the offset ``start``."""
        self.protocol = protocol
        self.violations: list[Violation] = []
        self._roles = frozenset(protocol.roles)
        self._role: str | None = None
        self._start = start  # offset of the current segment
        self._end = start  # offset after the text in _pieces
        self._pieces: list[str] = []  # text of the current segment with its opening tag
        self._carry = ""  # text after _pieces that may be the beginning of a tag
        self._finished = False

    @property
    def open_role(self) -> str | None:
        """The role of the open segment; None between segments."""
        return self._role

    @property
    def open_body(self) -> str:
        """The body of the open segment so far, without a suffix that may be the beginning of a tag.

        It is a prefix of the body that ``feed`` or ``finish`` will return for the segment.
        """
        text = "".join(self._pieces)
        return text if self._role is None else text[len(self._role) + 2 :]

    def feed(self, chunk: str) -> list[Segment]:
        """Reads more text; returns the segments that it completed, in order."""
        if self._finished:
            raise ValueError("Parser.feed after Parser.finish; make a new Parser")
        data = self._carry + chunk
        done: list[Segment] = []
        taken = 0  # characters of data already in _pieces or in a segment
        for match in _TAG.finditer(data):
            closing, name = bool(match[1]), match[2]
            position = self._end + match.start() - taken
            if self._role is None:
                if name not in self._roles:
                    self._violation(
                        "unknown_tag",
                        position,
                        f"{match[0]} is not a tag of the {self.protocol.name} protocol",
                    )
                elif closing:
                    self._violation("unexpected_close", position, f"{match[0]} closes nothing")
                else:
                    self._take(data[taken : match.start()])
                    if self._pieces:
                        done.append(self._close())
                    self._role = name
                    self._take(match[0])
                    taken = match.end()
            elif closing and name == self._role:
                self._take(data[taken : match.end()])
                done.append(self._close())
                taken = match.end()
            elif name in self._roles and self._role not in self.protocol.verbatim:
                self._violation("nested", position, f"{match[0]} inside <{self._role}> is text")
        keep = _undecided(data, taken)
        self._take(data[taken : len(data) - keep])
        self._carry = data[len(data) - keep :] if keep else ""
        return done

    def interrupt(self) -> None:
        """Notes that other text comes before the next chunk, so that no tag spans both."""
        self._take(self._carry)
        self._carry = ""

    def end_turn(self) -> list[Segment]:
        """Notes that the policy ended its turn; in tags this completes no segment."""
        return []

    def finish(self) -> list[Segment]:
        """Ends the text; returns the last segment, if any text is left. May be called twice."""
        self._finished = True
        self.interrupt()
        if not self._pieces:
            return []
        if self._role is not None:
            self._violation("unclosed", self._start, f"<{self._role}> is never closed")
        return [self._close(complete=self._role is None)]

    def _take(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._end += len(text)

    def _close(self, complete: bool = True) -> Segment:
        role, text = self._role, "".join(self._pieces)
        body = text
        if role is not None:
            body = text[len(role) + 2 : len(text) - (len(role) + 3 if complete else 0)]
        segment = Segment(role, body, self._start, self._end, complete)
        self._role, self._start, self._pieces = None, self._end, []
        return segment

    def _violation(self, kind: str, position: int, message: str) -> None:
        self.violations.append(Violation(kind, position, message))


def _undecided(data: str, taken: int) -> int:
    """Returns the length of the suffix of ``data[taken:]`` that more text could turn into a tag."""
    start = data.rfind("<", max(taken, len(data) - _MAX_PARTIAL))
    if start < 0 or not _PARTIAL_TAG.fullmatch(data, start):
        return 0
    return len(data) - start


def make_parser(protocol: Protocol) -> Reader:
    """Returns a new parser for the conversation format of a protocol."""
    return Parser(protocol) if protocol.format is None else protocol.format.reader(protocol)


def parse(protocol: Protocol, text: str) -> Parse:
    """Parses a whole text; in formats other than tags, the text of a whole turn.

    Returns:
        Segments with ``"".join(text[s.start:s.end] for s in segments) == text``, and the lexical
        violations in the order in which they were found. ``check`` tests the rules about the order
        and the bodies of segments.
    """
    parser = make_parser(protocol)
    segments = (*parser.feed(text), *parser.end_turn(), *parser.finish())
    return Parse(segments, tuple(parser.violations))


def quote_tool_text(protocol: Protocol, text: str) -> str:
    """Escapes tool text for observation tags: the closing tag becomes ``&lt;/...&gt;``.

    Everything else is unchanged, since the parser takes the body of an observation verbatim.
    Formats other than tags escape the text in their own way.
    """
    if protocol.format is not None:
        return protocol.format.quote(text)
    name = protocol.observation
    return text.replace(f"</{name}>", f"&lt;/{name}&gt;")
