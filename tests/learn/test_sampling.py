"""What runs in the background ends when it is abandoned, and takes with it what it began."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from coa_jax.learn.sampling import Background


def test_computations_run_one_after_the_other_in_one_thread():
    def compute(runner, number):
        async def double():
            await asyncio.sleep(0.01)
            return 2 * number

        return runner.run(double()), threading.get_ident()

    with contextlib.closing(Background(compute)) as background:
        found = []
        for number in range(3):
            background.start(number)
            found.append(background.result())
    assert [value for value, _ in found] == [0, 2, 4]
    assert len({thread for _, thread in found} | {threading.get_ident()}) == 2


def test_abandoning_cancels_what_runs_and_lets_it_clean_up():
    begun, cleaned = threading.Event(), []

    def compute(runner):
        async def child():
            await asyncio.sleep(60)

        async def forever():
            task = asyncio.create_task(child())
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(task.cancelled())  # only the outermost was told to end
                task.cancel()

        runner.run(forever())

    with contextlib.closing(Background(compute)) as background:
        background.start()
        assert begun.wait(10)
        background.abandon()
        with pytest.raises(asyncio.CancelledError):
            background.result()
    assert cleaned == [False]


def test_what_is_begun_after_that_ends_at_once():
    reached = []

    def compute(runner):
        async def work():
            reached.append(1)

        runner.run(work())

    with contextlib.closing(Background(compute)) as background:
        background.abandon()
        background.start()
        with pytest.raises(asyncio.CancelledError):
            background.result()
    assert reached == []


def test_an_error_reaches_who_asks_for_the_result():
    def compute(runner):
        raise OSError("no such tool")

    with contextlib.closing(Background(compute)) as background:
        background.start()
        with pytest.raises(OSError, match="no such tool"):
            background.result()


def test_closing_does_not_wait_for_the_end_of_what_runs():
    def compute(runner):
        runner.run(asyncio.sleep(60))

    background = Background(compute)
    background.start()
    began = time.monotonic()
    background.close()
    assert time.monotonic() - began < 10
