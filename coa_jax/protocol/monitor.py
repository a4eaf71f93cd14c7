"""Detects in a growing text the first point after which the text cannot obey its protocol."""

from __future__ import annotations

from collections.abc import Iterable

from coa_jax.protocol.automaton import State, advance, allowed_after, body_violations
from coa_jax.protocol.formats import Reader
from coa_jax.protocol.parser import Segment
from coa_jax.protocol.spec import Protocol


class Monitor:
    """Follows a parser that reads the policy's text alone.

    ``broken`` becomes true at the first text after which every continuation has a violation in
    ``check`` or in the parser. A text that ends with its answer and was never ``broken`` has no
    violation. The readers of other formats report all violations themselves.
    """

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.broken = False
        self._state = State()

    def update(self, parser: Reader, closed: Iterable[Segment]) -> bool:
        """Reads the segments that the parser closed and its open segment; returns ``broken``."""
        if self.protocol.format is not None:
            self.broken = bool(parser.violations)
            return self.broken
        for segment in closed:
            self._take(segment)
        role = parser.open_role
        if parser.violations:
            self.broken = True
        elif role is None:
            self.broken = self.broken or bool(parser.open_body.strip())
        elif role == self.protocol.observation or role not in self._allowed():
            self.broken = True
        return self.broken

    def observe(self, text: str) -> None:
        """Reads the environment's answer to a call."""
        if self.protocol.format is None:
            self._state = advance(self.protocol, self._state, self.protocol.observation, text)

    def _allowed(self) -> frozenset[str]:
        return allowed_after(self.protocol, self._state)

    def _take(self, segment: Segment) -> None:
        role = segment.role
        if role is None:
            self.broken = self.broken or bool(segment.body.strip())
            return
        if (
            role == self.protocol.observation
            or role not in self._allowed()
            or body_violations(self.protocol, segment)
        ):
            self.broken = True
        self._state = advance(self.protocol, self._state, role, segment.body)
