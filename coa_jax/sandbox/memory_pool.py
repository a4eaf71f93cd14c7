"""Limits the memory of all programs of a sandbox server together."""

from __future__ import annotations

import mmap
import os

_SLOTS = 1024  # more than the number of programs that a server can run at a time


class MemoryPool:
    """Limits all programs of a sandbox server together to half of the memory of the machine.

    In a container, it is half of the container's memory. The object is a table in shared memory,
    which says how much each program holds. The supervisors, one process for each program, use it.
    """

    def __init__(self, memory: int) -> None:
        """Creates an empty table.

        Args:
            memory: memory of this machine in bytes, see `cgroup.machine_memory`.
        """
        self.limit = memory // 2
        self._table = memoryview(mmap.mmap(-1, 16 * _SLOTS)).cast("Q")
        self._slot = 0

    def take_slot(self, number: int) -> None:
        """Reserves an entry of the table for the program of this process.

        Args:
            number: number of the program, in the order in which the server starts them. It chooses
                the entry.
        """
        self._slot = 2 * (number % _SLOTS)
        self._table[self._slot], self._table[self._slot + 1] = os.getpid(), 0

    def leave(self) -> None:
        """Frees the entry that `take_slot` reserved."""
        self._table[self._slot] = self._table[self._slot + 1] = 0

    def must_end(self, held: int) -> bool:
        """Returns whether all programs together exceed the limit, and this one holds the most.

        Args:
            held: memory in bytes that the program of this process holds.
        """
        self._table[self._slot + 1] = held
        if sum(self._table[1::2].tolist()) <= self.limit:
            return False
        # A supervisor that was killed has not freed its slot.
        alive = [
            self._table[slot + 1]
            for slot in range(0, 2 * _SLOTS, 2)
            if self._table[slot] and os.path.exists(f"/proc/{self._table[slot]}")
        ]
        return sum(alive) > self.limit and held >= max(alive)
