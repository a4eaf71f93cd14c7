"""The evaluation of a policy while it is trained, on tasks that it does not learn from.

An evaluation comes between two steps and changes neither parameters nor randomness: a run has the
same parameters with and without it.  Each trajectory is in ``evaluations/`` as soon as it is
graded.  A run that was killed samples only the missing trajectories.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from absl import logging

from coa_jax import files, jsonl
from coa_jax.bounds import Bounded, Natural, Place, Seed, Size, Split, Temperature, TopP
from coa_jax.engine.config import SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.environments.session import Environments, graded_by_environment
from coa_jax.errors import UserError
from coa_jax.learn.fingerprints import digest
from coa_jax.parallel import processes
from coa_jax.protocol import Prompt
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig, prompt_ids
from coa_jax.run_dir import RunDir
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.mixture import Sources, load_parts, parts_of
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory, format_valid

T = TypeVar("T")

METRICS = ("eval/pass_at_1", "eval/reward")
"""Figures of an evaluation whose best checkpoint may stay, that with the highest value."""

Key = tuple[int, int]
"""Index of a task among those that are held out, and number of its sample."""


@dataclasses.dataclass(frozen=True)
class HeldOutConfig(Bounded):
    """What is measured while a policy is trained, and how.

    Attributes:
        tasks: task source, see `tasks.load_tasks`; "" where ``mixture`` has several, or for the
            sources that a run of reinforcement learning trains on.
        task_options: of the source.
        mixture: name -> source, see `tasks.mixture.Part`; each has figures of its own.
        split: which part of the sources.
        num_tasks: tasks of each source; 0 for all.
        samples: of a task; pass@1 is a mean over them.
        seed: which tasks, and the randomness of the samples.
        temperature, top_p, top_k: of sampling; temperature 0 is greedy.
        max_tokens, max_turn_tokens, max_tool_calls: as in ``rollout``; 0 for the values there.
        slots: sequences at a time where rollouts go on meanwhile (``max_staleness`` above 0): the
            evaluation then has a cache of its own; 0 for as many as ``engine.slots``.
    """

    tasks: Place = ""
    task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    split: Split = "validation"
    num_tasks: Natural = 0
    samples: Size = 1
    seed: Seed = 0
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: Natural = 0
    max_tokens: Natural = 0
    max_turn_tokens: Natural = 0
    max_tool_calls: Natural = 0
    slots: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tasks or self.mixture:
            parts_of(self)

    def budgets(self, config: RolloutConfig) -> RolloutConfig:
        """Budgets of a trajectory, where those of other rollouts are given."""
        names = ("max_tokens", "max_turn_tokens", "max_tool_calls")
        own = {name: value for name in names if (value := getattr(self, name))}
        return dataclasses.replace(config, **own)


def check_best(keep_best: str, evaluate_every: int, checkpoint_every: int) -> None:
    """Refuses a metric of evaluations that a checkpoint would not have.

    Raises:
        UserError: says what to change.
    """
    if keep_best in METRICS and (not evaluate_every or checkpoint_every % evaluate_every):
        raise UserError(
            f"keep_best is {keep_best}, which is not known at every checkpoint; give evaluate_every"
            ", and make checkpoint_every a multiple of it"
        )


class HeldOut:
    """The tasks that a run is measured by.

    Attributes:
        tasks: all of them.
    """

    def __init__(
        self,
        config: HeldOutConfig,
        every: int,
        total: int,
        run: RunDir,
        phase: str,
        *,
        rollout: RolloutConfig,
        graders: Graders,
        prompt: Prompt,
        tools: Sequence[Tool],
        environments: Environments | None = None,
        wait_seconds: float,
        otherwise: Sources | None = None,
        trained: Sequence[Task] = (),
    ):
        """Loads the tasks.

        Args:
            config: settings.
            every: steps between two evaluations; the last step has one too.
            total: steps of the run.
            run, phase: where the trajectories go.
            rollout: budgets of the run.
            graders: grade the answers.
            prompt: how tasks are put to the policy.
            tools: live tools.
            environments: make what answers a sample; None for the loop of tools.
            wait_seconds: how long to wait for the slowest process.
            otherwise: the sources where the settings name none.
            trained: tasks that are learned from; those among them that are held out are counted.
        """
        self._config, self._every, self._total = config, every, total
        self._budgets, self._tools, self._graders = config.budgets(rollout), tools, graders
        self._prompt, self._wait_seconds = prompt, wait_seconds
        self._environments = environments
        self._folder, self._phase = run.path / "evaluations", phase
        sources = config if otherwise is None or config.tasks or config.mixture else otherwise
        parts = load_parts(sources, config.split, config.num_tasks or None, config.seed)
        tasks = [task for part in parts.values() for task in part]
        if environments is not None:
            tasks = graded_by_environment(environments.config, tasks)
        self.tasks = with_level(tasks, rollout.level, rollout.format)
        self._graders.check(self.tasks)
        known = {task.question for task in trained}
        if both := sum(task.question in known for task in self.tasks):
            logging.warning(
                "%d of %d tasks of the evaluation are trained on too: what it says of them is no "
                "figure of held-out tasks; give another held_out.split",
                both,
                len(self.tasks),
            )
        asked = [(task.id, task.question, task.gold) for task in self.tasks]
        about = {**dataclasses.asdict(config), "num_tasks": 0, "samples": 0, "slots": 0}
        self._settings = digest([about, dataclasses.asdict(self._budgets), asked, prompt.style])
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._abandoned = False

    def due(self, step: int) -> bool:
        """Whether the policy is measured after a step."""
        return step % self._every == 0 or step == self._total

    def measure(
        self,
        step: int,
        parameters: int,
        tokenizer: Any,
        engines: Callable[[], Sequence[Engine]],
    ) -> dict[str, float]:
        """Figures of the policy after a step; {} if the evaluation was abandoned.

        Every process calls this, and has the same figures.

        Args:
            step: the step.
            parameters: a checksum of the parameters: samples of others are void.
            tokenizer: of the policy.
            engines: gives engines with these parameters, whose slots are free; called in all
                processes if a sample is missing in one.
        """
        path = self._folder / f"{self._phase}-{step:08d}-{processes.index()}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = {"parameters": parameters, "settings": self._settings}
        done = dict(self._finished(path, mark))
        requests = list(self._requests(done, {**mark, "step": step}, tokenizer))
        found = self._gather((bool(requests), self._abandoned))
        if any(abandoned for _, abandoned in found):
            return {}
        whole = True
        if any(missing for missing, _ in found):
            # All processes take part in making the engines, those with nothing to run too.
            ready = engines()
            whole = asyncio.run(self._sample(requests, path, tokenizer, ready, done))
        mine = [_row(key, trajectory) for key, trajectory in done.items()]
        parts = self._gather((mine, whole))
        if not all(whole for _, whole in parts):
            return {}
        rows = [row for part, _ in parts for row in part]
        return self._figures(sorted(rows, key=lambda row: (row[0], row[1])))

    def _gather(self, told: T) -> list[T]:
        return processes.gather([told], "an evaluation", self._wait_seconds)

    def abandon(self) -> None:
        """Ends an evaluation that is running; signal handlers may call it."""
        self._abandoned = True
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    def _finished(self, path: Path, mark: Mapping[str, int]) -> Iterator[tuple[Key, Trajectory]]:
        """What an earlier process has finished with the same parameters and settings."""
        if not path.exists():
            return
        files.cut_torn_line(path)
        rows = [Trajectory.from_json(row) for row in files.read_jsonl(path)]
        if any(t.metadata.get(name) != value for t in rows for name, value in mark.items()):
            path.unlink()
            return
        for trajectory in rows:
            index = trajectory.metadata["prompt_id"]
            mine = index % processes.count() == processes.index() and index < len(self.tasks)
            if mine and trajectory.sample_id < self._config.samples:
                yield (index, trajectory.sample_id), trajectory

    def _requests(
        self, done: Mapping[Key, Trajectory], about: Mapping[str, Any], tokenizer: Any
    ) -> Iterator[Request]:
        """Requests for the samples of this process that have no trajectory yet."""
        config = self._config
        for index in range(processes.index(), len(self.tasks), processes.count()):
            missing = tuple(n for n in range(config.samples) if (index, n) not in done)
            if missing:
                task, opener = self.tasks[index], None
                prompt = prompt_ids(tokenizer, task, self._prompt)
                if self._environments is not None:
                    opener = self._environments.opener(task, config.seed, index, missing)
                yield Request(
                    # Tests of programs have megabytes, and no place in every trajectory.
                    task=dataclasses.replace(task, gold=()) if _has_tests(task) else task,
                    prompt=() if opener else prompt,
                    environment=opener,
                    seed=config.seed,
                    prompt_id=index,
                    samples=missing,
                    sampling=SamplingParams(config.temperature, config.top_p, config.top_k),
                    metadata={"stage": f"{self._phase}-eval", **about},
                )

    async def _sample(
        self,
        requests: Sequence[Request],
        path: Path,
        tokenizer: Any,
        engines: Sequence[Engine],
        done: dict[Key, Trajectory],
    ) -> bool:
        """Runs and grades samples; whether all came to their end."""

        async def finish(trajectory: Trajectory) -> None:
            index = trajectory.metadata["prompt_id"]
            reward = await self._graders.grade(self.tasks[index], trajectory)
            graded = dataclasses.replace(trajectory, reward=reward)
            files.append(path, (jsonl.dumps(graded.to_json()) + "\n").encode())
            done[index, graded.sample_id] = graded

        async def run() -> None:
            stream = rollout(engines, tokenizer, requests, self._tools, self._budgets)
            try:
                async with asyncio.TaskGroup() as grading, contextlib.aclosing(stream):
                    async for trajectory in stream:
                        grading.create_task(finish(trajectory))
            except ExceptionGroup as group:  # its first error may be one that the user can mend
                raise group.exceptions[0] from None

        task = asyncio.ensure_future(run())
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

    def _figures(self, rows: Sequence[Sequence[Any]]) -> dict[str, float]:
        """Figures of graded samples; those of each source where there are several."""
        sources: dict[str, list[Sequence[Any]]] = defaultdict(list)
        for row in rows:
            sources[self.tasks[row[0]].source].append(row)
        found = _rates("eval", rows)
        if len(sources) > 1:
            for name, members in sources.items():
                found |= _rates(f"eval/{name}", members)
        _, _, values, tokens, calls, valid = zip(*rows, strict=True)
        return {
            **found,
            "eval/ungraded": float(sum(value is None for value in values)),
            "eval/len_mean": float(np.mean(tokens)),
            "eval/tool_calls": float(np.mean(calls)),
            "eval/format_valid": float(np.mean(valid)),
        }


def _row(key: Key, trajectory: Trajectory) -> list[Any]:
    """What the figures need of a sample."""
    value = trajectory.reward and trajectory.reward.value
    calls = len(trajectory.tool_calls)
    return [*key, value, trajectory.num_policy_tokens, calls, format_valid(trajectory)]


def _has_tests(task: Task) -> bool:
    return task.metadata.get("grader") == "code"


def _rates(name: str, rows: Sequence[Sequence[Any]]) -> dict[str, float]:
    """pass@1, its standard error over tasks, and the share of tasks with a right sample."""
    tasks: dict[int, list[float]] = defaultdict(list)
    for index, _, value, *_ in rows:
        if value is not None:
            tasks[index].append(value)
    if not tasks:
        return {f"{name}/tasks": 0.0}
    rates = [float(np.mean([value == 1.0 for value in values])) for values in tasks.values()]
    figures = {
        f"{name}/tasks": float(len(tasks)),
        f"{name}/pass_at_1": float(np.mean(rates)),
        f"{name}/reward": float(np.mean([np.mean(values) for values in tasks.values()])),
    }
    if len(rates) > 1:
        figures[f"{name}/pass_at_1_se"] = float(np.std(rates, ddof=1) / np.sqrt(len(rates)))
    if max(map(len, tasks.values())) > 1:
        figures[f"{name}/any_right"] = float(np.mean([rate > 0 for rate in rates]))
    return figures
