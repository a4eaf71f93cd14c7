"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

import functools
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
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._begins = _beginnings(tuple(self._stops))
        self._longest = max(map(len, self._stops), default=1)
        self._keep = keep
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Adds a piece of text; returns the text that can no longer be part of a stop string.

        After the object has found a stop string, the method always returns "".
        """
        if self.found is not None:
            return ""
        start = len(self._held)
        self._held += text
        # The stop string that ends first counts; it ends within the new piece.
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
        """Ends the text and returns the part that was held back."""
        out, self._held = self._held, ""
        return out

    def _prefix(self) -> int:
        """Returns the number of characters at the end of the text that may begin a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            if self._held[-size:] in self._begins:
                return size
        return 0


@functools.lru_cache(maxsize=16)
def _beginnings(stops: tuple[str, ...]) -> frozenset[str]:
    """Returns all prefixes of the stop strings, because a look-up is faster than testing each."""
    return frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
