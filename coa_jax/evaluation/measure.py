"""The loop of all evaluations: runs, grades and stores the samples that are missing.

`run.evaluate` evaluates a policy on a benchmark, and `held_out.HeldOut` the policy of a training
run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from coa_jax.data.trajectory import Reward, Trajectory
from coa_jax.evaluation.config import SamplesConfig
from coa_jax.evaluation.sample import Key, Sample
from coa_jax.protocol import Prompt
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.request import Request, make_request
from coa_jax.rollout.sampler import Sampler
from coa_jax.tasks import Graders, Task


class Store(Protocol):
    """The finished samples of an evaluation, which a resumed evaluation does not run again."""

    samples: dict[Key, Sample]

    def add(self, trajectory: Trajectory) -> Sample:
        """Adds a sample that has just ended, and returns its data for the results."""

    def trajectory(self, key: Key) -> Trajectory:
        """Returns the trajectory of a sample that is not graded yet."""

    def grade(self, key: Key, reward: Reward) -> None:
        """Stores the grade of a sample."""


def missing_requests(
    samples: Mapping[Key, Sample],
    tasks: Mapping[int, Task],
    config: SamplesConfig,
    prompt: Prompt,
    about: Mapping[str, Any],
    environments: Environments | None = None,
    attempts: int = 1,
    attempt: int = 0,
) -> list[Request]:
    """Returns requests for the samples that must run.

    Args:
        samples: finished samples.
        tasks: maps the index of each task, among all tasks of the evaluation, to the task. The
            random keys of a task's samples depend on this index.
        config: settings of the samples.
        prompt: instructions and prompt style with which the policy sees the tasks.
        about: metadata of the trajectories.
        environments: creates the environment of each sample; None for the default environment,
            which only runs tools.
        attempts: maximum number of attempts per sample. A sample runs again until it has an answer
            or has run this many times.
        attempt: index of the attempt, from 0.
    """

    def runs(key: Key) -> bool:
        sample = samples.get(key)
        if sample is None:
            return attempt == 0
        return sample.attempts == attempt and sample.must_rerun(attempts)

    seed = config.sampling_seed
    if attempt:
        hashed = hashlib.blake2b(f"{seed}/{attempt}".encode(), digest_size=4)
        seed = int.from_bytes(hashed.digest()) >> 1
    requests = []
    for index, task in tasks.items():
        if numbers := [n for n in range(config.samples) if runs((task.id, n))]:
            request = make_request(
                task, prompt, seed, index, numbers, config.sampling,
                metadata=about, environments=environments,
            )  # fmt: skip
            # The tests of a programming task can take megabytes.
            requests.append(dataclasses.replace(request, task=task.without_tests()))
    return requests


async def run_and_grade(
    sampler: Sampler | None,
    missing: Callable[[int], Sequence[Request]],
    tasks: Sequence[Task],
    graders: Graders,
    store: Store,
    *,
    ungraded: Iterable[Key] = (),
    attempts: int = 1,
    ended: Callable[[Sample], None] = lambda sample: None,
) -> None:
    """Runs samples, stores them as they end, and grades them meanwhile.

    Args:
        sampler: runs the samples; None if no sample is missing. All its samples have ended when
            this function returns or raises.
        missing: function that takes the index of an attempt, and returns its requests. It is called
            when all samples of the previous attempt are stored.
        tasks: all tasks of the evaluation.
        graders: graders of the answers. They do not grade samples that a fault ended.
        store: takes the samples and their grades.
        ungraded: stored samples to grade, too.
        attempts: maximum number of attempts per sample, see `missing_requests`.
        ended: function that is called with each sample that will not run again.

    Raises:
        UserError: an answer cannot be graded (see `Graders.grade`), or the endpoint or the agent
            program of the policy fails.
    """
    by_id = {task.id: task for task in tasks}

    async def grade(key: Key) -> None:
        reward = Reward(None)
        if not store.samples[key].broken:
            reward = await graders.grade(by_id[key[0]], store.trajectory(key))
        store.grade(key, reward)

    async def run(sampler: Sampler, grading: asyncio.TaskGroup) -> None:
        async with contextlib.aclosing(sampler.finished()) as finished:
            for attempt in range(attempts):
                requests = missing(attempt)
                for request in requests:
                    sampler.submit(request.encoded(sampler.tokenizer))
                for _ in range(sum(len(request.samples) for request in requests)):
                    sample = store.add(await anext(finished))
                    if not sample.must_rerun(attempts):
                        grading.create_task(grade(sample.key))
                        ended(sample)

    try:
        async with asyncio.TaskGroup() as grading:
            for key in ungraded:
                grading.create_task(grade(key))
            if sampler is not None:
                await run(sampler, grading)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
