"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string, and holds back what may become the beginning of one.

    Of several that end at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str] = (), *, keep: bool = False):
        """Begins with an empty text.

        Args:
            stops: strings that end the text, none empty.
            keep: whether the text includes the string that ended it.
        """
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._keep = keep
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Takes a piece; returns what is known to be part of the text.

        Nothing is taken any more once a stop string has been found.
        """
        if self.found is not None:
            return ""
        start = len(self._held)
        self._held += text
        # A string ends at the earliest possible character, in the new piece.
        for end in range(start + 1, len(self._held) + 1):
            for stop in self._stops:
                if self._held.endswith(stop, 0, end):
                    self.found = stop
                    out = self._held[: end if self._keep else end - len(stop)]
                    self._held = ""
                    return out
        out = self._held[: len(self._held) - self._prefix()]
        self._held = self._held[len(out) :]
        return out

    def flush(self) -> str:
        """Ends the text; what was held back is part of it."""
        out, self._held = self._held, ""
        return out

    def _prefix(self) -> int:
        """Characters at the end that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
