"""Defines the built-in rewards, each as a function that is called like a custom reward.

The names of the parameters of a function determine its arguments, see
`coa_jax.tasks.checks.REWARDS` and docs/extending.md.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coa_jax.data.trajectory import Author, Reward, Trajectory, format_valid
from coa_jax.errors import UserError
from coa_jax.sandbox.run import SandboxError
from coa_jax.tasks import gym_score, release_rewards
from coa_jax.tasks.base import Task
from coa_jax.tasks.checks import compares_texts, reasoning_gym, tests_of
from coa_jax.tasks.code_tests import Tests, program_of, run_tests
from coa_jax.tasks.grading import grade_answer
from coa_jax.tasks.maths import MathsUnsureError, same_expression
from coa_jax.tasks.private_tests import load_private_tests
from coa_jax.tools.code_libraries import isolation_here
from coa_jax.tools.isolated import isolated_workers
from coa_jax.tools.worker import WorkerBusyError, WorkerError, Workers

if TYPE_CHECKING:
    from coa_jax.tasks.graders import Graders, GradersConfig

_SCORE_S = 10.0
"""Limit on the processor time of a scorer of reasoning-gym; beyond it, the answer is wrong."""

_MATHS_S = 10.0
"""Limit on the processor time for comparing two expressions; beyond it, the answer is wrong."""


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """Returns 1.0 if an answer equals an accepted answer after normalisation, else 0.0.

    An empty answer is wrong. `grade_answer` explains the comparison.
    """
    return grade_answer(answer, gold)


def obeyed_format(trajectory: Trajectory) -> float:
    """Returns 1.0 if a trajectory obeys the rules of its protocol, else 0.0."""
    return float(format_valid(trajectory))


def _of_policy(reward: Callable[[str, Sequence[str]], float]) -> Callable[..., float]:
    """Returns a reward of `release_rewards` that reads only what the policy wrote.

    The release reads the whole text, so an ``<answer>`` in an observation counts as the answer.
    """

    def graded(trajectory: Trajectory, gold: Sequence[str]) -> float:
        spans = trajectory.segments
        return reward("".join(s.text for s in spans if s.author == Author.POLICY), gold)

    return graded


mhqa_train = _of_policy(release_rewards.mhqa_train)
mhqa_eval = _of_policy(release_rewards.mhqa_eval)
qa_em = _of_policy(release_rewards.qa_em)
qa_subem = _of_policy(release_rewards.qa_subem)


def environment(trajectory: Trajectory) -> float:
    """Returns the sum of the rewards that the environment gave for the turns of a trajectory."""
    return float(sum(call.reward or 0.0 for call in trajectory.tool_calls))


async def judge(task: Task, trajectory: Trajectory, answer: str, graders: Graders) -> float | None:
    """Grades an answer with the judge, a language model: 1.0 if right, and 0.0 if wrong.

    A trajectory without an answer scores 0.0. The result is None if the judge gives no verdict.

    Args:
        task: the task, with question and accepted answers.
        trajectory: the finished trajectory.
        answer: answer of the policy.
        graders: graders of the run, which hold the judge.

    Raises:
        UserError: no judge is configured.
    """
    if graders.judge is None:
        raise UserError("there is no judge: graders.judge.chat.url is empty")
    if trajectory.answer is None:
        return 0.0
    verdict = await graders.judge(task.question, task.gold, answer)
    return None if verdict is None else float(verdict)


async def math(task: Task, trajectory: Trajectory, graders: Graders) -> float | None:
    """Grades a mathematical answer: 1.0 if it equals an accepted expression, else 0.0.

    The result is None if the comparison itself fails, for example because all processes for
    comparisons are busy.

    Args:
        task: the task, with the accepted expressions.
        trajectory: the finished trajectory.
        graders: graders of the run, which hold the limits of comparisons.
    """
    try:
        for gold in task.gold:
            if await asyncio.to_thread(same_expression, trajectory.answer, gold, _MATHS_S):
                return 1.0
    except MathsUnsureError:
        return None
    return 0.0


async def code(task: Task, trajectory: Trajectory, graders: Graders) -> float | Reward | None:
    """Grades a program: 1.0 if the program in the answer passes all tests of the task, else 0.0.

    The result is None if the sandbox fails. If some tests can be passed by cheating, the result is
    a reward with the number of these tests as the part ``cheatable``.

    Args:
        task: the task, with the tests.
        trajectory: the finished trajectory.
        graders: graders of the run, which hold the limits of programs.
    """
    tests = _tests(task, graders.config)
    program = program_of(trajectory.answer) if trajectory.answer is not None else None
    if program is None:
        return 0.0
    try:
        async with graders.programs.semaphore():
            outcome = await run_tests(program, tests, graders.config.code)
    except SandboxError:
        return None
    value = float(not outcome.why)
    return Reward(value, {"cheatable": float(outcome.cheatable)}) if outcome.cheatable else value


def _tests(task: Task, config: GradersConfig) -> Tests:
    question = str(task.metadata.get("question_id") or "")
    private = config.private_tests and question
    tests = load_private_tests(config.private_tests, question) if private else None
    return tests or tests_of(task.gold)


async def generator(task: Task, trajectory: Trajectory) -> float | None:
    """Returns 1.0 if the generator of a reasoning-gym task fully accepts the answer, else 0.0.

    Scorers that do more than compare texts run in the sandbox, because some of them evaluate the
    answer as code. The result is None if the sandbox is too busy.

    Raises:
        UserError: the package reasoning-gym is not installed, or no sandbox works here.
    """
    answer = task.unboxed(trajectory.answer)
    if answer is None:
        return 0.0
    name = task.metadata["generator"]
    entry = {
        "question": task.question,
        "answer": task.gold[0],
        "metadata": task.metadata["generator_metadata"],
    }
    if compares_texts(name):
        return float(reasoning_gym().get_score_answer_fn(name)(answer.strip(), entry) >= 1.0)
    if _CODE.search(answer):
        return 0.0
    ask = functools.partial(_scorers().ask, timeout=_SCORE_S, wait=6 * _SCORE_S)
    try:
        return float(await asyncio.to_thread(ask, name, answer.strip(), entry) >= 1.0)
    except WorkerBusyError:
        return None
    except WorkerError:
        return 0.0


@functools.cache
def _scorers() -> Workers:
    return isolated_workers(
        "coa_jax.tasks.gym_score:score",
        isolation_here(),
        gym_score.PACKAGES,
        warm_up="import reasoning_gym",
    )


_NUMBERS = {"abs", "complex", "divmod", "float", "int", "max", "min", "pow", "round", "sum"}
_FUNCTIONS = sorted({name for name in dir(builtins) if name.islower()} - _NUMBERS)
_CODE = re.compile(rf"__|\b(?:import|lambda)\b|\b(?:{'|'.join(_FUNCTIONS)})\s*\(")
"""Matches what no answer needs and what code needs to change the scorer that evaluates it."""
