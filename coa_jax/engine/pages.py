"""The page table: which cache pages belong to which slot. Bookkeeping on the host only."""

from __future__ import annotations

import heapq

import numpy as np


class PageTable:
    """Assigns pages to slots.

    A contiguous table gives every slot fixed pages, one after another. A pooled table gives a slot
    pages when it needs them; slots whose sequences begin with the same tokens share those pages.
    """

    def __init__(self, slots: int, pages_per_slot: int, page_size: int, pool: int = 0):
        """Creates a table with all pages free.

        Args:
            slots: number of slots.
            pages_per_slot: pages of the longest sequence.
            page_size: positions of a page.
            pool: pages of all slots together; 0 makes the table contiguous.
        """
        self.page_size, self.pages_per_slot = page_size, pages_per_slot
        self.contiguous = not pool
        self.pages = pool or slots * pages_per_slot
        self.table = np.zeros((slots, pages_per_slot), np.int32)
        self._held = np.zeros(slots, np.int32)  # number of pages of each slot
        self._users = np.zeros(self.pages, np.int32)  # number of slots that use each page
        self._free = list(range(self.pages))
        if self.contiguous:
            self.table[:] = np.arange(self.pages, dtype=np.int32).reshape(self.table.shape)
            self._held[:] = pages_per_slot
            self._users[:] = 1
            self._free = []

    def covers(self, slot: int, positions: int) -> bool:
        """Returns whether a slot has pages for this many positions."""
        return int(self._held[slot]) * self.page_size >= positions

    def reserve(
        self, slot: int, positions: int, source: int | None = None, length: int = 0
    ) -> bool:
        """Gives a slot pages for a sequence; the slot's previous pages are freed.

        Args:
            slot: the slot.
            positions: maximum length of the sequence.
            source: a slot whose sequence begins with the same ``length`` tokens, possibly the slot
                itself. Pages that hold only these tokens are shared. The newest of these tokens
                does not count, because decoding writes it again.
            length: number of common tokens, see ``source``.

        Returns:
            False if too few pages are free; then only the slot's previous pages have been freed.
        """
        if self.contiguous:
            return True
        wanted = -(-positions // self.page_size)
        common = 0 if source is None else max(length - 1, 0)
        whole, rest = divmod(common, self.page_size)
        # A page whose content will differ must be the slot's own. A slot that restarts already has
        # it.
        shared = min(whole + (source == slot and rest > 0), wanted)
        keep = self.table[source, :shared].copy() if source is not None else self.table[0, :0]
        self._users[keep] += 1  # before the release, which may free the same pages
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
        """Frees the pages of a slot; a contiguous table keeps them."""
        if not self.contiguous:
            self._drop(self.table[slot, : self._held[slot]])
            self._held[slot] = 0
            self.table[slot] = 0

    def copies(self, source: int, target: int, length: int) -> list[tuple[int, int]]:
        """Returns the (from, to) pages to copy, so that ``target`` begins like ``source``.

        The newest token is not copied: decoding writes it again.

        Args:
            source, target: slots.
            length: number of common tokens.
        """
        count = -(-max(length - 1, 0) // self.page_size)
        pairs = zip(self.table[source, :count], self.table[target, :count], strict=True)
        return [(int(a), int(b)) for a, b in pairs if a != b]

    def _drop(self, pages: np.ndarray) -> None:
        self._users[pages] -= 1
        for page in pages[self._users[pages] == 0]:
            heapq.heappush(self._free, int(page))
