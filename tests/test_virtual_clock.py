"""Time on the virtual clock is ordered, passes at once, and stands while something runs."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.virtual_clock import VirtualClock


def run(clock: VirtualClock, coroutine):
    with asyncio.Runner(loop_factory=clock.new_loop) as runner:
        return runner.run(coroutine)


def test_hours_of_sleep_pass_at_once_and_in_order():
    clock, order = VirtualClock(), []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        order.append((seconds, clock.now))

    async def work():
        await asyncio.gather(*map(sleeper, (7200, 0.5, 100_000, 3)))

    began = time.monotonic()
    run(clock, work())
    assert time.monotonic() - began < 5
    assert [seconds for seconds, _ in order] == [0.5, 3, 7200, 100_000]
    assert [at for _, at in order] == pytest.approx([0.5, 3, 7200, 100_000])


def test_a_timeout_ends_what_sleeps_longer_and_only_that():
    async def work():
        assert await asyncio.wait_for(asyncio.sleep(59, "done"), 60) == "done"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(61)

    clock = VirtualClock()
    run(clock, work())
    assert clock.now == pytest.approx(119)


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_the_clock_stands_while_a_thread_works(seconds):
    clock, seen = VirtualClock(seconds), []

    def call():
        time.sleep(0.05)
        seen.append(clock.now)
        return "result"

    async def work():
        timer = asyncio.create_task(asyncio.sleep(1))
        assert await asyncio.to_thread(call) == "result"
        assert clock.now == pytest.approx(seconds)
        assert timer.done() == (seconds > 1)
        await timer

    run(clock, work())
    assert seen == [0.0]
    assert clock.now == pytest.approx(max(seconds, 1))


def test_errors_and_cancellation_of_a_call_arrive():
    clock, release = VirtualClock(1.0), threading.Event()

    async def work():
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        with ThreadPoolExecutor(1) as pool:
            loop = asyncio.get_running_loop()
            first = loop.run_in_executor(pool, release.wait)
            waiting = loop.run_in_executor(pool, time.sleep, 60)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for _ in range(5):  # the pool hears of it some turns of the loop later
                await asyncio.sleep(0)
            release.set()
            assert await first

    run(clock, work())
    assert clock.now == pytest.approx(2)


def test_the_clock_stands_while_another_thread_holds_it():
    clock, order = VirtualClock(), []

    async def work(started):
        started.set()
        await asyncio.sleep(3600)
        order.append("slept")

    started = threading.Event()
    with clock.hold():
        thread = threading.Thread(target=lambda: run(clock, work(started)))
        thread.start()
        assert started.wait(10)
        time.sleep(0.1)
        order.append("released")
        assert clock.now == 0
    thread.join(10)
    assert order == ["released", "slept"] and clock.now == pytest.approx(3600)


def test_a_word_from_another_thread_wakes_a_loop_that_has_no_timer():
    clock = VirtualClock()

    async def work():
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        threading.Timer(0.05, lambda: loop.call_soon_threadsafe(event.set)).start()
        await event.wait()

    run(clock, work())
    assert clock.now == 0


def test_a_module_can_tell_the_time_by_the_clock():
    clock = VirtualClock()
    run(clock, asyncio.sleep(90))
    module = clock.module()
    assert module.monotonic() == module.perf_counter() == clock.now == pytest.approx(90)
    assert module.sleep is time.sleep
