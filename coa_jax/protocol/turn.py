"""What the readers of formats share: contiguous segments of a text that comes in pieces."""

from __future__ import annotations

from coa_jax.protocol.automaton import body_violations
from coa_jax.protocol.parser import Segment, Violation
from coa_jax.protocol.spec import Protocol


class Pieces:
    """The text of a reader since its last segment.

    Attributes:
        violations: broken rules so far.
        text: since the last segment, without what may be the beginning of a mark.
        carry: what may be one.
    """

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.violations: list[Violation] = []
        self.text = self.carry = ""
        self.start = 0  # of the text, in characters since the beginning
        self.finished = False

    @property
    def end(self) -> int:
        """Offset after the text."""
        return self.start + len(self.text)

    def interrupt(self) -> None:
        """No mark goes on in what comes next."""
        self.text += self.carry
        self.carry = ""

    def close(self, role: str | None = None, body: str | None = None) -> list[Segment]:
        """The text so far as a segment; none where there is no text."""
        if not self.text:
            return []
        body = self.text if body is None else body
        segment = Segment(role, body, self.start, self.end, True)
        self.start, self.text = self.end, ""
        return [segment]

    def answer(self, body: str) -> list[Segment]:
        """The text so far as the answer, whose body is checked."""
        segments = self.close(self.protocol.answer, body)
        for segment in segments:
            self.violations += body_violations(self.protocol, segment)
        return segments

    def broken(self, kind: str, message: str, position: int | None = None) -> None:
        """Notes a broken rule, by default at the end of the text."""
        at = self.end if position is None else position
        self.violations.append(Violation(kind, at, message))


def undecided(data: str, marks: tuple[str, ...]) -> int:
    """Length of the end of a text that more text could turn into a mark."""
    longest = max(map(len, marks))
    for size in range(min(longest - 1, len(data)), 0, -1):
        if any(mark.startswith(data[-size:]) for mark in marks):
            return size
    return 0
