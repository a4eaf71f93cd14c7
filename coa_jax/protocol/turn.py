"""Buffer shared by the readers of conversation formats: text arrives in pieces, segments leave."""

from __future__ import annotations

from coa_jax.protocol.automaton import body_violations
from coa_jax.protocol.parser import Segment, Violation
from coa_jax.protocol.spec import Protocol


class Pieces:
    """The text that a reader has read since its last segment.

    Attributes:
        violations: broken rules so far.
        text: text since the last segment, without a suffix that may be the beginning of a mark.
        carry: that suffix.
    """

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.violations: list[Violation] = []
        self.text = self.carry = ""
        self.start = 0  # offset of text in the policy's text, in characters
        self.finished = False

    @property
    def end(self) -> int:
        """Character offset after the text."""
        return self.start + len(self.text)

    def interrupt(self) -> None:
        """Notes that other text follows: a mark that has begun cannot go on in the next piece."""
        self.text += self.carry
        self.carry = ""

    def close(self, role: str | None = None, body: str | None = None) -> list[Segment]:
        """Returns the text so far as a segment; no segment if the text is empty."""
        if not self.text:
            return []
        body = self.text if body is None else body
        segment = Segment(role, body, self.start, self.end, True)
        self.start, self.text = self.end, ""
        return [segment]

    def answer(self, body: str) -> list[Segment]:
        """Returns the text so far as the answer, and checks its body."""
        segments = self.close(self.protocol.answer, body)
        for segment in segments:
            self.violations += body_violations(self.protocol, segment)
        return segments

    def broken(self, kind: str, message: str, position: int | None = None) -> None:
        """Records a broken rule.

        Args:
            kind: kind of the violation, see `Violation`.
            message: explanation in a sentence.
            position: character offset; None for the end of the text.
        """
        at = self.end if position is None else position
        self.violations.append(Violation(kind, at, message))


def undecided(data: str, marks: tuple[str, ...]) -> int:
    """Returns the length of the suffix of a text that more text could turn into a mark."""
    longest = max(map(len, marks))
    for size in range(min(longest - 1, len(data)), 0, -1):
        if any(mark.startswith(data[-size:]) for mark in marks):
            return size
    return 0
