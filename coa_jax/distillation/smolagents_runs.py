"""Lets the smolagents teacher solve many tasks in threads, within a budget.

Finished runs are stored, so a killed command can continue.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.config.fields import Bounded, Count, Natural, Times
from coa_jax.config.preflight import Needs
from coa_jax.distillation.endpoint import EndpointConfig
from coa_jax.distillation.journal import check_fingerprint
from coa_jax.distillation.readers.base import total_usage
from coa_jax.distillation.smolagents_team import REFUSED, smolagents_package, solve_with_smolagents
from coa_jax.errors import UserError
from coa_jax.files import durable, jsonl
from coa_jax.tasks.base import Task
from coa_jax.tools.base import Tool
from coa_jax.tools.net.budget import BudgetTracker, Spent
from coa_jax.tools.net.secrets import redact_all


@dataclasses.dataclass(frozen=True)
class SmolConfig(Bounded):
    """Settings of the two smolagents agents, a manager and a search agent.

    Attributes:
        max_steps: maximum number of steps of each agent.
        planning_interval: number of steps after which the manager makes a new plan; 0 if it makes
            no plans.
        concurrency: number of tasks that are solved at the same time.
    """

    max_steps: Count = 12
    planning_interval: Natural = 6
    concurrency: Times = 8

    def needs(self) -> Needs:
        """Returns the optional dependencies (pip extra) that smolagents needs, see `Needs`."""
        return Needs(("distill",))


def endpoint_model(config: EndpointConfig) -> Any:
    """Returns a model object of smolagents for an endpoint.

    Raises:
        UserError: smolagents is not installed, or the settings are invalid.
    """
    config.check()
    return smolagents_package().OpenAIModel(
        model_id=config.model,
        api_base=config.url,
        api_key=os.environ.get(config.key_env) or "none",
        client_kwargs={"timeout": config.timeout_s, "max_retries": config.attempts - 1},
        **config.options,
    )


def bind_settings(path: Path, fingerprint: Mapping[str, Any]) -> None:
    """Stores the settings of runs next to their file, or checks them against the stored settings.

    Args:
        path: file of runs. If the file is missing or empty, the settings are stored. Otherwise they
            must equal the stored settings.
        fingerprint: settings on which runs depend (model, agents, tools), as JSON values.

    Raises:
        UserError: the file contains runs made with other settings, or the stored settings are
            missing.
    """
    head = path.with_suffix(".settings.json")
    now = jsonl.loads(jsonl.dumps(dict(fingerprint)))
    jsonl.append_lines(path, [])  # creates the file, or cuts an incomplete last line
    if not path.stat().st_size:
        durable.write_json(head, now)
    elif head.exists():
        check_fingerprint(path, durable.read_json_object(head), now)
    else:
        raise UserError(
            f"{path}: holds runs, but {head.name} beside it, which says how they were made, is "
            "missing; use a fresh --workdir, or move the file away (configs/distill/traces.py "
            "reads it with format=smolagents)"
        )


_PLAIN = "Which number comes after 1?"
"""A question that no content filter rejects."""


def run_smolagents(
    tasks: Sequence[Task],
    tools: Mapping[str, Tool],
    model_of: Callable[[Task, str], Any],
    path: Path,
    config: SmolConfig,
    limits: EndpointConfig,
    on_done: Callable[[int], None] | None = None,
    beside: Sequence[Path] = (),
) -> Spent:
    """Solves the tasks that a file of runs does not contain yet, and appends each run to the file.

    If the endpoint refuses a request of a run, the run ends without an answer. If this happens
    before any run of this process has finished normally, a setting may be wrong. To find out, the
    agents take one step on a plain question. The cost of this step is included in the result.

    Args:
        tasks: all tasks, also those that were solved before.
        tools: tools of the search agent, by name.
        model_of: function that takes a task and the name of an agent, ``"manager"`` or
            ``"search"``, and returns a model object of smolagents for this agent.
        path: file of runs, one per line, in the form that the reader ``smolagents`` reads.
        config: settings of the agents.
        limits: budget of tokens and money. It is checked before each task, so concurrent tasks can
            exceed it.
        on_done: function to call whenever a task is finished, with the number of finished tasks.
        beside: files of other runs, which need not exist. Their costs count against the same
            budget.

    Returns:
        The cost of all runs in the file, computed from the token counts in the file. Each step of
        an agent counts as one call.

    Raises:
        UserError: the budget is spent, or the endpoint cannot be used or refuses the plain
            question, too. Finished runs are kept.
    """
    import openai

    # What a step or a plan raises if the endpoint gives no reply.
    lost = smolagents_package().AgentGenerationError, openai.OpenAIError
    jsonl.append_lines(path, [])  # creates the file, or cuts an incomplete last line
    if limits.max_per_second:
        raise UserError(
            "config.endpoint.max_per_second does not apply to smolagents, which has a client of "
            "its own; set it to 0, and lower config.smolagents.concurrency instead"
        )
    runs = _Runs(path, tasks, limits, beside)
    usable = False  # in this process; earlier processes may have had other settings
    lock, stop = threading.Lock(), threading.Event()

    def solve(task: Task, max_steps: int) -> dict[str, Any]:
        models = model_of(task, "manager"), model_of(task, "search")
        interval = config.planning_interval or None
        return solve_with_smolagents(task, tools, *models, max_steps, interval)

    def check_settings(task: Task) -> None:
        trial = solve(dataclasses.replace(task, question=_PLAIN), 1)
        runs.count(trial)
        if trial["state"] == REFUSED:
            raise UserError(
                f"{task.id}: the endpoint refuses the model: {trial['error']}; fix the settings "
                "of the endpoint and run the same command again"
            )

    def work(task: Task) -> None:
        nonlocal usable
        if stop.is_set():
            return
        try:
            runs.tracker.check()
            dump = solve(task, config.max_steps)
            with lock:  # one plain question is enough
                if dump["state"] == REFUSED and not usable:
                    check_settings(task)
                usable = True
                jsonl.append_lines(path, [dump])
                runs.count(dump)
                if on_done is not None:
                    on_done(len(runs.done))
        except BaseException as error:
            stop.set()
            if not isinstance(error, lost):
                raise
            raise UserError(
                f"{task.id}: the model gave no reply ({redact_all(str(error))}); what is finished "
                "is kept: run the same command again to continue"
            ) from error

    with concurrent.futures.ThreadPoolExecutor(config.concurrency) as pool:
        jobs = [pool.submit(work, task) for task in tasks if task.id not in runs.done]
        try:
            for job in concurrent.futures.as_completed(jobs):
                job.result()
        finally:
            stop.set()  # after Ctrl-C, running tasks finish but no new task starts
    return runs.spent


class _Runs:
    """The cost of the runs in a file, their budget, and the ids of the tasks that they solved."""

    def __init__(
        self, path: Path, tasks: Sequence[Task], limits: EndpointConfig, beside: Sequence[Path]
    ):
        self.spent, self.done = Spent(), set[str]()
        self.tracker = BudgetTracker(limits, limits.model, "config.endpoint")
        self._questions = {task.id: task.question for task in tasks}
        for row in jsonl.read_lines(path, _dump):
            self.count(row)
        for other in filter(Path.exists, beside):
            for row in jsonl.read_lines(other, _dump, growing=True):
                _add(self.tracker.spent, row, self.tracker.price)

    def count(self, dump: dict[str, Any]) -> None:
        """Adds the cost of a run; its task is done, unless the run was asked another question."""
        for each in (self.spent, self.tracker.spent):
            _add(each, dump, self.tracker.price)
        if self._questions.get(dump["task_id"]) == dump["question"]:
            self.done.add(dump["task_id"])


def _add(spent: Spent, dump: dict[str, Any], price: tuple[float, float] | None) -> None:
    """Adds the cost of a run; each step of an agent counts as a call."""
    for step in (*dump["steps"], *(s for run in dump["managed_runs"] for s in run["steps"])):
        if step.get("model_output_message") is not None:
            usage = total_usage([step.get("token_usage")], "input_tokens", "output_tokens")
            counts = {name: usage.get(name) for name in ("prompt", "completion")}
            spent.add(counts, price)


@dataclasses.dataclass(frozen=True)
class _Dump:
    """The fields of a stored run from which a later process continues."""

    task_id: str
    question: str
    steps: list[Any]
    managed_runs: list[Any]


def _dump(row: Any) -> dict[str, Any]:
    dump = jsonl.fields(_Dump, row)
    _add(Spent(), dump, None)  # invalid counts raise an error here, where the line is known
    return dump
