"""Measures how an engine spends its time."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Meter:
    """Seconds and counts of an engine since `Engine.restart`.

    Attributes:
        decode_s: time spent decoding, in seconds.
        extend_s: time spent prefilling and copying pages, in seconds.
        idle_s: time without an active slot, in seconds.
        decode_steps: number of decoding steps.
        decoded_tokens: number of decoded tokens.
        row_steps: number of rows of each decoding step, summed over the steps.
        extended_tokens: number of tokens that prefill programs computed, including padding.
    """

    decode_s: float = 0.0
    extend_s: float = 0.0
    idle_s: float = 0.0
    decode_steps: int = 0
    decoded_tokens: int = 0
    row_steps: int = 0
    extended_tokens: int = 0
    _idle_since: float | None = None

    def rest(self) -> None:
        """Begins to measure idle time; call this method when no slot is active.

        The idle time ends at the next call of `clock`, and is then added to ``idle_s``.
        """
        if self._idle_since is None:
            self._idle_since = time.perf_counter()

    def count_chunk(self, rows: int, tokens: Any) -> None:
        """Adds one call of a decoding program to the counts.

        Args:
            rows: number of rows of the program.
            tokens: int ``[slots]``, number of new tokens of each slot.
        """
        steps = int(tokens.max(initial=0))
        self.decode_steps += steps
        self.row_steps += rows * steps
        self.decoded_tokens += int(tokens.sum())

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Returns a context manager that adds the time of its block to a field of this meter.

        Args:
            name: name of the field, such as ``decode_s``.
        """
        began = time.perf_counter()
        if self._idle_since is not None:
            self.idle_s += began - self._idle_since
            self._idle_since = None
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)
