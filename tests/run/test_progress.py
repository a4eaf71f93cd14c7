"""Progress is a bar on a terminal and plain, rare lines in a log."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import threading

import jax.numpy as jnp
import pytest

from coa_jax.run.progress import duration, progress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_every_interval_and_one_at_each_end():
    stream, clock = io.StringIO(), Clock()
    with progress("SFT", 100, stream=stream, clock=clock) as bar:
        for step in range(100):
            clock.now += 0.5
            bar.update(loss=1 / (step + 1))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "SFT 0/100 0%"
    assert lines[1] == "SFT 20/100 20% 2/s 40.0s left, loss 0.05"
    assert len(lines) == 1 + 5 + 1
    assert lines[-1] == "SFT 100/100 100% 2/s, loss 0.01; took 50.0s"
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_resumed_stage_counts_its_rate_from_where_it_resumed():
    stream, clock = io.StringIO(), Clock()
    with progress("RL", 100, initial=90, stream=stream, clock=clock) as bar:
        clock.now += 20
        bar.update(5, reward=jnp.float32(0.12345))
    assert stream.getvalue().splitlines()[1] == ("RL 95/100 95% 4s each 20.0s left, reward 0.1235")


def test_the_time_of_the_first_step_which_compiles_is_not_in_the_rate():
    stream, clock = io.StringIO(), Clock()
    with progress("SFT", 100, first="step compiles", stream=stream, clock=clock) as bar:
        for seconds in (120, 10, 10):
            clock.now += seconds
            bar.update()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "SFT 0/100 0%, the first step compiles"
    assert lines[1] == "SFT 1/100 1%"
    assert lines[2] == "SFT 2/100 2% 10s each 16m20s left"
    assert lines[3] == "SFT 3/100 3% 10s each 16m10s left"


def test_a_stage_that_fails_says_how_far_it_got():
    stream, clock = io.StringIO(), Clock()
    with (
        pytest.raises(KeyboardInterrupt),
        progress("eval", None, stream=stream, clock=clock) as bar,
    ):
        bar.update(3)
        clock.now += 90
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines()[-1] == "eval 3 30s each; stopped after 1m30s"


def test_a_process_that_is_not_the_first_shows_nothing(capsys):
    with progress("SFT", 2, enabled=False, interval=0) as bar:
        bar.update(2)
    assert bar.done == 2
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_redraws_itself(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock = Clock()
    shown = on_a_terminal(clock)
    assert "\x1b[" in shown  # it moves the cursor
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "━" in plain
    assert "SFT[x]" in plain
    assert "4/4 100% 1/s, loss 0.25, tag [bold]; 4.0s" in plain


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    shown = on_a_terminal(Clock())
    assert "\x1b" not in shown
    assert shown.startswith("SFT[x] 0/4 0%")


def on_a_terminal(clock: Clock) -> str:
    """Runs a stage of four steps on a pseudo-terminal and returns what it wrote there."""
    master, slave = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while chunk := os.read(master, 4096):
                shown.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with (
        open(slave, "w") as stream,
        progress("SFT[x]", 4, stream=stream, clock=clock) as bar,
    ):
        for step in range(4):
            clock.now += 1
            bar.update(loss=1 / (step + 1), tag="[bold]")
    reader.join(timeout=10)
    os.close(master)
    return shown.decode()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (59.94, "59.9s"), (59.96, "1m00s"), (133, "2m13s"), (3600 * 3 + 329, "3h05m")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_the_default_stream_is_stderr(capsys):
    with progress("SFT", 1) as bar:
        bar.update()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("SFT 0/1")


def test_quantities_that_move_while_a_unit_is_under_way_are_shown_with_their_rate():
    stream, clock = io.StringIO(), Clock()
    with progress("evaluate gaia", 5, stream=stream, clock=clock) as bar:
        for _ in range(40):
            clock.now += 0.5
            bar.count(tokens=100)
        bar.update()
    lines = stream.getvalue().splitlines()
    assert lines[1] == "evaluate gaia 0/5 0%, 2,000 tokens 200/s"
    assert lines[-1] == "evaluate gaia 1/5 20%, 4,000 tokens 200/s; took 20.0s"
