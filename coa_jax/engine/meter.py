"""An engine that measures the time of each of its calls."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.engine.engine import Engine
from coa_jax.engine.programs import Chunk


@dataclasses.dataclass
class Meter:
    """Seconds and counts of an engine since the last `MeteredEngine.restart`.

    ``decode_s`` is the time spent decoding, ``extend_s`` the time spent prefilling and copying
    pages, and ``idle_s`` the time without an active slot, all in seconds. ``decode_steps`` is the
    number of decoding steps, and ``decoded_tokens`` the number of decoded tokens.
    """

    decode_s: float = 0.0
    extend_s: float = 0.0
    idle_s: float = 0.0
    decode_steps: int = 0
    decoded_tokens: int = 0


class MeteredEngine(Engine):
    """An engine that records how its time is spent."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.restart()

    def restart(self) -> None:
        """Sets all figures to zero; the slots must be free."""
        self.meter = Meter()
        self.extended_tokens = self.row_steps = 0
        self._resting_since: float | None = None

    def set_active(self, slot: int, active: bool) -> None:
        """Resumes or pauses decoding in a slot, see `Engine.set_active`.

        Idle time begins when the last active slot is paused, and ends at the next call of `extend`,
        `fork` or `decode`.
        """
        super().set_active(slot, active)
        if not self.any_active and self._resting_since is None:
            self._resting_since = time.perf_counter()

    def extend(self, feeds: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Prefills tokens, see `Engine.extend`.

        The method waits until the device has finished, so that the time is not counted as decoding.
        """
        with self._clock("extend_s"):
            super().extend(feeds)
            jax.block_until_ready(self._pages)

    def fork(self, source: int, targets: Sequence[int], length: int) -> None:
        """Starts sequences from a common prefix, see `Engine.fork`; waits for the device."""
        with self._clock("extend_s"):
            super().fork(source, targets, length)
            jax.block_until_ready(self._pages)

    def decode(self) -> Chunk:
        """Decodes one chunk, see `Engine.decode`."""
        with self._clock("decode_s"):
            chunk = super().decode()
        self.meter.decode_steps += int(np.max(chunk.count))
        self.meter.decoded_tokens += int(np.sum(chunk.count))
        return chunk

    @contextlib.contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        if self._resting_since is not None:
            self.meter.idle_s += began - self._resting_since
            self._resting_since = None
        yield
        seconds = getattr(self.meter, name) + time.perf_counter() - began
        setattr(self.meter, name, seconds)
