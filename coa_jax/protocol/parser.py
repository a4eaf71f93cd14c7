"""Parses text with the tags of a protocol into segments, while the text arrives.

The parser has these properties:

* It accepts any string: the result is a list of segments and a list of violations, never an
  exception.
* The segments are contiguous, and their texts, joined, are the input.
* The result does not depend on the chunks in which the text arrives. The time is linear in the
  length of the text.

Tags do not nest. A tag is exactly ``<role>`` or ``</role>``, with a role of the protocol. Outside a
segment, an opening tag begins a segment. Inside a segment, only the closing tag with the same name
ends the segment, and all other tags belong to its body. A tag of the protocol in a body is a
``nested`` violation, except in bodies that quote programs or the text of the environment
(``Protocol.verbatim``). A segment without a closing tag extends to the end of the text.

The parser does not know who wrote a text. The text ``</observation>`` in the result of a tool would
end an observation early. Callers must therefore pass the results of tools through
``quote_tool_text`` before they write these results between tags.
"""

from __future__ import annotations

import dataclasses
import re

from coa_jax.protocol.formats import Protocol, Reader, Segment, Violation

_MAX_NAME = 64
_TAG = re.compile(rf"<(/?)([A-Za-z_][A-Za-z0-9_]{{0,{_MAX_NAME - 1}}})>")
_PARTIAL_TAG = re.compile(rf"</?(?:[A-Za-z_][A-Za-z0-9_]{{0,{_MAX_NAME - 1}}})?")
_MAX_PARTIAL = _MAX_NAME + 2


@dataclasses.dataclass(frozen=True)
class Parse:
    """The result of parsing a whole text with ``parse``.

    Attributes:
        segments: contiguous segments, which together cover the text.
        violations: violations that the parser found, such as nested tags.
    """

    segments: tuple[Segment, ...]
    violations: tuple[Violation, ...]


class Parser:
    """Parses text in the format ``tags``, which arrives in chunks.

    `feed` returns the segments that a chunk completes, including text outside tags. `finish`
    returns the remaining segment. Together these are the segments that `parse` returns for the
    whole text.
    """

    def __init__(self, protocol: Protocol, start: int = 0):
        """Creates a parser.

        Args:
            protocol: protocol whose tags are parsed.
            start: offset of the first character of the text, see `Segment`.
        """
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
        """Name of the tag that is open; None outside tags."""
        return self._role

    @property
    def open_body(self) -> str:
        """Text of the open tag so far; outside tags, the text since the last tag.

        Characters at the end that may be the beginning of a tag, such as ``</ans``, are not
        included.
        """
        text = "".join(self._pieces)
        return text if self._role is None else text[len(self._role) + 2 :]

    def feed(self, chunk: str) -> list[Segment]:
        """Parses more text; returns the segments that this text completes, in order."""
        if self._finished:
            raise ValueError("Parser.feed was called after Parser.finish; create a new Parser")
        data = self._carry + chunk
        done: list[Segment] = []
        consumed = 0  # number of characters of data that are in _pieces or in a segment
        for match in _TAG.finditer(data):
            closing, name = bool(match[1]), match[2]
            position = self._end + match.start() - consumed
            if self._role is None:
                if name not in self._roles:
                    message = f"{match[0]} is not a tag of the {self.protocol.name} protocol"
                    self._violation("unknown_tag", position, message)
                elif closing:
                    self._violation("unexpected_close", position, f"{match[0]} closes nothing")
                else:
                    self._append(data[consumed : match.start()])
                    if self._pieces:
                        done.append(self._close())
                    self._role = name
                    self._append(match[0])
                    consumed = match.end()
            elif closing and name == self._role:
                self._append(data[consumed : match.end()])
                done.append(self._close())
                consumed = match.end()
            elif name in self._roles and self._role not in self.protocol.verbatim:
                self._violation("nested", position, f"{match[0]} inside <{self._role}> is text")
        keep = _undecided(data, consumed)
        self._append(data[consumed : len(data) - keep])
        self._carry = data[len(data) - keep :] if keep else ""
        return done

    def interrupt(self) -> None:
        """Tells the parser that a tool has answered, before the next chunk of the policy's text.

        An incomplete tag at the end of the previous chunk becomes plain text. The next chunk cannot
        complete the tag.
        """
        self._append(self._carry)
        self._carry = ""

    def end_turn(self) -> list[Segment]:
        """Returns [], because in the format ``tags`` the end of a turn completes no segment."""
        return []

    def finish(self) -> list[Segment]:
        """Ends the parsing; returns the last segment in a list, or [] if no text is left.

        A second call returns [].
        """
        self._finished = True
        self.interrupt()
        if not self._pieces:
            return []
        if self._role is not None:
            self._violation("unclosed", self._start, f"<{self._role}> is never closed")
        return [self._close(complete=self._role is None)]

    def _append(self, text: str) -> None:
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


def _undecided(data: str, consumed: int) -> int:
    """Returns the length of the end of ``data[consumed:]`` that may be the beginning of a tag."""
    start = data.rfind("<", max(consumed, len(data) - _MAX_PARTIAL))
    if start < 0 or not _PARTIAL_TAG.fullmatch(data, start):
        return 0
    return len(data) - start


def make_parser(protocol: Protocol) -> Reader:
    """Returns a new parser of the policy's text, in the conversation format of the protocol."""
    return Parser(protocol) if protocol.format is None else protocol.format.reader(protocol)


def parse(protocol: Protocol, text: str) -> Parse:
    """Parses a whole text. In formats other than ``tags``, the text must be one turn.

    Returns:
        The segments, which together cover the text, and the violations that the parser found, such
        as nested tags. The parser does not check the order and the bodies of segments; `check`
        does.
    """
    parser = make_parser(protocol)
    segments = (*parser.feed(text), *parser.end_turn(), *parser.finish())
    return Parse(segments, tuple(parser.violations))


def quote_tool_text(protocol: Protocol, text: str) -> str:
    """Escapes a tool's text, so that the text cannot end the observation that contains the text.

    In the format ``tags``, the closing tag of an observation becomes ``&lt;/observation&gt;``, and
    all other text stays unchanged. Other formats escape their own marks.
    """
    if protocol.format is not None:
        return protocol.format.quote(text)
    name = protocol.observation
    return text.replace(f"</{name}>", f"&lt;/{name}&gt;")
