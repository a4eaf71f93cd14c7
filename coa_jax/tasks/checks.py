"""Checks tasks when they are loaded.

A task whose answers cannot be graded is rejected with a message that names its file and row.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from coa_jax.config.extensions import ExtensionKind
from coa_jax.config.installed import missing
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted
from coa_jax.protocol import TOOL_FORMS, get_protocol, parse_boxed, split_level
from coa_jax.tasks.base import Task
from coa_jax.tasks.code_tests import Tests, read_tests
from coa_jax.tasks.foreign_rewards import as_reward
from coa_jax.tasks.grading import parse_number
from coa_jax.tasks.maths import is_expression
from coa_jax.tools.base import Tool

REWARDS = ExtensionKind(
    "reward",
    "coa_jax.rewards",
    {
        "exact_match": "coa_jax.tasks.rewards:exact_match",
        "math": "coa_jax.tasks.rewards:math",
        "code": "coa_jax.tasks.rewards:code",
        "judge": "coa_jax.tasks.rewards:judge",
        "reasoning_gym": "coa_jax.tasks.rewards:generator",
        "format": "coa_jax.tasks.rewards:obeyed_format",
        "environment": "coa_jax.tasks.rewards:environment",
        "f1": "coa_jax.tasks.release_rewards:f1",
        **{
            name: f"coa_jax.tasks.rewards:{name}"
            for name in ("mhqa_train", "mhqa_eval", "qa_em", "qa_subem")
        },
    },
    offers=("task", "trajectory", "trajectories", "question", "answer", "gold", "text", "graders"),
    needs=("trajectory", "trajectories", "answer", "text"),
    adapt=as_reward,
)
"""The setting for a reward, which is a function that returns a number or None.

None means that there is no verdict; the trajectory is then masked. The function may be
asynchronous. It gets its arguments by the names of its parameters:

* ``task``, ``question`` and ``gold``: the task, its question and its accepted answers,
* ``trajectory``, ``answer`` and ``text``: the finished trajectory, its answer ("" if the policy
  gave none) and its whole text,
* ``trajectories``: all samples of the task. The function then returns one number per sample.
* ``graders``: the `Graders` of the run.

Functions with the signatures of TRL and verl are rewards too, see `foreign_rewards`.

The key ``grader`` in the metadata of a task names its reward, see `coa_jax.tasks.graders`.
"""

_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile("[A-Za-z]{3,}")
_FORMULA = re.compile(r"[0-9\\+*/^=<>|]|\A\W*[A-Za-z]\W*\Z")


def checked(task: Task) -> Task:
    """Checks that the accepted answers of a task from a file can be used for grading.

    Returns:
        The task. A task of the protocol ``code`` that names no reward gets the reward ``code`` or
        ``math`` in its metadata, depending on its accepted answers.

    Raises:
        ValueError: the accepted answers cannot be used. The message says why, and how to correct
            the file.
    """
    task.id.encode(), task.question.encode(), [text.encode() for text in task.gold]
    try:
        jsonl.dumps(task.metadata)
    except TypeError as error:
        raise ValueError(f"the metadata is not JSON: {error}") from error
    if "scorer" in task.metadata:
        _check_scorer(task)
        return task
    grader = task.metadata.get("grader")
    if grader is None and split_level(task.protocol)[0] == "code":
        grader = _grader_of(task.gold)
        task = dataclasses.replace(task, metadata={**task.metadata, "grader": grader})
    if grader is not None and not (isinstance(grader, str) and REWARDS.knows(grader)):
        graders = ", ".join(REWARDS.names())
        # Paths such as package.module:name are refused: a data file must not import code.
        raise ValueError(f"the grader {grader!r} is unknown; known are {graders}")
    if grader == "math" and not all(map(is_expression, task.gold)):
        raise ValueError("an accepted answer contains no expression that can be compared")
    # A question with an id may have its tests in the folder of private tests instead of the row.
    if grader == "code" and not task.metadata.get("question_id"):
        tests_of(task.gold)
    return task


def warn_of_tools(tools: Sequence[Tool], tasks: Iterable[Task]) -> None:
    """Logs a warning if the policy cannot call a tool, because no protocol of the tasks names it.

    Built-in tools are not checked.

    Args:
        tools: the tools that the run gives to the policy.
        tasks: the tasks of the run, each with its protocol.
    """
    protocols = sorted({task.protocol for task in tasks})
    callable_tools = {*TOOL_FORMS, *(tag for name in protocols for tag in get_protocol(name).tools)}
    if unreachable := [tool.name for tool in tools if tool.name not in callable_tools]:
        logging.warning(
            "the policy cannot call %s: the tasks have the protocol %s, which does not contain "
            "this tool; set tools.protocol=NAME, and let the tasks name this protocol "
            "(FILE.jsonl:protocol=NAME)", ", ".join(unreachable), ", ".join(protocols)
        )  # fmt: skip


def check_tools(tasks: Iterable[Task], names: Sequence[str], tags: Iterable[str]) -> None:
    """Checks that the run has at least one tool of each protocol of its tasks.

    Without such a tool, every tool call of the policy would fail.

    Args:
        tasks: the tasks of the run, each with its protocol.
        names: names of the tools of the run, used in the error message.
        tags: tags to which the tools or the environment of the run respond.

    Raises:
        UserError: a protocol has tools, and the run has none of them.
    """
    protocols = [get_protocol(name) for name in dict.fromkeys(task.protocol for task in tasks)]
    calls = [
        f"the protocol {protocol.name} calls {', '.join(protocol.tools)}"
        for protocol in protocols
        if protocol.tools and not {*protocol.tools} & {*tags}
    ]
    if calls:
        which = ", ".join(names) or "no tools"
        raise UserError(f"{'; '.join(calls)}, of which there are none in {which}")


def tests_of(gold: tuple[str, ...]) -> Tests:
    """Reads the tests of a code task from its accepted answer, which contains them as JSON.

    Raises:
        ValueError: the accepted answer contains no tests.
    """
    try:
        value = untrusted.parse_json(gold[0] if gold else "")
        if not isinstance(value, Mapping):
            raise ValueError(f"expected an object, found {type(value).__name__}")
        return read_tests(value)
    except untrusted.MALFORMED as error:
        raise ValueError(f"the tests cannot be read: {untrusted.reason(error)}") from error


def reasoning_gym() -> Any:
    """Imports and returns the optional package reasoning-gym.

    Raises:
        UserError: the package is not installed.
    """
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        raise missing("arithmetic", "reasoning-gym", "tasks") from None


def compares_texts(name: str) -> bool:
    """Returns whether a reasoning-gym generator scores answers only by comparing two texts.

    If False, its scorer must run in the sandbox.
    """
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    return name in DATASETS and DATASETS[name][0].score_answer is ProceduralDataset.score_answer


def _grader_of(gold: tuple[str, ...]) -> str:
    """Returns the reward for a task of the protocol ``code``, chosen by its accepted answers."""
    if gold[0].startswith("{"):
        tests_of(gold)
        return "code"
    if all(map(_is_formula, gold)):
        return "math"
    raise ValueError(
        "the protocol 'code' answers with programs or formulas, and the accepted answer is neither "
        'tests nor a number or formula; give "metadata": {"grader": NAME} with one of '
        + ", ".join(REWARDS.names())
    )


def _is_formula(text: str) -> bool:
    boxed = parse_boxed(text)
    if boxed is not None or parse_number(text) is not None:
        return True
    return bool(_FORMULA.search(text)) and not _WORD.search(_COMMAND.sub(" ", text))


def _check_scorer(task: Task) -> None:
    for key in ("scorer", "generator"):
        if not isinstance(task.metadata.get(key), str):
            raise ValueError(f"metadata.{key} must be a string")
    if not isinstance(task.metadata.get("generator_metadata"), dict):
        raise ValueError("metadata.generator_metadata must be an object")
    if task.metadata["scorer"] != "reasoning_gym":
        raise ValueError(f"the scorer {task.metadata['scorer']!r} is unknown: use reasoning_gym")
