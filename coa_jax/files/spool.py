"""A sequence of Python objects that are kept in a temporary file instead of in memory."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Spool(Sequence[T], Generic[T]):
    """A sequence that holds only the positions of its items in memory.

    Every access reads the item from the file and returns a new object. The file has no name, so it
    disappears with the sequence, also if the process is killed.
    """

    def __init__(self, folder: Path, items: Iterable[T] = ()) -> None:
        """Creates the file in a folder, and stores the items.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._ends = [0]
        for item in items:
            self.append(item)

    def append(self, item: T) -> None:
        """Stores an item at the end.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """
        rest = memoryview(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        end = self._ends[-1] + len(rest)
        while rest:
            rest = rest[os.pwrite(self._file.fileno(), rest, end - len(rest)) :]
        self._ends.append(end)

    def __len__(self) -> int:
        """Returns the number of items."""
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> list[T]: ...

    def __getitem__(self, at: Any) -> Any:
        """Reads an item, or the items of a slice."""
        numbers = range(len(self))[at]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        begin, end = self._ends[numbers : numbers + 2]
        return pickle.loads(os.pread(self._file.fileno(), end - begin, begin))


class Chosen(Sequence[T], Generic[T]):
    """Some items of a sequence, which are read from it at every access."""

    def __init__(self, items: Sequence[T], numbers: Sequence[int]) -> None:
        """Chooses items by their numbers, in this order."""
        self._items, self._numbers = items, numbers

    def __len__(self) -> int:
        """Returns the number of chosen items."""
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...

    def __getitem__(self, at: Any) -> Any:
        """Returns an item, or the items of a slice."""
        numbers = self._numbers[at]
        return self._items[numbers] if isinstance(numbers, int) else Chosen(self._items, numbers)


def held(items: Iterable[T], folder: Path | None) -> list[T] | Spool[T]:
    """Returns items as a list, or as a `Spool` in a folder."""
    return list(items) if folder is None else Spool(folder, items)
