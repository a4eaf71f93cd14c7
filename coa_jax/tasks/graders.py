"""Grades finished trajectories: selects the reward of a task, and combines several rewards.

A task names its reward in ``metadata["grader"]`` (see `coa_jax.tasks.checks.REWARDS`):

* ``exact_match``, or no name: the reward that the setting ``answer`` names. If the setting
  ``judge_all`` is set and a judge is configured, the judge grades the answer.
* ``judge``: a language model judges the answer. If no judge is configured, the answer is graded as
  with ``exact_match``.
* Any other name, such as ``math`` or ``code``: the reward of this name.

If the setting ``rewards`` is not empty, a weighted sum of several rewards replaces this single
reward.

A mistake of the policy scores 0. If a component of the system fails (a tool, the sandbox, the judge
or a reward function), the reward is None with a reason, and the trajectory is masked. Only three
errors end the run: a reward function returns neither a number nor None, a reward function of the
user raises an exception for each of the first `MAX_EXCEPTIONS` trajectories, or the judge's budget
is spent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
import os
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from absl import logging

from coa_jax.config.extensions import (
    BoundFunction,
    Extension,
    MisfitError,
    Named,
    bind,
    refuse_result,
)
from coa_jax.config.fields import Between, Bounded, Name, Place, check
from coa_jax.config.preflight import Needs, Probe, code_needs, code_probes
from coa_jax.data.trajectory import Reward, StopReason, Trajectory, format_valid
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.run.settings import build_config
from coa_jax.tasks.base import Task
from coa_jax.tasks.checks import REWARDS, compares_texts, reasoning_gym
from coa_jax.tasks.code_tests import CodeLimits
from coa_jax.tasks.judge import Judge, JudgeConfig
from coa_jax.tasks.maths import check_installed
from coa_jax.tasks.private_tests import check_folder, check_tests
from coa_jax.tools.code_libraries import isolation_here
from coa_jax.tools.concurrency import ConcurrencyLimit, guarded, run_blocking
from coa_jax.tools.net.budget import BudgetSpentError

T = TypeVar("T")

GRADED_BY = ("grader", "scorer", "generator", "generator_metadata", "question_id")
"""Metadata keys of a task that graders read, in addition to its question and accepted answers."""

MAX_EXCEPTIONS = 16
"""Number of first trajectories for all of which a user's reward may not raise an exception."""

TASK_GRADER = "grader"
"""Key in the setting ``rewards`` that stands for the reward that each task names."""

RESERVED_METRICS = (
    "mean", "std", "min", "max", "ungraded", "masked_frac", "stop", "overlong", "earned",
    "cheatable",
)  # fmt: skip
"""Names of metrics ``reward/NAME``, which the setting ``rewards`` must not use for its rewards."""


@dataclasses.dataclass(frozen=True)
class RewardConfig(Extension):
    """The settings of one reward in the weighted sum ``rewards``.

    ``path`` names the reward, and ``options`` are arguments of its function. ``path`` may be empty
    if the key of this entry in ``rewards`` is ``grader`` or the short name of a reward.

    Attributes:
        weight: factor by which the reward is multiplied in the sum. With 0, the reward is recorded
            but does not change the sum.
    """

    weight: Annotated[float, Between(-1e6, 1e6)] = 1.0


@dataclasses.dataclass(frozen=True)
class GradersConfig(Bounded):
    """Settings that say how the answers of the policy are graded.

    Attributes:
        answer: reward of text answers that no judge grades: ``exact_match``, ``f1``, a reward of
            the Chain-of-Agents authors (``mhqa_train``, ``mhqa_eval``, ``qa_em``, ``qa_subem``), or
            a custom reward ``package.module:name``.
        rewards: rewards whose weighted sum counts: name -> ``path``, ``options`` and ``weight``,
            see `RewardConfig`. Each reward is also recorded under its name. The name ``grader``
            stands for the reward that the task names. If the mapping is empty, only the reward that
            the task names counts.
        judge_all: whether the judge grades the text answers of all tasks. If False, the judge
            grades only the answers to tasks that name the reward ``judge``.
        judge: language model that grades text answers. If no judge is configured, the reward
            ``answer`` grades these answers.
        code: limits of programs that are graded.
        private_tests: folder with one file of tests per question, named by the question id; "" to
            use the tests in the question file.
    """

    answer: Annotated[str, Named(REWARDS)] = "exact_match"
    rewards: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    judge_all: bool = False
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    code: CodeLimits = dataclasses.field(default_factory=CodeLimits)
    private_tests: Place = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, settings in self.rewards.items():
            check(name, Name, "rewards")
            reward = build_config(RewardConfig, settings, f"rewards.{name}")
            if not reward.path and name != TASK_GRADER and not REWARDS.knows(name):
                raise UserError(f"rewards.{name}.path is missing; give package.module:name")
            reserved = (TASK_GRADER, "format", *REWARDS.built_in)
            if name in RESERVED_METRICS or (reward.path and name in reserved):
                why = "is the name of another metric" if name in RESERVED_METRICS else "is built in"
                raise UserError(f"rewards.{name} {why}; choose another name for {reward.path}")

    def measure(self, task: Task) -> str:
        """Returns the name of the reward that grades a task, such as ``exact_match``."""
        if "scorer" in task.metadata:
            return str(task.metadata["scorer"])
        grader = str(task.metadata.get("grader", "exact_match"))
        if grader not in ("exact_match", "judge"):
            return grader
        judges = self.judge and (grader == "judge" or self.judge_all)
        return "judge" if judges else self.answer

    def _rewards(self) -> dict[str, RewardConfig]:
        """Returns the rewards that the settings name, by the name of the setting."""
        rewards = {"answer": RewardConfig(self.answer)}
        for name, settings in self.rewards.items():
            reward = build_config(RewardConfig, settings, f"rewards.{name}")
            if name != TASK_GRADER:
                rewards[f"rewards.{name}"] = dataclasses.replace(reward, path=reward.path or name)
        return rewards

    def needs(self) -> Needs:
        """Returns what the judge and the rewards need, see `config.preflight`."""
        rewards = (
            code_needs(REWARDS, reward.path, reward.options).under(setting)
            for setting, reward in self._rewards().items()
        )
        return sum(rewards, self.judge.chat.needs().under("judge.chat"))

    def probes(self, tasks: Sequence[Task] = ()) -> dict[str, Probe]:
        """Returns functions that check before a run whether the answers can be graded.

        They check the judge, the private tests and the rewards, see `config.preflight`.

        Args:
            tasks: tasks that are graded; () if they are unknown. The judge is checked only if it
                grades one of the tasks, or if they are unknown.
        """
        probes: dict[str, Probe] = {}
        if self.judge and (not tasks or "judge" in map(self.measure, tasks)):
            probes["graders.judge.chat"] = self.judge.chat.probe
        if self.private_tests:
            ids = [str(task.metadata.get("question_id") or "") for task in tasks]
            probes["graders.private_tests"] = lambda seconds: check_tests(self.private_tests, ids)
        for setting, reward in self._rewards().items():
            probes |= code_probes(REWARDS, reward.path, reward.options, f"graders.{setting}")
        return probes

    def check_judge(self) -> None:
        """Checks that a judge is configured if the setting ``judge_all`` is True.

        Raises:
            UserError: ``judge_all`` is True, and no judge is configured.
        """
        if self.judge_all and not self.judge:
            raise UserError(
                "graders.judge.chat.url is empty, and judge_all is True: a judge grades all "
                "answers; give --config.graders.judge.chat.url=http://HOST:8000/v1"
            )


@dataclasses.dataclass(frozen=True)
class _Weighted:
    """A reward of the setting ``rewards``.

    ``call`` is None for the reward ``grader``, because each task names another function. ``own``
    says whether the function is not one of this package.
    """

    name: str
    weight: float
    call: BoundFunction | None
    own: bool = False

    @property
    def of_group(self) -> bool:
        """Whether the reward function takes all samples of a task together."""
        return self.call is not None and "trajectories" in self.call.asks


class Graders:
    """Grades trajectories with the rewards of a run. Several event loops may share one object.

    Attributes:
        judge: language model that judges answers; None if no judge is configured.
        programs: semaphore that limits how many programs are graded concurrently.
    """

    def __init__(self, config: GradersConfig):
        """Looks up the rewards that the settings name, and opens the cache of the judge.

        Raises:
            UserError: a reward does not exist or has wrong parameters, ``judge_all`` is set and no
                judge is configured, or the cache of the judge cannot be opened.
        """
        config.check_judge()
        self.config = config
        self.judge = Judge(config.judge) if config.judge else None
        self.programs = ConcurrencyLimit(max(4, (os.cpu_count() or 1) // 2))
        self._warned: set[str] = set()
        self._found = {config.answer: bind(REWARDS, config.answer, {}, "graders.answer")}
        self._rewards = [self._weighted(name, reward) for name, reward in config.rewards.items()]
        self._untried = [reward for reward in self._rewards if reward.own]
        self._graded: set[str] = set()  # rewards that have graded a trajectory
        self._raised: Counter[str] = Counter()  # reward -> trajectories for which it raised

    def _weighted(self, name: str, settings: Mapping[str, Any]) -> _Weighted:
        where = f"graders.rewards.{name}"
        reward = build_config(RewardConfig, settings, where)
        if name == TASK_GRADER:
            return _Weighted(name, reward.weight, None)
        call = bind(REWARDS, reward.path or name, reward.options, where)
        own = bool(reward.path) or name not in REWARDS.built_in
        return _Weighted(name, reward.weight, call, own)

    def check(self, tasks: Iterable[Task]) -> None:
        """Checks that this machine can grade the tasks.

        The first check calls each reward function that is not of this package once, with an empty
        trajectory.

        Raises:
            UserError: a reward, package, sandbox or folder of tests that the tasks need is missing,
                a task lacks a column that a reward function needs, or a reward function returns
                neither a number nor None.
        """
        tasks = list(tasks)
        for reward in self._rewards:
            check_columns = getattr(reward.call and reward.call.function, "_check_columns", None)
            if check_columns and reward.own:
                for task in tasks:
                    check_columns(task)
        if tasks and self._untried:
            run_blocking(self._try_own(tasks[0]))
            self._untried = []
        for name in dict.fromkeys(map(self.config.measure, tasks)):
            self._bound(name)
            if name == "reasoning_gym":
                reasoning_gym()
                names = {task.metadata.get("generator", "") for task in tasks}
                if not all(map(compares_texts, names - {""})):
                    isolation_here()
            elif name == "math":
                check_installed()
            elif name == "code":
                isolation_here()
                if self.config.private_tests:
                    check_folder(self.config.private_tests)

    async def _try_own(self, task: Task) -> None:
        """Calls the user's reward functions with a trajectory in which the policy wrote nothing."""
        sample = Trajectory(
            task.id, 0, task.question, task.protocol, *(np.empty(0),) * 3,
            "", (), (), StopReason.EOS, None, task.gold,
        )  # fmt: skip
        for reward in self._untried:
            try:
                if reward.of_group:
                    await self._scores_of_group(reward, task, [sample])
                else:
                    offered = self._arguments_for(task, sample)
                    await _score(reward.name, cast(BoundFunction, reward.call), offered, {})
            except MisfitError:
                raise
            except Exception as error:  # the function may need a text, so this is only a warning
                reason, place = _reason_and_place(error)
                logging.warning(
                    "the reward %s raised an exception for an empty answer: %s, at %s. During the "
                    "run, a trajectory is masked if its reward raises one",
                    reward.name, reason, place,
                )  # fmt: skip

    def _bound(self, name: str) -> BoundFunction:
        if name not in self._found:
            self._found[name] = bind(REWARDS, name, {}, "metadata['grader']")
        return self._found[name]

    async def grade(self, task: Task, trajectory: Trajectory) -> Reward:
        """Grades a finished trajectory by itself, without the rewards that compare samples.

        The first call warns if the settings contain such rewards.

        Returns:
            The reward. ``value`` is None, with a reason, if a component of the system failed.
            ``parts`` is empty if a reward function raised an exception. Otherwise it has these
            keys:

            * ``exact_match``: 1.0 if the answer equals an accepted answer, else 0.0. Always 0.0 for
              a task whose answer is a program.
            * the name of the reward that graded the answer (``math``, ``code``, ``judge``, ...), or
              each name in the setting ``rewards``.
            * ``format``: 1.0 if the text obeys its protocol, else 0.0.
            * ``cheatable``: number of tests of a program that the program could have passed by
              cheating. The key is missing if there is no such test.

        Raises:
            UserError: a reward function returned neither a number nor None, or the budget of the
                judge is spent.
        """
        together = [reward.name for reward in self._rewards if reward.of_group]
        if together and "alone" not in self._warned:
            self._warned.add("alone")
            logging.warning(
                "samples graded one by one do not get the reward %s, which needs all samples of a "
                "task together", ", ".join(together)
            )  # fmt: skip
        return await self.grade_alone(task, trajectory)

    async def grade_alone(self, task: Task, trajectory: Trajectory) -> Reward:
        """Grades a trajectory like `grade`, but without a warning about the rewards left out.

        The rewards that need all samples of the task are left out; `grade_together` adds them. If
        a reward function raises an exception, the trajectory is masked.

        Raises:
            MisfitError: a reward function returned neither a number nor None, or raised an
                exception for each of the first trajectories (a `UserError`).
            BudgetSpentError: the budget of the judge is spent (a `UserError`).
        """
        name = self._name_of(task)
        try:
            reward = await self._grade(task, trajectory)
        except (MisfitError, BudgetSpentError):
            raise
        except Exception as error:  # one defect must not end a run, which would lose its rollouts
            return self._masked_reward(task, name, error)
        self._graded.add(name)
        return reward

    def _name_of(self, task: Task) -> str:
        """Returns the name of the rewards that grade a trajectory by itself, for a message."""
        own = [reward.name for reward in self._rewards if reward.own and not reward.of_group]
        return " or ".join(own) or self.config.measure(task)

    def _masked_reward(self, task: Task, name: str, error: Exception, count: int = 1) -> Reward:
        """Returns the reward of ``count`` trajectories for which a reward raised an exception.

        Raises:
            MisfitError: a function of the user raised an exception for each of the first
                trajectories, so that a run would learn nothing.
        """
        reason, place = _reason_and_place(error)
        if name not in self._graded and name not in REWARDS.built_in:
            self._raised[name] += count
            if self._raised[name] >= MAX_EXCEPTIONS:
                raise MisfitError(
                    f"the reward {name} raised an exception for all of {self._raised[name]} "
                    f"trajectories: {reason}, at {place}. Mend the function; the same command "
                    "continues"
                ) from error
        kind = f"{type(error).__name__} of {name}"
        if kind not in self._warned:
            self._warned.add(kind)
            logging.warning(
                "the answer to task %s cannot be graded (%s, at %s): its trajectory is masked. "
                "Later trajectories with the same error are masked without a message",
                task.id, reason, place,
            )  # fmt: skip
        return Reward(None, {}, reason)

    async def _grade(self, task: Task, trajectory: Trajectory) -> Reward:
        name, offered = self.config.measure(task), self._arguments_for(task, trajectory)
        shown = "exact_match" if name == "reasoning_gym" else name.rpartition(":")[2]
        single = [reward for reward in self._rewards if not reward.of_group]
        scores: dict[str, float | None] = {}
        more: dict[str, float] = {}
        if not self._rewards or any(reward.call is None for reward in single):
            reported = trajectory.metadata.get("given_reward")  # from an agent program
            if reported is None:
                score = await _score(name, self._bound(name), offered, more)
            else:
                shown, score = "given", float(reported)
            scores[shown] = scores[TASK_GRADER] = score
        for reward in single:
            if reward.call is not None:
                scores[reward.name] = await _score(reward.name, reward.call, offered, more)
        # Whatever reward the task names, the parts say whether the answer equals an accepted one.
        exact = scores.get("exact_match")
        if exact is None and name != "code":
            plain = "reasoning_gym" if "scorer" in task.metadata else "exact_match"
            exact = await _score(plain, self._bound(plain), offered, more)
        parts = {"exact_match": exact or 0.0}
        parts |= {part: score for part, score in scores.items() if score is not None}
        if not self._rewards:
            parts.pop(TASK_GRADER, None)
        parts |= {"format": float(format_valid(trajectory)), **more}
        if is_broken(trajectory):
            return Reward(None, parts, str(trajectory.metadata.get("fault", "")))
        silent = [part for part, score in scores.items() if score is None]
        if silent:
            return Reward(None, parts, f"no verdict of {silent[0]}")
        if not self._rewards:
            return Reward(scores[shown], parts)
        return Reward(sum(each.weight * parts[each.name] for each in single), parts)

    def _arguments_for(self, task: Task, trajectory: Trajectory) -> dict[str, Any]:
        answer = task.unboxed(trajectory.answer) or ""
        return {"task": task, "trajectory": trajectory, "question": task.question, "answer": answer,
                "gold": task.gold, "text": trajectory.text, "graders": self}  # fmt: skip

    async def grade_together(
        self, task: Task, trajectories: Sequence[Trajectory], alone: Sequence[Reward]
    ) -> list[Reward]:
        """Returns the rewards of a task's samples, including those that compare the samples.

        The functions of these rewards get only the samples whose reward has a value so far. Samples
        whose reward has the value None stay masked.

        Args:
            task: the task that all samples try to solve.
            trajectories: the samples of the task.
            alone: result of `grade_alone` for each sample.
        """
        graded = list(alone)
        for each in (reward for reward in self._rewards if reward.of_group):
            there = [number for number, reward in enumerate(graded) if reward.value is not None]
            if not there:
                break
            group = [trajectories[number] for number in there]
            try:
                scores = await self._scores_of_group(each, task, group)
            except (MisfitError, BudgetSpentError):
                raise
            except Exception as error:
                masked = self._masked_reward(task, each.name, error, len(there))
                for number in there:
                    graded[number] = masked
                break
            self._graded.add(each.name)
            for number, score in zip(there, scores, strict=True):
                graded[number] = _with_part(graded[number], each, score)
        return graded

    async def _scores_of_group(
        self, reward: _Weighted, task: Task, trajectories: Sequence[Trajectory]
    ) -> list[float | None]:
        assert reward.call is not None
        offered = {"task": task, "trajectories": trajectories, "question": task.question,
                   "gold": task.gold, "graders": self}  # fmt: skip
        return _numbers(reward.name, await _result(reward.call, offered), len(trajectories))

    def __call__(self, task: Task, trajectory: Trajectory) -> Reward:
        """Grades like `grade`, for synchronous code. An event loop may run in the same thread."""
        name = self.config.measure(task)
        if self._rewards or not REWARDS.knows(name) or not _is_plain(self._bound(name)):
            return run_blocking(self.grade(task, trajectory))
        # A plain reward waits for nothing, so the first step of the coroutine is its last. An event
        # loop would need more time for its start than the reward needs.
        try:
            self.grade(task, trajectory).send(None)
        except StopIteration as done:
            return cast(Reward, done.value)
        raise AssertionError(f"the reward {name} has waited")


def _reason_and_place(error: Exception) -> tuple[str, str]:
    """Returns what an exception says, and the file and line where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {untrusted.reason(error)}"
    return reason, f"{frame.filename}:{frame.lineno}"


def is_broken(trajectory: Trajectory) -> bool:
    """Returns whether a trajectory must not be graded, because of a fault or a cancellation.

    A fault is a failure of the system, such as a tool that is down, and not of the policy.
    """
    faults = (call.outcome == "fault" for call in trajectory.tool_calls)
    return trajectory.stop_reason in (StopReason.FAULT, StopReason.CANCELLED) or any(faults)


async def _score(
    name: str, call: BoundFunction, offered: Mapping[str, Any], more: dict[str, float]
) -> float | None:
    """Returns the score of a reward; further parts of a built-in reward are added to ``more``."""
    result = await _result(call, offered)
    if isinstance(result, Reward):
        more |= result.parts
        return result.value
    return _number(name, result)


async def _result(call: BoundFunction, offered: Mapping[str, Any]) -> Any:
    """Returns the result of a reward; a custom synchronous reward runs in a thread."""
    if _is_plain(call) or inspect.iscoroutinefunction(call.function):
        result = call(**offered)
    else:
        result = await asyncio.to_thread(guarded(call), **offered)
    return await result if inspect.isawaitable(result) else result


def _is_plain(call: BoundFunction) -> bool:
    """Returns whether a reward is a synchronous function of this package."""
    built_in = str(getattr(call.function, "__module__", "")).startswith("coa_jax.")
    return built_in and not inspect.iscoroutinefunction(call.function)


def _number(name: str, result: Any) -> float | None:
    """Validates the result of a reward function. A boolean becomes 0.0 or 1.0."""
    if result is None:
        return None
    try:
        value = float(result)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(result, str) or not math.isfinite(value):
        raise refuse_result(REWARDS, name, result, "a finite number or None", "graders")
    return value


def _numbers(name: str, result: Any, count: int) -> list[float | None]:
    """Validates the result of a reward function that takes all samples of a task together."""
    if isinstance(result, str) or not isinstance(result, Iterable):
        result = [result]
    numbers = list(result)
    if len(numbers) != count:
        expected = f"as many numbers as it has trajectories, {count}"
        raise refuse_result(REWARDS, name, numbers, expected, "graders")
    return [_number(name, number) for number in numbers]


def _with_part(reward: Reward, each: _Weighted, score: float | None) -> Reward:
    if score is None:
        return Reward(None, reward.parts, f"no verdict of {each.name}")
    assert reward.value is not None
    parts = {**reward.parts, each.name: score}
    return Reward(reward.value + each.weight * score, parts)


@functools.cache
def _default() -> Graders:
    return Graders(GradersConfig())


def grade(task: Task, trajectory: Trajectory) -> Reward:
    """Grades a finished trajectory like `Graders.grade`, with the default settings."""
    return _default()(task, trajectory)
