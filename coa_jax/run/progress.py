"""Shows the progress of a long stage, as a bar on a terminal or as lines in a log.

with progress("SFT", total=400) as bar:
    for step in range(400):
        bar.update(loss=train(step))
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


# Minimum number of seconds between two updates of the numbers on a terminal. Reading a number may
# wait for the accelerator, so it should be rare.
_REDRAW = 0.25


@dataclasses.dataclass
class Bar:
    """A progress bar, which counts the finished units of work; created by `progress`.

    Attributes:
        total: number of units; None if unknown.
        done: number of finished units, including those that the run finished before it was resumed.
        show: function that is called with each status text.
        interval: minimum number of seconds between two status texts.
        clock: function that returns the time in seconds.
        counts: amounts of other quantities by name, such as tokens. The amounts also grow while a
            unit is in progress.
        stats: latest values of numbers to show, by name.
    """

    total: int | None
    done: int
    show: Callable[[str], None]
    interval: float
    clock: Callable[[], float]
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._before = self.done
        self._start = self._shown = self._timed = self.clock()

    def update(self, n: int = 1, **stats: Any) -> None:
        """Adds finished units of work, and stores values to show.

        Args:
            n: number of finished units.
            **stats: values to show by name: numbers, scalar arrays or text.
        """
        if n == 1 and self._timed == self._start:
            # The time of the first unit includes compilation, so the rate leaves it out.
            self._before, self._timed = self.done + 1, self.clock()
        self.done += n
        self.stats.update(stats)
        self._show_when_due()

    def reach(self, done: int, **stats: Any) -> None:
        """Sets the number of finished units of work, and stores values to show.

        Args:
            done: number of finished units.
            **stats: values to show by name, as in `update`.
        """
        self.update(done - self.done, **stats)

    def count(self, **amounts: int) -> None:
        """Adds amounts to the quantities in `counts`, such as tokens, whose rates the bar shows."""
        for name, amount in amounts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
        self._show_when_due()

    def _show_when_due(self) -> None:
        now = self.clock()
        if now - self._shown >= self.interval:
            self._shown = now
            self.show(self.status())

    def status(self) -> str:
        """Returns the status: `120/400 30% 2.1/s 2m13s left, 5,120 tokens 40.2/s, loss 1.234`."""
        seconds, steady = self.clock() - self._start, self.clock() - self._timed
        rate = (self.done - self._before) / steady if steady > 0 else 0.0
        words = [f"{self.done}" if self.total is None else f"{self.done}/{self.total}"]
        if self.total:
            words.append(f"{100 * self.done // self.total}%")
        if rate > 0:
            words.append(f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g}s each")
            if self.total is not None and self.done < self.total:
                words.append(f"{duration((self.total - self.done) / rate)} left")
        figures = [f"{count:,} {name} {count / seconds:.3g}/s" for name, count in
                   self.counts.items() if seconds > 0]  # fmt: skip
        figures += [f"{name} {_figure(value)}" for name, value in self.stats.items()]
        return ", ".join([" ".join(words), *figures])

    def elapsed(self) -> str:
        """Returns the time since the bar was created as text, such as `2m13s`."""
        return duration(self.clock() - self._start)


@contextlib.contextmanager
def progress(
    label: str,
    total: int | None,
    *,
    initial: int = 0,
    first: str = "",
    stream: IO[str] | None = None,
    interval: float = 10.0,
    enabled: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Bar]:
    """Shows the progress of the work in a ``with`` block.

    Args:
        label: name of the stage.
        total: number of units of work; None if unknown.
        initial: number of units that were finished before the run was resumed; the rate does not
            include them.
        first: why the first unit takes longer, such as ``"step compiles"``; "" if it does not.
        stream: output stream; None for stderr.
        interval: seconds between two lines if the stream is not a terminal.
        enabled: whether anything is shown; False for all processes of a run except the first.
        clock: function that returns the time in seconds.

    Yields:
        The bar, which the block updates.
    """
    stream = sys.stderr if stream is None else stream
    if not enabled:
        yield Bar(total, initial, lambda text: None, interval, clock)
        return
    from rich.console import Console  # takes a twentieth of a second, and --help shows no bar

    first = first and f", the first {first}"
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        with _terminal_bar(console, label, total, initial, first, clock) as bar:
            yield bar
        return

    def line(text: str) -> None:
        print(f"{label} {text}", file=stream, flush=True)

    bar = Bar(total, initial, line, interval, clock)
    line(bar.status() + first)
    try:
        yield bar
    except BaseException:
        line(f"{bar.status()}; stopped after {bar.elapsed()}")
        raise
    line(f"{bar.status()}; took {bar.elapsed()}")


@contextlib.contextmanager
def _terminal_bar(
    console: Console,
    label: str,
    total: int | None,
    initial: int,
    first: str,
    clock: Callable[[], float],
) -> Iterator[Bar]:
    from rich.progress import BarColumn, Progress, TextColumn

    # A value may contain square brackets, which markup would interpret.
    name = TextColumn("{task.description}", markup=False)
    status = TextColumn("{task.fields[status]}", markup=False)
    with Progress(name, BarColumn(), status, console=console) as rich_bar:
        task = rich_bar.add_task(label, total=total, completed=initial, status="")

        def draw(text: str) -> None:
            rich_bar.update(task, completed=bar.done, status=text)

        bar = Bar(total, initial, draw, _REDRAW, clock)
        draw(bar.status() + first)
        try:
            yield bar
        finally:
            draw(f"{bar.status()}; {bar.elapsed()}")


def duration(seconds: float) -> str:
    """Formats a number of seconds as text: `4.2s`, `2m13s` or `3h05m`."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _figure(value: Any) -> str:
    """Formats a number with four digits; the value of a scalar array is read from its device."""
    if hasattr(value, "item"):
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
