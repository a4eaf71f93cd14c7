"""Work that runs its own event loops, while another loop is running."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from coa_jax.tools.concurrency import run_blocking, run_outside_event_loop


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    if value < 0:
        raise ValueError("negative")
    return value


@pytest.mark.parametrize("inside", [False, True])
def test_a_coroutine_is_run_to_its_end_inside_of_a_loop_and_outside(inside):
    async def cell() -> int:
        return run_blocking(answer(3))

    assert (asyncio.run(cell()) if inside else run_blocking(answer(3))) == 3

    async def failing() -> int:
        return run_blocking(answer(-1))

    with pytest.raises(ValueError, match="negative"):
        asyncio.run(failing()) if inside else run_blocking(answer(-1))


def test_work_stays_in_its_thread_where_no_loop_runs():
    async def cell() -> int:
        return run_outside_event_loop(threading.get_ident)

    assert run_outside_event_loop(threading.get_ident) == threading.get_ident()
    assert asyncio.run(cell()) != threading.get_ident()


def test_an_error_of_the_work_has_no_other_error_before_it():
    with pytest.raises(KeyboardInterrupt) as caught:
        run_outside_event_loop(lambda: signal.raise_signal(signal.SIGINT))
    assert caught.value.__context__ is None


def test_ctrl_c_ends_the_work_in_its_thread():
    ended = threading.Event()

    def work() -> None:
        try:
            for _ in range(1000):
                time.sleep(0.01)
        finally:
            ended.set()

    async def cell() -> None:
        main = threading.main_thread().ident
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        run_outside_event_loop(work)

    loop = asyncio.new_event_loop()  # asyncio.run would take the signal; Jupyter does not
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert ended.is_set() and time.monotonic() - began < 5  # of 10
