"""Many rollouts in one process leak nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import os
import threading
from collections.abc import Iterator

import psutil
import pytest

from coa_jax.data.trajectory import StopReason
from coa_jax.engine.config import SamplingParams
from coa_jax.rollout.loop import rollout
from coa_jax.tools.base import Observation
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, engine, requests

SLOTS = 16
ENDS = (StopReason.ANSWER, StopReason.EOS, StopReason.LENGTH, StopReason.TURNS)


@dataclasses.dataclass(frozen=True)
class Census:
    """What the process holds while no rollout runs.

    Attributes:
        tasks: of the event loop, that of the test included.
        files: open descriptors.
        threads: of Python.
        processes: all below this one: the server of the sandbox, and programs if any is left.
        active: slots that would decode.
        memory: resident bytes.
    """

    tasks: int
    files: int
    threads: int
    processes: int
    active: bool
    memory: int

    @property
    def counts(self) -> tuple[int, int, int, int, bool]:
        return self.tasks, self.files, self.threads, self.processes, self.active


def below() -> list[psutil.Process]:
    """The processes below this one, without those of `tests.forked`."""
    kept, of_forks = [], set()
    for child in psutil.Process().children(recursive=True):
        try:
            parent, command = child.ppid(), ""
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            pass  # the process has ended, and its parent has not read the exit code yet
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing" in command or parent in of_forks:
            of_forks.add(child.pid)
        else:
            kept.append(child)
    return kept


async def census() -> Census:
    process = psutil.Process()
    # The sandbox reports before its supervisor is reaped.
    for _ in range(100):
        if len(below()) <= 1:
            break
        await asyncio.sleep(0.05)
    gc.collect()
    return Census(
        tasks=len(asyncio.all_tasks()),
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        processes=len(below()),
        active=engine(slots=SLOTS).any_active,
        memory=process.memory_info().rss,
    )


@dataclasses.dataclass
class Flaky:
    """A real tool that now and then hangs until its deadline, or breaks."""

    tool: object
    name: str
    deadline: float = 0.2
    made: int = 0

    async def __call__(self, arguments, context) -> Observation:
        self.made += 1
        if self.made % 20 == 0:
            await asyncio.sleep(3600)
        if self.made % 20 == 10:
            raise OSError("the server is gone")
        return await self.tool(arguments, context)


def endless(code_every: int) -> Iterator:
    """Requests that search, each ``code_every``-th of which runs a program."""
    searching = itertools.cycle(requests(sampling=SamplingParams(1.1))[:2])
    (program,) = requests(sampling=SamplingParams(0.0))[2:]
    for number in itertools.count():
        wanted = program if number % code_every == 0 else next(searching)
        yield dataclasses.replace(wanted, prompt_id=number)


def ran(batches: int, size: int, code_every: int) -> tuple[list[Census], list[str]]:
    """Runs batches of rollouts, each with another stream that is left alone half-way.

    Returns:
        A census after each batch, and how the tool calls of all ended.
    """
    tools, tokenizer = tiny_policy.tools(), tiny_policy.policy().tokenizer
    given = [Flaky(tools["wiki_search"], "wiki_search"), tools["code"]]
    source = endless(code_every)
    outcomes: list[str] = []

    def stream(count):
        wanted = itertools.islice(source, count)
        return contextlib.aclosing(rollout(engine(slots=SLOTS), tokenizer, wanted, given, BUDGET))

    async def batch() -> Census:
        finished = 0
        async with stream(size) as trajectories:
            async for trajectory in trajectories:
                assert trajectory.stop_reason in ENDS
                outcomes.extend(call.outcome for call in trajectory.tool_calls)
                finished += 1
        assert finished == size
        async with stream(size) as trajectories:
            await anext(trajectories)
        return await census()

    async def all_batches() -> list[Census]:
        return [await batch() for _ in range(batches)]

    return asyncio.run(all_batches()), outcomes


@pytest.mark.slow
def test_rollouts_leave_no_task_file_thread_process_or_slot():
    before = len(below())  # workers that other tests keep
    counted, outcomes = ran(batches=3, size=20, code_every=10)
    # The first batch starts the server of the sandbox and the threads of the event loop.
    assert counted[0].tasks == 1
    assert counted[0].processes <= before + 1
    assert [later.counts for later in counted[1:]] == [counted[0].counts] * 2
    assert {"ok", "timeout", "fault"} <= set(outcomes)


@pytest.mark.slow
def test_ten_thousand_rollouts_leave_the_memory_as_it_was():
    batches = 20
    counted, outcomes = ran(batches, size=10_000 // batches, code_every=50)
    print([f"{later.memory / 1e6:.1f}" for later in counted])
    tenth = batches // 10
    assert [later.counts for later in counted[tenth:]] == (
        [counted[tenth - 1].counts] * (batches - tenth)
    )
    grown = max(later.memory for later in counted[tenth:]) - counted[tenth - 1].memory
    assert grown <= 0.05 * counted[tenth - 1].memory
    # The process is large: a trajectory that is kept would not be seen in a twentieth of it.
    assert grown <= 16e6
    assert len(outcomes) > 5000
