"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in a text, and holds back text that may begin a stop string.

    If several stop strings end at the same character, the longest of them is found.
    """

    def __init__(self, stops: Sequence[str] = (), *, keep: bool = False):
        """Starts with an empty text.

        Args:
            stops: nonempty strings that end the text.
            keep: whether the returned text includes the stop string that was found.
        """
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1)
        self._keep = keep
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Adds a piece of text; returns the text that can no longer be part of a stop string.

        After the object has found a stop string, the method always returns "".
        """
        if self.found is not None:
            return ""
        self._held += text
        # The stop string that ends first counts.
        ends = {s: self._held.find(s) + len(s) for s in self._stops if s in self._held}
        if ends:
            self.found = min(ends, key=lambda stop: (ends[stop], -len(stop)))
            end = ends[self.found] - (0 if self._keep else len(self.found))
            out, self._held = self._held[:end], ""
            return out
        out = self._held[: len(self._held) - self._prefix()]
        self._held = self._held[len(out) :]
        return out

    def flush(self) -> str:
        """Ends the text; returns the part that might have been the start of a stop string."""
        out, self._held = self._held, ""
        return out

    def _prefix(self) -> int:
        """Returns the number of characters at the end of the text that may begin a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
