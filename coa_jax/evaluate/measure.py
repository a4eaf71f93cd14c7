"""What all evaluations share: tasks, and samples that are run, graded and stored.

`run.evaluate` evaluates a policy on a benchmark, and `held_out.HeldOut` the policy of a training
run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from coa_jax.data.trajectory import Reward, Trajectory
from coa_jax.evaluate.sample import Key, Sample
from coa_jax.protocol import Messages, Prompt, messages_of
from coa_jax.tasks import Graders, Task


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The samples of one task that a policy must run.

    Attributes:
        index: index of the task among all tasks of the evaluation; the samples' random keys depend
            on it.
        task: the task.
        numbers: indices, among the task's samples, of the samples to run.
        messages: messages of the prompt.
        attempt: index of the attempt, from 0. Attempts after the first repeat samples that gave no
            answer.
    """

    index: int
    task: Task
    numbers: tuple[int, ...]
    messages: Messages
    attempt: int = 0


def attempt_seed(seed: int, attempt: int) -> int:
    """Returns the seed of a repeated attempt at a sample; attempt 0 has the evaluation's seed."""
    if not attempt:
        return seed
    named = hashlib.blake2b(f"{seed}/{attempt}".encode(), digest_size=4)
    return int.from_bytes(named.digest()) >> 1


Policy = Callable[
    [Sequence[Wanted], Mapping[str, Any], Callable[[int], None]], AsyncGenerator[Trajectory, None]
]
"""A function that runs samples and yields their ungraded trajectories as they end.

Its arguments are the samples to run; a mapping, which it copies to the metadata of each trajectory;
and a function, which it calls from time to time with the number of tokens written since the last
call.
"""


class Store(Protocol):
    """The finished samples of an evaluation, which a resumed evaluation does not run again."""

    samples: dict[Key, Sample]

    def add(self, trajectory: Trajectory) -> Sample:
        """Adds a sample that has just ended, and returns its data for the results."""

    def trajectory(self, key: Key) -> Trajectory:
        """Returns the trajectory of a sample that is not graded yet."""

    def grade(self, key: Key, reward: Reward) -> None:
        """Stores the grade of a sample."""


def wanted(
    samples: Mapping[Key, Sample],
    tasks: Mapping[int, Task],
    number: int,
    prompt: Prompt,
    attempts: int = 1,
    attempt: int = 0,
) -> list[Wanted]:
    """Returns the samples that must run.

    Args:
        samples: finished samples.
        tasks: tasks by their index among all tasks of the evaluation.
        number: number of samples per task.
        prompt: instructions and prompt style with which the policy sees the tasks.
        attempts: maximum number of attempts per sample. A sample runs again until it has an answer
            or has run this many times.
        attempt: index of the attempt, from 0.
    """

    def runs(key: Key) -> bool:
        sample = samples.get(key)
        if sample is None:
            return attempt == 0
        return sample.attempts == attempt and sample.wanted(attempts)

    return [
        Wanted(index, task, numbers, messages_of(task, prompt), attempt)
        for index, task in tasks.items()
        if (numbers := tuple(n for n in range(number) if runs((task.id, n))))
    ]


async def finish(
    streams: Iterable[AsyncGenerator[Trajectory, None]],
    tasks: Sequence[Task],
    graders: Graders,
    store: Store,
    *,
    ungraded: Iterable[Key] = (),
    attempts: int = 1,
    ended: Callable[[], None] = lambda: None,
) -> None:
    """Stores samples as they end, and grades them meanwhile.

    Args:
        streams: samples of a `Policy`, one stream for each attempt. A stream starts when the
            previous stream has ended.
        tasks: all tasks of the evaluation.
        graders: graders of the answers. They do not grade samples that a fault ended.
        store: takes the samples and their grades.
        ungraded: stored samples to grade, too.
        attempts: maximum number of attempts per sample, see `wanted`.
        ended: function that is called when a sample will not run again.

    Raises:
        UserError: as in `Graders.grade`, or an error of the policy.
    """
    by_id = {task.id: task for task in tasks}

    async def grade(key: Key) -> None:
        reward = Reward(None)
        if not store.samples[key].broken:
            reward = await graders.grade(by_id[key[0]], store.trajectory(key))
        store.grade(key, reward)

    try:
        async with asyncio.TaskGroup() as grading:
            for key in ungraded:
                grading.create_task(grade(key))
            for stream in streams:
                async with contextlib.aclosing(stream):
                    async for trajectory in stream:
                        sample = store.add(trajectory)
                        if not sample.wanted(attempts):
                            grading.create_task(grade(sample.key))
                            ended()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
