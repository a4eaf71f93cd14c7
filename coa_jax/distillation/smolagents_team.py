"""Runs a teacher that consists of two smolagents agents and resembles the paper's teacher.

The agents run in this process. A manager (CodeAgent) writes programs and asks a managed
``search_agent`` (ToolCallingAgent), which has the tools of the run. The result of a run is the
memory of the agents, in the form that `readers.smolagents` reads. The programs of the manager run
in the interpreter of smolagents, not in the sandbox of this project. With the tool ``code``, the
search agent can run programs in the sandbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from coa_jax.config.installed import missing
from coa_jax.distillation.endpoint import REFUSED_REQUEST
from coa_jax.distillation.readers.tool_calls import body_of
from coa_jax.errors import UserError
from coa_jax.protocol import TOOL_FORMS
from coa_jax.protocol.arguments import arguments_of
from coa_jax.tasks.base import Task
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.net.secrets import redact_all

AGENT = "search_agent"

REFUSED = "request_refused"
"""State of a run that ended because the endpoint refused a request."""


def smolagents_package() -> Any:
    """Imports and returns the package smolagents.

    Raises:
        UserError: the package is not installed.
    """
    try:
        import smolagents
    except ImportError:
        raise missing("this teacher", "smolagents", "distill") from None
    return smolagents


def as_smolagents_tool(tool: Tool, episode: str) -> Any:
    """Wraps a tool as a smolagents tool with the same name, argument and result.

    Args:
        tool: a tool of this package.
        episode: id of the run, which the tool receives in the context of each call.

    Raises:
        UserError: smolagents is not installed, or there is no description of the tool.
    """
    if tool.name not in TOOL_FORMS:
        described = ", ".join(TOOL_FORMS)
        raise UserError(f"smolagents: {tool.name} has no description; known are {described}")
    argument, about = next(iter(arguments_of(tool.name).items()))
    history: list[tuple[str, str]] = []

    def forward(self: Any, *positional: str, **arguments: str) -> str:
        # A ToolCallingAgent passes the argument by name; the program of a CodeAgent may not.
        body = body_of(tool.name, {**dict(zip((argument,), positional, strict=False)), **arguments})
        context = ToolContext(episode, len(history), None, tuple(history))
        history.append((tool.name, body))
        return asyncio.run(call_tool(tool, body, context)).text

    attributes = {
        "name": tool.name,
        "description": about,
        "inputs": {argument: {"type": "string", "description": about}},
        "output_type": "string",
        "skip_forward_signature_validation": True,
        "forward": forward,
    }
    return type("OurTool", (smolagents_package().Tool,), attributes)()


def solve_with_smolagents(
    task: Task,
    tools: Mapping[str, Tool],
    manager_model: Any,
    search_model: Any,
    max_steps: int = 12,
    planning_interval: int | None = None,
) -> dict[str, Any]:
    """Lets the manager and the search agent solve one task.

    Args:
        task: the task. Its gold answer is stored with the run, but no agent sees it.
        tools: tools of the search agent, by name.
        manager_model, search_model: model objects of smolagents, for example
            ``smolagents.OpenAIModel(...)`` for an endpoint.
        max_steps: maximum number of steps of each agent.
        planning_interval: number of steps after which the manager makes a new plan; None if it
            makes no plans.

    Returns:
        The run as a JSON object with the task, the answer, the steps of the manager, and the runs
        of the search agent. Each run of the search agent has the number of the manager's step that
        started it. If the endpoint refused a request, for example because the context was too long,
        the run has the state ``request_refused``, no answer, and the endpoint's message in
        ``error``.

    Raises:
        UserError: smolagents is not installed.
    """
    smolagents = smolagents_package()
    runs: list[dict[str, Any]] = []

    class SearchAgent(smolagents.ToolCallingAgent):  # type: ignore[name-defined]
        """A smolagents agent that stores the steps of each run, which the next run overwrites."""

        def __call__(self, task: str, **settings: Any) -> Any:
            try:
                return super().__call__(task, **settings)
            finally:
                steps = _plain(self.memory.get_succinct_steps())
                answer = next((s["action_output"] for s in steps if s.get("is_final_answer")), None)
                run = {"agent": AGENT, "task": task, "caller_step": manager.step_number}
                runs.append({**run, "steps": steps, "answer": answer})

    quiet: dict[str, Any] = {"max_steps": max_steps, "verbosity_level": smolagents.LogLevel.OFF}
    searcher = SearchAgent(
        tools=[as_smolagents_tool(tool, task.id) for tool in tools.values()],
        model=search_model,
        name=AGENT,
        description="Looks things up and computes; give it one question in plain words.",
        **quiet,
    )
    manager = smolagents.CodeAgent(
        tools=[],
        model=manager_model,
        managed_agents=[searcher],
        planning_interval=planning_interval,
        **quiet,
    )
    try:
        result = manager.run(task.question, return_full_result=True)
        output, state, problem = result.output, result.state, ""
    except Exception as error:
        if not _is_refused(error):
            raise
        output, state, problem = None, REFUSED, redact_all(str(error))
    return {
        "task_id": task.id,
        "question": task.question,
        "gold": list(task.gold),
        "answer": None if output is None else str(output),
        "state": state,
        "error": problem,
        "steps": _plain(manager.memory.get_succinct_steps()),
        "managed_runs": runs,
    }


def _is_refused(error: BaseException | None) -> bool:
    """Returns whether an error, or its cause, says that an endpoint refused only this request."""
    if error is None:
        return False
    return getattr(error, "status_code", None) in REFUSED_REQUEST or _is_refused(error.__cause__)


def _plain(steps: Any) -> Any:
    """Converts steps to JSON values; objects that JSON lacks become strings."""
    return json.loads(json.dumps(steps, default=str))
