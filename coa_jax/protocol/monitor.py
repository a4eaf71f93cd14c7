"""Detects, while a text grows, that no continuation of the text can obey its protocol."""

from __future__ import annotations

from collections.abc import Iterable

from coa_jax.protocol.automaton import State, advance, allowed_after, body_violations
from coa_jax.protocol.formats import Protocol, Reader, Segment


class Monitor:
    """Detects, while the policy writes, that its text violates the protocol.

    If ``broken`` is still False after the answer, the whole text has no violation. In formats other
    than ``tags``, the monitor only looks at the violations that the parser has found.

    Attributes:
        protocol: the tags, and the rules about their order.
        broken: whether the text so far breaks a rule, so that no continuation can make the text
            valid.
    """

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.broken = False
        self._state = State()

    def update(self, parser: Reader, closed: Iterable[Segment]) -> bool:
        """Checks the text that the parser has read since the last call.

        Args:
            parser: the parser, with its open segment and its violations.
            closed: segments that the parser has completed since the last call.

        Returns:
            The new value of ``broken``.
        """
        if self.protocol.format is not None:
            self.broken = bool(parser.violations)
            return self.broken
        for segment in closed:
            self.broken |= self._violates(segment.role, segment.body)
            if segment.role is not None:
                self.broken |= bool(body_violations(self.protocol, segment))
                self._state = advance(self.protocol, self._state, segment.role, segment.body)
        self.broken |= bool(parser.violations) or self._violates(parser.open_role, parser.open_body)
        return self.broken

    def observe(self, text: str) -> None:
        """Tells the monitor that an observation follows the text so far.

        Args:
            text: text of the observation.
        """
        if self.protocol.format is None:
            self._state = advance(self.protocol, self._state, self.protocol.observation, text)

    def _violates(self, role: str | None, body: str) -> bool:
        """Returns whether the policy may not write a segment with a role here."""
        if role is None:
            return bool(body.strip())
        allowed = allowed_after(self.protocol, self._state)
        return role == self.protocol.observation or role not in allowed
