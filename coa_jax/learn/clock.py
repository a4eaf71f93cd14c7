"""Where the time of a step goes, and the profiler's window on some steps."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from coa_jax.errors import UserError


class Clock:
    """Seconds by name, since it was made."""

    def __init__(self, *names: str) -> None:
        """Starts; ``names`` are reported even if nothing of the kind happens."""
        self.seconds: dict[str, float] = collections.defaultdict(float, dict.fromkeys(names, 0.0))
        self._began = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a name."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._began

    def report(self) -> dict[str, float]:
        """Metrics of the time so far; what no block took is ``time/unaccounted``."""
        total, parts = self.elapsed(), dict(self.seconds)
        return {
            **{f"time/{name}": seconds for name, seconds in parts.items()},
            "time/step": total,
            "time/unaccounted": max(total - sum(parts.values()), 0.0),
        }


class Profile:
    """Records steps ``first`` to ``last`` with `jax.profiler`, for TensorBoard or xprof."""

    def __init__(self, steps: tuple[int, ...], directory: Path):
        """Takes (first, last), or () for no recording.

        Raises:
            UserError: something else.
        """
        if steps and (len(steps) != 2 or not 0 < steps[0] <= steps[1]):
            raise UserError(
                f"profile_steps is {', '.join(map(str, steps))}; give the first and the last step "
                "to record, such as 3,5"
            )
        self._steps, self._directory = steps, directory
        self._recording = False

    def before(self, step: int) -> None:
        """Starts with the first step of the window; a resumed run may begin inside it."""
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self._recording:
            jax.profiler.start_trace(self._directory)
            self._recording = True

    def after(self, step: int) -> None:
        """Ends with the last step of the window."""
        if self._recording and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Writes what was recorded."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()
