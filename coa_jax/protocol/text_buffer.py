"""Provides the text buffer that the parsers of conversation formats share."""

from __future__ import annotations

from coa_jax.protocol.automaton import body_violations
from coa_jax.protocol.formats import Protocol, Segment, Violation


class Pieces:
    """Base class of the parsers of conversation formats; keeps text until a segment is complete.

    Attributes:
        violations: violations found so far.
        text: text since the last complete segment, without ``carry``.
        carry: end of the text that may be the beginning of a mark, such as ``<tool_``.
    """

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.violations: list[Violation] = []
        self.text = self.carry = ""
        self.start = 0  # offset of text in the policy's text, in characters
        self.finished = False

    @property
    def end(self) -> int:
        """Offset in the policy's whole text, in characters, at which ``text`` ends."""
        return self.start + len(self.text)

    def interrupt(self) -> None:
        """Moves ``carry`` to ``text``, because the text of a tool comes next.

        Later text of the policy can then not complete a mark that began in ``carry``.
        """
        self.text += self.carry
        self.carry = ""

    def close(self, role: str | None = None, body: str | None = None) -> list[Segment]:
        """Ends the segment that is being read; returns it in a list, or [] if it has no text.

        Args:
            role: role of the segment; None for text without a role.
            body: body of the segment; None for its whole text.
        """
        if not self.text:
            return []
        body = self.text if body is None else body
        segment = Segment(role, body, self.start, self.end, True)
        self.start, self.text = self.end, ""
        return [segment]

    def answer(self, body: str) -> list[Segment]:
        """Closes the open segment as the answer, and records each rule that its body breaks.

        Args:
            body: body of the answer.

        Returns:
            The segment in a list; [] if it has no text.
        """
        segments = self.close(self.protocol.answer, body)
        for segment in segments:
            self.violations += body_violations(self.protocol, segment)
        return segments

    def broken(self, kind: str, message: str, position: int | None = None) -> None:
        """Records the violation of a rule.

        Args:
            kind: kind of the violation, see `Violation`.
            message: sentence that explains the violation.
            position: offset of the violation in characters; None for the end of the text.
        """
        at = self.end if position is None else position
        self.violations.append(Violation(kind, at, message))


def undecided(data: str, marks: tuple[str, ...]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a mark.

    For example, the result is 3 for the text ``so <to`` and the mark ``<tool_call>``.
    """
    longest = max(map(len, marks))
    for size in range(min(longest - 1, len(data)), 0, -1):
        if any(mark.startswith(data[-size:]) for mark in marks):
            return size
    return 0
