"""Evaluates a policy during training, on held-out tasks.

An evaluation runs between two steps and changes neither parameters nor random numbers, so a run has
the same parameters with and without evaluations. Each trajectory is written to ``evaluations/`` as
soon as it is graded. If the run is killed and resumed, only the missing trajectories are sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import logging

from coa_jax.data.trajectory import Reward, Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.evaluation.config import HeldOutConfig
from coa_jax.evaluation.measure import missing_requests, run_and_grade
from coa_jax.evaluation.results import training_metrics
from coa_jax.evaluation.sample import Key, Sample, digest, group_by_task, sample_of
from coa_jax.files import durable, jsonl
from coa_jax.model.api import Model
from coa_jax.parallel import processes
from coa_jax.parallel.transfer import gather
from coa_jax.protocol import Prompt
from coa_jax.rollout.environments.base import EnvironmentConfig
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.request import RolloutConfig
from coa_jax.rollout.sampler import make_sampler
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.mixture import Sources
from coa_jax.tools.base import Tool

T = TypeVar("T")


def held_out_tasks(
    config: HeldOutConfig,
    rollout: RolloutConfig,
    environment: EnvironmentConfig,
    otherwise: Sources | None = None,
    trained: Sequence[Task] = (),
) -> list[Task]:
    """Loads the tasks on which a training run is evaluated.

    Args:
        config: settings of the evaluations.
        rollout: settings of the run's rollouts. Their ``level`` (how strict a protocol is) and
            ``format`` override those of the tasks' protocols, unless they are "".
        environment: environment in which the policy acts, which may grade the tasks.
        otherwise: sources on which the policy is evaluated if ``config`` names none.
        trained: tasks that the run trains on. If some of them are held-out tasks too, a warning
            gives their number.

    Raises:
        UserError: a source cannot be loaded.
    """
    named = config.tasks or config.mixture
    tasks = config.load(environment, sources=None if named else otherwise)
    questions = {task.question for task in trained}
    if both := sum(task.question in questions for task in tasks):
        logging.warning(
            "%d of %d tasks of the evaluation are trained on too, so its metrics are not those of "
            "held-out tasks; give another held_out.split", both, len(tasks),
        )  # fmt: skip
    return with_level(tasks, rollout.level, rollout.format)


@dataclasses.dataclass(kw_only=True)
class HeldOut:
    """Evaluates the policy of a training run on tasks that updates do not use.

    Attributes:
        config: settings of the evaluations.
        tasks: the held-out tasks.
        folder: folder to which the trajectories are written.
        phase: name of the training stage, which becomes the prefix of file names.
        rollout: budgets of the run's rollouts.
        graders: graders of the answers.
        prompt: prompt style in which the policy sees the tasks.
        tools: live tools.
        wait_seconds: number of seconds after which a process that waits for other processes logs
            which of them are missing. The process then continues to wait.
        environments: creates the environment of each sample; None for the default environment,
            which only runs tools.

    Raises:
        UserError: the tasks cannot be graded.
    """

    config: HeldOutConfig
    tasks: Sequence[Task]
    folder: Path
    phase: str
    rollout: RolloutConfig
    graders: Graders
    prompt: Prompt
    tools: Sequence[Tool]
    wait_seconds: float
    environments: Environments | None = None

    def __post_init__(self) -> None:
        self.graders.check(self.tasks)
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._abandoned = False

    def measure(
        self,
        step: int,
        parameters: int,
        model: Model,
        engines: Callable[[], Sequence[Engine]],
    ) -> dict[str, float] | None:
        """Evaluates the policy after a step, and returns the same metrics in every process.

        Every process must call this method.

        Args:
            step: number of the step.
            parameters: checksum of the parameters. Saved samples of a policy with another checksum
                are deleted.
            model: architecture and tokenizer of the policy.
            engines: function that returns engines with these parameters and free slots. All
                processes call the function if any process still has samples to produce.

        Returns:
            The metrics ``eval/...``; None if the evaluation was abandoned.
        """
        marks = {"parameters": parameters, "settings": self._settings(), "step": step}
        graded = GradedFile(
            self.folder / f"{self.phase}-{step:08d}-{processes.index()}.jsonl",
            {"stage": f"{self.phase}-eval", **marks},
        )
        samples, tasks = (
            self.config.samples,
            dict(processes.local_items(list(enumerate(self.tasks)))),
        )
        missing = missing_requests(
            graded.samples, tasks, self.config, self.prompt, graded.about, self.environments
        )
        states = self._gather((bool(missing), self._abandoned))
        if any(abandoned for _, abandoned in states):
            return None
        complete = True
        if any(incomplete for incomplete, _ in states):
            # All processes help to create the engines, even processes that have nothing to sample.
            sampler = make_sampler(model, engines(), self.tools, self.rollout)
            work = run_and_grade(sampler, lambda _: missing, self.tasks, self.graders, graded)
            complete = asyncio.run(self._run(work))
        parts = self._gather((list(graded.samples.values()), complete))
        if not all(complete for _, complete in parts):
            return None
        merged = {sample.key: sample for part, _ in parts for sample in part}
        return training_metrics(group_by_task(self.tasks, merged, samples), samples)

    def _settings(self) -> str:
        """Returns a hash of everything besides the parameters that the samples depend on."""
        config = dataclasses.replace(self.config, num_tasks=0, samples=1)
        budgets = dataclasses.asdict(self.rollout)
        questions = [(task.id, task.question, task.gold) for task in self.tasks]
        return digest([dataclasses.asdict(config), budgets, questions, self.prompt.style])

    def _gather(self, value: T) -> list[T]:
        return gather([value], "an evaluation", self.wait_seconds)

    async def _run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs a coroutine that `abandon` can cancel; returns whether the coroutine finished."""
        task = asyncio.ensure_future(work)
        self._running = asyncio.get_running_loop(), task
        if self._abandoned:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not self._abandoned:
                raise
            return False
        finally:
            self._running = None
        return True

    def abandon(self) -> None:
        """Ends a running evaluation without metrics; signal handlers may call this method."""
        self._abandoned = True
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # the event loop has just been closed
                loop.call_soon_threadsafe(task.cancel)


class GradedFile:
    """The graded samples of one process in an evaluation during training, stored in a file.

    A sample is appended to the file when it is graded. If the process is killed, only the samples
    that are not graded yet are lost.

    Attributes:
        about: metadata of the samples.
        samples: maps the key of each sample to the sample.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        """Reads the samples that an earlier process stored.

        Args:
            path: the file.
            about: metadata of the samples. A file with other metadata is deleted.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self.about = path, about
        self._ungraded: dict[Key, Trajectory] = {}
        stored: list[Trajectory] = []
        if path.exists():
            durable.cut_torn_line(path)
            stored = [Trajectory.from_json(row) for row in jsonl.read_objects(path)]
        if not all(about.items() <= trajectory.metadata.items() for trajectory in stored):
            path.unlink()
            stored = []
        self.samples = {sample.key: sample for sample in map(sample_of, stored)}

    def add(self, trajectory: Trajectory) -> Sample:
        """Adds a sample that has just ended, and returns its data for the results."""
        sample = sample_of(trajectory)
        self.samples[sample.key] = sample
        self._ungraded[sample.key] = trajectory
        return sample

    def trajectory(self, key: Key) -> Trajectory:
        """Returns the trajectory of a sample that is not graded yet."""
        return self._ungraded[key]

    def grade(self, key: Key, reward: Reward) -> None:
        """Appends a sample with its grade to the file."""
        graded = dataclasses.replace(self._ungraded.pop(key), reward=reward)
        durable.append(self._path, (jsonl.dumps(graded.to_json()) + "\n").encode())
        self.samples[key] = self.samples[key].graded(reward)
