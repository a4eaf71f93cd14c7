"""Evaluates a policy during training, on held-out tasks.

An evaluation runs between two steps and changes neither parameters nor random numbers, so a run has
the same parameters with and without evaluations. Each trajectory is written to ``evaluations/`` as
soon as it is graded. If the run is killed and resumed, only the missing trajectories are sampled.
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

from coa_jax.config.fields import Bounded, Natural, Place, Seed, Size, Split, Temperature, TopP
from coa_jax.data.trajectory import Trajectory, format_valid
from coa_jax.engine.config import SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.evaluate.journal import digest
from coa_jax.files import durable, jsonl
from coa_jax.model.encode import prompt_ids
from coa_jax.parallel import processes
from coa_jax.parallel.transfer import gather
from coa_jax.protocol import Prompt
from coa_jax.rollout.environments.session import Environments, graded_by_environment
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.mixture import Sources, load_parts, parts_of
from coa_jax.tools.base import Tool

T = TypeVar("T")

METRICS = ("eval/pass_at_1", "eval/reward")
"""Metrics of an evaluation by which ``keep_best`` can select a checkpoint; the highest is best."""

Key = tuple[int, int]
"""Identifies a sample by (index of the held-out task, index among the samples of the task)."""


@dataclasses.dataclass(frozen=True)
class HeldOutConfig(Bounded):
    """Settings of the evaluations on held-out tasks during a training run.

    Attributes:
        tasks: task source, see `tasks.load_tasks`. Leave this "" if ``mixture`` names the sources.
            If ``mixture`` is empty too, reinforcement learning evaluates on the sources that the
            run trains on.
        task_options: options of the task source.
        mixture: maps the name of a source to its settings, see `tasks.mixture.Part`; each source
            has its own metrics.
        split: split of the sources on which the policy is evaluated.
        num_tasks: number of tasks of each source; 0 for all tasks.
        samples: number of trajectories that are sampled for each task; pass@1 is the mean over
            them.
        seed: seed for choosing the tasks and for sampling.
        temperature: sampling temperature; 0 samples greedily.
        top_p: probability mass of nucleus sampling; 1 samples from all tokens.
        top_k: number of most probable tokens from which a token is sampled; 0 for all tokens.
        max_tokens: maximum number of tokens of a trajectory; 0 takes ``rollout.max_tokens``.
        max_turn_tokens: maximum number of tokens that the policy writes in one turn; 0 takes
            ``rollout.max_turn_tokens``.
        max_tool_calls: maximum number of tool calls of a trajectory; 0 takes
            ``rollout.max_tool_calls``.
        slots: number of sequences that an evaluation decodes at the same time; 0 takes
            ``engine.slots``. The setting matters only if ``max_staleness`` is above 0: then
            training rollouts continue during the evaluation, which therefore has a KV cache of its
            own.
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
        """Returns the limits of a trajectory in evaluations.

        Args:
            config: limits in training. A limit that this object sets (not 0) replaces the limit in
                training.
        """
        names = ("max_tokens", "max_turn_tokens", "max_tool_calls")
        own = {name: value for name in names if (value := getattr(self, name))}
        return dataclasses.replace(config, **own)


def check_best(keep_best: str, evaluate_every: int, checkpoint_every: int) -> None:
    """Checks that the metric ``keep_best`` is available for every checkpoint.

    Args:
        keep_best: metric that selects the best checkpoint; "" for no best checkpoint.
        evaluate_every: number of steps between two evaluations; 0 for no evaluations.
        checkpoint_every: number of steps between two checkpoints.

    Raises:
        UserError: ``keep_best`` is a metric of evaluations, and some checkpoint would be saved
            without an evaluation.
    """
    if keep_best in METRICS and (not evaluate_every or checkpoint_every % evaluate_every):
        raise UserError(
            f"keep_best is {keep_best}, which is not known at every checkpoint; give evaluate_every"
            ", and make checkpoint_every a multiple of it"
        )


class HeldOut:
    """Evaluates the policy of a training run on held-out tasks, which updates do not use.

    `due` says after which steps, and `measure` evaluates.

    Attributes:
        tasks: the held-out tasks.
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
            config: settings of the evaluations.
            every: number of steps between two evaluations; the policy is evaluated after the last
                step too.
            total: number of steps of the run.
            run: directory of the run; trajectories are written to its ``evaluations/``.
            phase: name of the training stage, which becomes the prefix of file names.
            rollout: budgets of the run's rollouts, some of which ``config`` may override.
            graders: graders of the answers.
            prompt: prompt style in which the policy sees the tasks.
            tools: live tools.
            environments: creates the environment in which a sample acts; None for the tool loop.
            wait_seconds: number of seconds to wait for the slowest process.
            otherwise: sources on which the policy is evaluated if ``config`` names none.
            trained: tasks that the run trains on. If some of them are held-out tasks too, a warning
                gives their number.

        Raises:
            UserError: a source cannot be loaded, or its tasks cannot be graded.
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
                "%d of %d tasks of the evaluation are trained on too, so its metrics are not "
                "those of held-out tasks; give another held_out.split",
                both,
                len(self.tasks),
            )
        asked = [(task.id, task.question, task.gold) for task in self.tasks]
        about = {**dataclasses.asdict(config), "num_tasks": 0, "samples": 0, "slots": 0}
        self._settings = digest([about, dataclasses.asdict(self._budgets), asked, prompt.style])
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._abandoned = False

    def due(self, step: int) -> bool:
        """Returns whether an evaluation follows the step with the number ``step``."""
        return step % self._every == 0 or step == self._total

    def measure(
        self,
        step: int,
        parameters: int,
        tokenizer: Any,
        engines: Callable[[], Sequence[Engine]],
    ) -> dict[str, float] | None:
        """Evaluates the policy after a step, and returns the same metrics in every process.

        Every process must call this method.

        Args:
            step: number of the step.
            parameters: checksum of the parameters. Saved samples of a policy with another checksum
                are deleted.
            tokenizer: tokenizer of the policy.
            engines: function that returns engines with these parameters and free slots. All
                processes call the function if any process still has samples to produce.

        Returns:
            The metrics ``eval/...``; None if the evaluation was abandoned.
        """
        path = self._folder / f"{self._phase}-{step:08d}-{processes.index()}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = {"parameters": parameters, "settings": self._settings}
        done = dict(self._finished(path, mark))
        requests = list(self._requests(done, {**mark, "step": step}, tokenizer))
        found = self._gather((bool(requests), self._abandoned))
        if any(abandoned for _, abandoned in found):
            return None
        whole = True
        if any(missing for missing, _ in found):
            # All processes help to create the engines, even processes that have nothing to sample.
            ready = engines()
            whole = asyncio.run(self._sample(requests, path, tokenizer, ready, done))
        mine = [_row(key, trajectory) for key, trajectory in done.items()]
        parts = self._gather((mine, whole))
        if not all(whole for _, whole in parts):
            return None
        rows = [row for part, _ in parts for row in part]
        return self._figures(sorted(rows, key=lambda row: (row[0], row[1])))

    def _gather(self, told: T) -> list[T]:
        return gather([told], "an evaluation", self._wait_seconds)

    def abandon(self) -> None:
        """Ends a running evaluation; signal handlers may call this method."""
        self._abandoned = True
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # the event loop has just been closed
                loop.call_soon_threadsafe(task.cancel)

    def _finished(self, path: Path, mark: Mapping[str, int]) -> Iterator[tuple[Key, Trajectory]]:
        """Yields saved samples of this process's tasks with the same step, parameters and settings.

        A file with other parameters or settings is deleted.
        """
        if not path.exists():
            return
        durable.cut_torn_line(path)
        rows = [Trajectory.from_json(row) for row in jsonl.read_objects(path)]
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
        """Yields the requests for the samples of this process that have no trajectory yet."""
        config = self._config
        for index in range(processes.index(), len(self.tasks), processes.count()):
            missing = tuple(n for n in range(config.samples) if (index, n) not in done)
            if missing:
                task, opener = self.tasks[index], None
                prompt = prompt_ids(tokenizer, task, self._prompt)
                if self._environments is not None:
                    opener = self._environments.opener(task, config.seed, index, missing)
                yield Request(
                    # The tests of a programming task can take megabytes, so trajectories do not
                    # carry a copy.
                    task=task.without_tests(),
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
        """Samples and grades trajectories; returns whether all samples were finished."""

        async def finish(trajectory: Trajectory) -> None:
            index = trajectory.metadata["prompt_id"]
            reward = await self._graders.grade(self.tasks[index], trajectory)
            graded = dataclasses.replace(trajectory, reward=reward)
            durable.append(path, (jsonl.dumps(graded.to_json()) + "\n").encode())
            done[index, graded.sample_id] = graded

        async def run() -> None:
            stream = rollout(engines, tokenizer, requests, self._tools, self._budgets)
            try:
                async with asyncio.TaskGroup() as grading, contextlib.aclosing(stream):
                    async for trajectory in stream:
                        grading.create_task(finish(trajectory))
            except ExceptionGroup as group:  # so that the command can report a `UserError`
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
        """Computes metrics of graded samples: in total and, for several sources, by source."""
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
    """Returns the fields of a sample that the metrics need; processes exchange these rows."""
    value = trajectory.reward and trajectory.reward.value
    calls = len(trajectory.tool_calls)
    return [*key, value, trajectory.num_policy_tokens, calls, format_valid(trajectory)]


def _rates(name: str, rows: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Computes pass@1, its standard error over tasks, and other rates of graded samples."""
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
