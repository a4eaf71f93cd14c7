"""Checks the judge, the tests of programs and the servers of a run before the first sample.

Without these checks, a run could sample for hours before the first answer shows that, for example,
the judge does not respond.
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
from coa_jax.tools.net.chat import ChatConfig, chat_answers
from coa_jax.tools.preflight import Finding, finding, findings

_NAMED = 3
"""Maximum number of questions without tests that a message lists."""


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
    """Checks the tools, chat endpoints, judge and tests that a run depends on.

    All servers are checked concurrently.

    Args:
        seconds: time limit for the reply of each server. With 0 nothing is checked.
        tasks: tasks to run or grade. A configured judge is checked if it grades one of these tasks,
            or if there are no tasks.
        graders: settings of the graders; None if the run has no answer to grade.
        tools: settings of the tools; None if the run has no task to solve.
        answered: tool tags that the environment answers, so that no tool is necessary.
        chats: setting name -> further chat endpoint to check.
        made: whether the tools of the run exist already, see `findings`.

    Returns:
        One `Finding` per check, with the result.
    """
    if not seconds:
        return []
    found = [*_protocols(tasks, tools, answered), *_tests(tasks, graders)]
    chats = dict(chats or {})
    if graders and graders.judge and (not tasks or "judge" in map(graders.measure, tasks)):
        chats["graders.judge.chat"] = graders.judge.chat

    async def ask() -> list[Finding]:
        asked = [finding(name, chat_answers(chat, seconds)) for name, chat in chats.items()]
        servers = findings(tools or ToolsConfig(names=()), seconds, made=made)
        models, tags = await asyncio.gather(asyncio.gather(*asked), servers)
        return [*models, *tags]

    return [*found, *asyncio.run(ask())]


def check_ready(found: Iterable[Finding]) -> None:
    """Refuses to start a run if a check of `look` failed.

    Raises:
        UserError: at least one check failed. The message lists all failed checks in one line.
    """
    missing = [each for each in found if not each.ok]
    if missing:
        listed = "; ".join(f"{each.name}: {each.text}" for each in missing)
        raise UserError(f"not ready: {listed}; fix this, or start anyway with --config.probe_s=0")


def _protocols(
    tasks: Sequence[Task], tools: ToolsConfig | None, answered: Collection[str]
) -> list[Finding]:
    """Finds protocols none of whose tools the run has, so that each tool call would fail."""
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
    """Finds questions without private tests.

    Without this check, such questions would be graded with their public sample tests.
    """
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
