"""Checks the judge, tests and servers of a run before the first sample.

Otherwise a run might sample for hours before its first answer reveals that one is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import Task
from coa_jax.tasks.graders import GradersConfig
from coa_jax.tasks.private_tests import find_private_tests, load_private_tests
from coa_jax.tools.make import ToolsConfig
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.reach import Finding, chat_answers, finding, findings

_NAMED = 3
"""Number of questions without tests that a message lists."""


def look(
    seconds: float,
    *,
    tasks: Sequence[Task] = (),
    graders: GradersConfig | None = None,
    tools: ToolsConfig | None = None,
    answered: Collection[str] = (),
    chats: Mapping[str, ChatConfig] | None = None,
    made: bool = False,
) -> list[Finding]:
    """Checks concurrently everything that a run depends on.

    Args:
        seconds: time limit of each server's answer; 0 checks nothing.
        tasks: tasks to run or grade; if empty, a configured judge is always checked.
        graders: settings of the graders; None if nothing is left to grade.
        tools: settings of the run's tools; None if nothing is left to run.
        answered: tags that an environment answers.
        chats: further chat endpoints, by the setting that names them.
        made: whether the tools have been created, see `findings`.
    """
    if not seconds:
        return []
    found = [*_protocols(tasks, tools, answered), *_tests(tasks, graders)]
    chats = dict(chats or {})
    if graders and graders.judge and (not tasks or any(asks_judge(graders, t) for t in tasks)):
        chats["graders.judge.chat"] = graders.judge.chat

    async def ask() -> list[Finding]:
        asked = [finding(name, chat_answers(chat, seconds)) for name, chat in chats.items()]
        servers = findings(tools or ToolsConfig(names=()), seconds, made=made)
        models, tags = await asyncio.gather(asyncio.gather(*asked), servers)
        return [*models, *tags]

    return [*found, *asyncio.run(ask())]


def check_ready(found: Iterable[Finding]) -> None:
    """Raises an error if something that `look` checked is missing.

    Raises:
        UserError: something is missing; the one-line message lists everything.
    """
    missing = [each for each in found if not each.ok]
    if missing:
        listed = "; ".join(f"{each.name}: {each.text}" for each in missing)
        raise UserError(f"not ready: {listed}; fix this, or start anyway with --config.probe_s=0")


def asks_judge(graders: GradersConfig, task: Task) -> bool:
    """Returns whether a configured judge grades the answers to a task."""
    grader = task.metadata.get("grader", "exact_match")
    words = grader in ("exact_match", "judge") and task.metadata.get("scorer") != "reasoning_gym"
    return words and (grader == "judge" or graders.judge_all)


def _protocols(
    tasks: Sequence[Task], tools: ToolsConfig | None, answered: Collection[str]
) -> list[Finding]:
    """Finds protocols for which the run has no tools, so that each of their calls would fail."""
    if tools is None:
        return []
    wanted = {name: get_protocol(name).tools for name in dict.fromkeys(t.protocol for t in tasks)}
    return [
        Finding("tools.names", False, f"the protocol {name} calls {', '.join(tags)}, of which there"
                f" are none in {', '.join(tools.names) or 'no tools'}")
        for name, tags in wanted.items()
        if tags and not set(tags) & {*tools.tags, *answered}
    ]  # fmt: skip


def _tests(tasks: Sequence[Task], graders: GradersConfig | None) -> list[Finding]:
    """Finds missing private tests, which public sample tests would silently replace."""
    if graders is None or not graders.private_tests:
        return []
    ids = [str(task.metadata.get("question_id") or "") for task in tasks]
    ids = [name for name in ids if name]
    try:
        absent = [name for name in ids if find_private_tests(graders.private_tests, name) is None]
        if ids and not absent:
            load_private_tests(graders.private_tests, ids[0])
    except UserError as error:
        return [Finding("graders.private_tests", False, str(error))]
    if not absent:
        return []
    shown = ", ".join(absent[:_NAMED]) + (", ..." if len(absent) > _NAMED else "")
    of = f"{len(absent)} of {len(ids)} questions ({shown})"
    text = f"{graders.private_tests} has no tests for {of}"
    return [Finding("graders.private_tests", False, text)]
