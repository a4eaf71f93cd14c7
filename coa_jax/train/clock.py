"""Measures the time that each phase of a step takes, and profiles a range of steps."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from coa_jax.errors import UserError


class Clock:
    """Measures the wall-clock seconds that each named phase of a step takes.

    A phase is a block ``with clock(name):``. `report` returns the seconds of each phase, and the
    time outside all phases since the clock was created.
    """

    def __init__(self, *names: str) -> None:
        """Starts the clock; the report includes the phases ``names`` even if they never run."""
        self.seconds: dict[str, float] = collections.defaultdict(float, dict.fromkeys(names, 0.0))
        self._began = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager that adds the time of its block to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def report(self) -> dict[str, float]:
        """Returns the seconds spent in each phase so far, as metrics ``time/...``.

        ``time/step`` is the time since the clock was created, and ``time/unaccounted`` is the part
        of this time outside all phases.
        """
        total, parts = time.monotonic() - self._began, dict(self.seconds)
        return {
            **{f"time/{name}": seconds for name, seconds in parts.items()},
            "time/step": total,
            "time/unaccounted": max(total - sum(parts.values()), 0.0),
        }


class Profile:
    """Records a profile of a range of training steps with `jax.profiler`.

    TensorBoard and xprof can show the profile.
    """

    def __init__(self, steps: tuple[int, ...], directory: Path):
        """Checks that the range of steps is valid; recording starts with `before`.

        Args:
            steps: the first and the last step to record; () for no recording.
            directory: folder to which the profile is written.

        Raises:
            UserError: ``steps`` is neither () nor two positive numbers in ascending order.
        """
        if steps and (len(steps) != 2 or not 0 < steps[0] <= steps[1]):
            raise UserError(
                f"profile_steps is {', '.join(map(str, steps))}; give the first and the last step "
                "to record, such as 3,5"
            )
        self._steps, self._directory = steps, directory
        self._recording = False

    def before(self, step: int) -> None:
        """Starts the recording if the step is in the range and no recording has started yet.

        The first call may be for a step in the middle of the range, because a resumed run may start
        there.
        """
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self._recording:
            jax.profiler.start_trace(self._directory)
            self._recording = True

    def after(self, step: int) -> None:
        """Stops the recording if ``step`` is the last step of the range, or a later one."""
        if self._recording and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Stops recording, and writes the profile to the directory."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()
