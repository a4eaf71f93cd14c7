"""Which pages of the cache belong to which slot; bookkeeping of the host alone."""

from __future__ import annotations

import heapq

import numpy as np


class PageTable:
    """Hands pages out to slots.

    Contiguous: a slot has its own pages, one after another, for ever.  Pooled: a slot gets pages
    when it needs them, and a page that holds the same tokens for several slots exists once.
    """

    def __init__(self, slots: int, pages_per_slot: int, page_size: int, pool: int = 0):
        """Starts with all pages free.

        Args:
            slots: how many there are.
            pages_per_slot: of the longest sequence.
            page_size: positions of a page.
            pool: pages of all slots together; 0 makes the table contiguous.
        """
        self.page_size, self.pages_per_slot = page_size, pages_per_slot
        self.contiguous = not pool
        self.pages = pool or slots * pages_per_slot
        self.table = np.zeros((slots, pages_per_slot), np.int32)
        self._held = np.zeros(slots, np.int32)  # pages of each slot
        self._users = np.zeros(self.pages, np.int32)  # slots of each page
        self._free = list(range(self.pages))
        if self.contiguous:
            self.table[:] = np.arange(self.pages, dtype=np.int32).reshape(self.table.shape)
            self._held[:] = pages_per_slot
            self._users[:] = 1
            self._free = []

    def covers(self, slot: int, positions: int) -> bool:
        """Whether a slot has pages for so many positions."""
        return int(self._held[slot]) * self.page_size >= positions

    def reserve(
        self, slot: int, positions: int, source: int | None = None, length: int = 0
    ) -> bool:
        """Gives a slot pages for a sequence; what it had before is given back.

        Args:
            slot: the slot.
            positions: of the sequence at its longest.
            source: a slot whose sequence begins with the same ``length`` tokens, possibly the slot
                itself.  Pages that hold nothing but those are shared; the newest of them is not
                counted, for decoding writes it again.

        Returns:
            False, with nothing changed but what the slot gave back, if too few pages are free.
        """
        if self.contiguous:
            return True
        wanted = -(-positions // self.page_size)
        common = 0 if source is None else max(length - 1, 0)
        whole, rest = divmod(common, self.page_size)
        # A page that goes on differently is a slot's own; a slot that starts anew has it already.
        shared = min(whole + (source == slot and rest > 0), wanted)
        keep = self.table[source, :shared].copy() if source is not None else self.table[0, :0]
        self._users[keep] += 1  # before the release, which may be of the same pages
        self.release(slot)
        if wanted - shared > len(self._free):
            self._drop(keep)
            return False
        new = [heapq.heappop(self._free) for _ in range(wanted - shared)]
        self._users[new] += 1
        self.table[slot, :shared] = keep
        self.table[slot, shared:wanted] = new
        self._held[slot] = wanted
        return True

    def release(self, slot: int) -> None:
        """Gives the pages of a slot back; of a contiguous table, nothing."""
        if not self.contiguous:
            self._drop(self.table[slot, : self._held[slot]])
            self._held[slot] = 0
            self.table[slot] = 0

    def copies(self, source: int, target: int, length: int) -> list[tuple[int, int]]:
        """(from, to) pages to copy, so that ``target`` begins with ``length`` tokens of ``source``.

        The newest token is not copied: decoding writes it again.
        """
        count = -(-max(length - 1, 0) // self.page_size)
        pairs = zip(self.table[source, :count], self.table[target, :count], strict=True)
        return [(int(a), int(b)) for a, b in pairs if a != b]

    def _drop(self, pages: np.ndarray) -> None:
        self._users[pages] -= 1
        for page in pages[self._users[pages] == 0]:
            heapq.heappush(self._free, int(page))
