"""Rewards of finished trajectories: which grader a task asks for, and what it is called with.

A task names its grader in ``metadata["grader"]``:

* ``exact_match`` (also without a name): `coa_jax.tasks.grading.grade_answer`;
* ``math``: `coa_jax.tasks.maths`; ``code``: `coa_jax.tasks.code_tests`;
* ``judge``: a language model where one is configured, else exact match.

A part of ours that fails (a tool, the sandbox, the judge, a grader itself) gives the reward None,
which masks the trajectory, with the reason; grading never raises.  What the policy did wrong is 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from absl import logging

from coa_jax import reading
from coa_jax.bounds import Bounded, OneOf, Place, Seconds, Times
from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.protocol import parse_boxed, split_level
from coa_jax.tasks import release_rewards
from coa_jax.tasks.base import Task
from coa_jax.tasks.checks import GRADERS, tests_of
from coa_jax.tasks.code_tests import CodeLimits, Tests, program_of, run_tests
from coa_jax.tasks.grading import grade_answer
from coa_jax.tasks.judge import Judge, JudgeConfig
from coa_jax.tasks.maths import MathsUnsureError, check_installed, same_expression
from coa_jax.tasks.private_tests import check_folder, load_private_tests
from coa_jax.tools.sandbox.isolation import find_isolation
from coa_jax.tools.sandbox.run import SandboxError
from coa_jax.tools.turns import Turns
from coa_jax.trajectory import Reward, StopReason, Trajectory, format_valid

T = TypeVar("T")

GRADED_BY = ("grader", "scorer", "generator", "generator_metadata", "question_id")
"""What graders read of a task's metadata; beside it they see its question and accepted answers."""

ANSWER_REWARDS = ("exact_match", "f1", *release_rewards.QA)


@dataclasses.dataclass(frozen=True)
class GradersConfig(Bounded):
    """How answers are graded.

    Attributes:
        answer: how answers in words are compared: ``exact_match`` (the corrected form), ``f1``, or
            a reward of the release by its name (``mhqa_train``, ``mhqa_eval``, ``qa_em``,
            ``qa_subem``).
        judge_all: answers in words of all tasks go to the judge, not only where a task asks for it.
        judge: the model that judges; without one answers are compared.
        code: limits of programs that are graded.
        private_tests: folder with tests by question id; "" to use those in the question file.
        programs: programs that are graded at a time.
        maths_s: seconds to compare two expressions.
    """

    answer: Annotated[str, OneOf(*ANSWER_REWARDS)] = "exact_match"
    judge_all: bool = False
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    code: CodeLimits = dataclasses.field(default_factory=CodeLimits)
    private_tests: Place = ""
    programs: Times = 4
    maths_s: Seconds = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge_all and not self.judge:
            raise UserError("judge_all is True, but judge.chat.url is empty; name a judge")


class Graders:
    """All graders of a run; may be called from several event loops."""

    def __init__(self, config: GradersConfig):
        """Opens what they keep on disk.

        Raises:
            UserError: the cache of the judge cannot be used.
        """
        self.config = config
        self.judge = Judge(config.judge) if config.judge else None
        self._programs = Turns(config.programs)
        self._warned: set[str] = set()

    def check(self, tasks: Iterable[Task]) -> None:
        """Refuses tasks for whose grading something is missing on this machine.

        Raises:
            UserError: a package, the sandbox or the folder of private tests is missing.
        """
        kinds = {
            "generator" if "scorer" in task.metadata else task.metadata.get("grader")
            for task in tasks
        }
        if "generator" in kinds and importlib.util.find_spec("reasoning_gym") is None:
            raise _no_generators()
        if "math" in kinds:
            check_installed()
        if "code" in kinds:
            find_isolation()
            if self.config.private_tests:
                check_folder(self.config.private_tests)

    async def grade(self, task: Task, trajectory: Trajectory) -> Reward:
        """The reward of a finished trajectory.

        Returns:
            Its value, None with a reason where it cannot be judged, and parts: the name of what
            was measured (``exact_match``, ``math``, ``code``, ``judge``, ...), and ``format``, 1 if
            the text keeps the rules of its protocol.  ``exact_match`` is 0 for programs.  A grader
            that fails gives no parts.
        """
        try:
            return await self._grade(task, trajectory)
        except Exception as error:  # a fault of ours must not cost the rollouts of a step
            kind = f"{type(error).__name__} of {task.metadata.get('grader', 'exact_match')}"
            reason = f"{type(error).__name__}: {reading.reason(error)}"
            if kind not in self._warned:
                self._warned.add(kind)
                logging.warning(
                    "the answer to task %s cannot be graded (%s): it is masked, and others for "
                    "which this happens are masked without a line", task.id, reason
                )  # fmt: skip
            return Reward(None, {}, reason)

    async def _grade(self, task: Task, trajectory: Trajectory) -> Reward:
        name, score = await self._score(task, trajectory)
        parts = {"exact_match": self._exact(task, trajectory.answer, name)}
        if score is not None:
            parts[name] = score
        parts["format"] = float(format_valid(trajectory))
        broken = trajectory.stop_reason in (StopReason.FAULT, StopReason.CANCELLED) or any(
            call.outcome == "fault" for call in trajectory.tool_calls
        )
        if broken:
            return Reward(None, parts)
        return Reward(score, parts, "" if score is not None else f"no verdict of {name}")

    async def grade_many(self, pairs: Iterable[tuple[Task, Trajectory]]) -> list[Reward]:
        """Rewards of many trajectories, graded at the same time."""
        return list(await asyncio.gather(*(self.grade(task, t) for task, t in pairs)))

    def __call__(self, task: Task, trajectory: Trajectory) -> Reward:
        """`grade` from code that does not await, inside of an event loop or not."""
        coroutine = self.grade(task, trajectory)
        if self._waits(task):
            return run_blocking(coroutine)
        try:  # a comparison of texts never waits, and an event loop would cost more than it does
            coroutine.send(None)
        except StopIteration as done:
            result: Reward = done.value
            return result
        raise AssertionError("grading was not expected to wait")

    def _waits(self, task: Task) -> bool:
        grader = task.metadata.get("grader", "exact_match")
        return grader in ("math", "code") or self.judge is not None

    async def _score(self, task: Task, trajectory: Trajectory) -> tuple[str, float | None]:
        """(what was measured, its value or None where that failed)."""
        answer = trajectory.answer
        grader = task.metadata.get("grader", "exact_match")
        if task.metadata.get("scorer") == "reasoning_gym":
            return "exact_match", generator_score(task, opened(task, answer))
        if grader == "code":
            return "code", await self._code(task, answer)
        if grader == "math":
            return "math", await self._math(task, answer)
        if grader not in GRADERS:
            raise ValueError(f"the grader {grader!r} is unknown; known are {', '.join(GRADERS)}")
        if self.judge is not None and (grader == "judge" or self.config.judge_all):
            if answer is None:
                return "judge", 0.0
            verdict = await self.judge(task.question, task.gold, opened(task, answer) or "")
            return "judge", None if verdict is None else float(verdict)
        name = self.config.answer
        if name == "f1":
            return name, release_rewards.f1(opened(task, answer) or "", task.gold)
        if name in release_rewards.QA:
            return name, release_rewards.QA[name](trajectory.text, task.gold)
        return name, self._exact(task, answer, name)

    def _exact(self, task: Task, answer: str | None, name: str) -> float:
        if name == "code":
            return 0.0
        if task.metadata.get("scorer") == "reasoning_gym":
            return generator_score(task, opened(task, answer))
        return grade_answer(opened(task, answer), task.gold)

    async def _math(self, task: Task, answer: str | None) -> float | None:
        seconds = self.config.maths_s
        try:
            for gold in task.gold:
                if await asyncio.to_thread(same_expression, answer, gold, seconds):
                    return 1.0
        except MathsUnsureError:
            return None
        return 0.0

    async def _code(self, task: Task, answer: str | None) -> float | None:
        tests = self._tests(task)
        program = program_of(answer) if answer is not None else None
        if program is None:
            return 0.0
        try:
            async with self._programs.here():
                return float((await run_tests(program, tests, self.config.code)).passed)
        except SandboxError:
            return None

    def _tests(self, task: Task) -> Tests:
        question = str(task.metadata.get("question_id") or "")
        if self.config.private_tests and question:
            private = load_private_tests(self.config.private_tests, question)
            if private is not None:
                return private
        return tests_of(task.gold)


def opened(task: Task, answer: str | None) -> str | None:
    """The answer; of the code protocol, what is in the box."""
    if answer is not None and split_level(task.protocol)[0] == "code":
        return parse_boxed(answer) or answer
    return answer


def _no_generators() -> UserError:
    return missing("grading of arithmetic tasks", "reasoning-gym", "tasks")


def generator_score(task: Task, answer: str | None) -> float:
    """1.0 if the generator of a reasoning-gym task fully accepts the answer.

    Raises:
        UserError: the package that generated the task and checks it is gone.
    """
    if answer is None:
        return 0.0
    try:
        import reasoning_gym
    except ImportError:
        raise _no_generators() from None
    scorer = reasoning_gym.get_score_answer_fn(task.metadata["generator"])
    entry = {
        "question": task.question,
        "answer": task.gold[0],
        "metadata": task.metadata["generator_metadata"],
    }
    try:
        return float(scorer(answer.strip(), entry) >= 1.0)
    except Exception:  # some of its scorers choke on an answer that they cannot read: it is wrong
        return 0.0


@functools.cache
def _default() -> Graders:
    return Graders(GradersConfig())


def grade(task: Task, trajectory: Trajectory) -> Reward:
    """The reward of a finished trajectory under the default settings; see `Graders.grade`."""
    return _default()(task, trajectory)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, in a thread of its own where an event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
