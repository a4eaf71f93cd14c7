"""The page table, which assigns cache pages to slots; it exists only on the host."""

from __future__ import annotations

import heapq

import numpy as np


class PageTable:
    """Assigns cache pages to slots.

    There are two kinds of tables. A contiguous table gives every slot a fixed range of pages. A
    pooled table gives pages to a slot for the present length of its sequence, and more pages as the
    sequence grows; slots whose sequences begin with the same tokens can share the pages of these
    tokens.
    """

    def __init__(self, slots: int, pages_per_slot: int, page_size: int, pool: int = 0):
        """Creates a table in which all pages are free.

        Args:
            slots: number of slots.
            pages_per_slot: number of pages of the longest sequence.
            page_size: number of positions of a page.
            pool: number of pages of all slots together; 0 creates a contiguous table.
        """
        self.page_size, self.pages_per_slot = page_size, pages_per_slot
        self.contiguous = not pool
        self.pages = pool or slots * pages_per_slot
        self.table = np.zeros((slots, pages_per_slot), np.int32)
        self._counts = np.zeros(slots, np.int32)  # number of pages of each slot
        self._users = np.zeros(self.pages, np.int32)  # number of slots that use each page
        self._free = list(range(self.pages))
        if self.contiguous:
            self.table[:] = np.arange(self.pages, dtype=np.int32).reshape(self.table.shape)
            self._counts[:] = pages_per_slot
            self._users[:] = 1
            self._free = []

    def covers(self, slot: int, positions: int) -> bool:
        """Returns whether the pages of a slot have room for ``positions`` tokens."""
        return int(self._counts[slot]) * self.page_size >= positions

    @property
    def free(self) -> int:
        """Number of pages that no slot holds."""
        return len(self._free)

    def grow(self, slot: int, positions: int) -> bool:
        """Gives a slot the pages that it lacks for ``positions`` tokens.

        Returns:
            True if the pages of the slot now have room. False if too few pages are free; the slot
            then keeps the pages that it has.
        """
        count, needed = int(self._counts[slot]), -(-positions // self.page_size)
        if needed - count > len(self._free):
            return False
        new = [heapq.heappop(self._free) for _ in range(needed - count)]
        self._users[new] += 1
        self.table[slot, count : count + len(new)] = new
        self._counts[slot] += len(new)
        return True

    def reserve(
        self,
        slot: int,
        positions: int,
        source: int | None = None,
        length: int = 0,
        spare: int = 0,
    ) -> bool:
        """Gives a slot pages for a sequence, after freeing the slot's previous pages.

        Args:
            slot: index of the slot.
            positions: present length of the sequence, including the prompt, in tokens; `grow` gives
                more pages later.
            source: a slot whose first ``length`` tokens are also those of the new sequence; this
                may be ``slot`` itself. If the slots share one set of pages (``engine.pages``), the
                two sequences share the pages that their first ``length - 1`` tokens fill. The last
                token does not count, because decoding writes its keys and values again. None if
                the new sequence shares no tokens.
            length: number of tokens that the two sequences have in common, see ``source``.
            spare: number of pages that must stay free.

        Returns:
            True if the slot has got its pages. False if too few pages are free; the slot's previous
            pages have been freed in that case too.
        """
        if self.contiguous:
            return True
        needed = -(-positions // self.page_size)
        common = 0 if source is None else max(length - 1, 0)
        whole, rest = divmod(common, self.page_size)
        # A page whose content will differ must belong to the slot alone. A slot that restarts
        # already has this page.
        shared = min(whole + (source == slot and rest > 0), needed)
        keep = self.table[source, :shared].copy() if source is not None else self.table[0, :0]
        self._users[keep] += 1  # before the release, which may free the same pages
        self.release(slot)
        if needed - shared + spare > len(self._free):
            self._drop(keep)
            return False
        new = [heapq.heappop(self._free) for _ in range(needed - shared)]
        self._users[new] += 1
        self.table[slot, :shared] = keep
        self.table[slot, shared:needed] = new
        self._counts[slot] = needed
        return True

    def release(self, slot: int) -> None:
        """Frees the pages of a slot whose sequence has ended.

        In a contiguous table, the pages stay with the slot.
        """
        if not self.contiguous:
            self._drop(self.table[slot, : self._counts[slot]])
            self._counts[slot] = 0
            self.table[slot] = 0

    def copies(self, source: int, target: int, length: int) -> list[tuple[int, int]]:
        """Returns the pages to copy so that slot ``target`` gets the first tokens of ``source``.

        The last of these tokens need not be copied, because decoding writes its keys and values
        again.

        Args:
            source, target: numbers of the slots.
            length: number of tokens that the two sequences have in common.

        Returns:
            Pairs of page numbers: the page to read, and the page to write.
        """
        count = -(-max(length - 1, 0) // self.page_size)
        pairs = zip(self.table[source, :count], self.table[target, :count], strict=True)
        return [(int(a), int(b)) for a, b in pairs if a != b]

    def _drop(self, pages: np.ndarray) -> None:
        self._users[pages] -= 1
        for page in pages[self._users[pages] == 0]:
            heapq.heappush(self._free, int(page))
