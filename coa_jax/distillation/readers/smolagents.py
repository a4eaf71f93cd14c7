"""Reads the steps of smolagents agents, one run per file or per line.

docs/data.md shows the three accepted forms. One of them has the field ``managed_runs``, which lists
the runs of managed agents in the order in which they were made.

The format lacks white space around tool results, which smolagents strips, and images.

A record is rejected if a source of the manager's knowledge is missing. This is so in these cases:

- The manager asks managed agents, but the record has no ``managed_runs``. A manager does not store
  the steps of its agents.
- A program uses values that the run was given (``additional_args``).
- A program uses a tool in another way than by a single call with literal arguments.

A record is also rejected if its parts cannot be separated:

- A run answered several questions with one memory (``agent.run(..., reset=False)``).
- A program asks a managed agent and also computes, because one observation contains both results.
- A step makes parallel calls, because ``observations`` mixes their results. ``max_tool_threads``
  does not help, so ask the model for one call at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from coa_jax.distillation.readers import programs
from coa_jax.distillation.readers.base import Conversation, Field, Malformed, Trace, total_usage
from coa_jax.distillation.readers.programs import StepProgram
from coa_jax.distillation.readers.tool_calls import tag_of

_Call = tuple[str, Field]
"""The name of a tool, and the arguments of its call."""


def read_run(record: Any) -> Trace:
    """Converts a run of smolagents agents (a JSON value) to a trace.

    Raises:
        Malformed: the record cannot be converted; the message says why.
    """
    fields = Field({"steps": record} if isinstance(record, list) else record)
    steps = _steps(fields["steps"])
    managed = fields.get("managed_runs")
    runs: dict[int, list[Field]] = {}
    every = list(steps)
    for run in managed.items("managed run") if managed.value else ():
        caller = run["caller_step"].value
        if not isinstance(caller, int):
            raise Malformed(f"'caller_step' of {run} is not a number")
        runs.setdefault(caller, []).append(run)
        every += _steps(run["steps"])
    agents = {str(run.get("agent").value) for group in runs.values() for run in group}
    tasks = [step["task"].value for step in steps if "task" in step.mapping()]
    talk = Conversation(
        Field(fields.get("question").value or (tasks or [None])[0], "the task").text()
    )
    answer = _write(talk, steps, runs, agents)
    if runs:
        raise Malformed(f"a managed run belongs to step {next(iter(runs))}, which is not there")
    final = next(filter(None, (fields.get("answer"), fields.get("output"), answer)), Field(None))
    talk.answer(final.optional_scalar().strip())
    usage = total_usage(
        (step.get("token_usage").value for step in every), "input_tokens", "output_tokens"
    )
    state = fields.get("state").value
    log = talk.finish(fields.get("task_id").optional_scalar(), fields.get("error").optional_text())
    metadata = {"state": state} if isinstance(state, str) else {}
    return Trace(log, fields.get("gold").answers(), metadata, usage=usage)


def is_record(value: Any) -> bool:
    """Returns whether a JSON value has the steps of a run of smolagents."""
    steps = value.get("steps") if isinstance(value, dict) else value
    return isinstance(steps, list) and any(map(is_step, steps))


def is_step(value: Any) -> bool:
    """Returns whether a JSON value is a numbered step of a run."""
    return isinstance(value, dict) and "step_number" in value


def is_run(values: Iterable[Any]) -> bool:
    """Returns whether the items of a JSON list are steps of a single run, and not several runs."""
    return not all(isinstance(v, list) or (isinstance(v, dict) and "steps" in v) for v in values)


def _steps(field: Field) -> list[Field]:
    """Returns the steps of an agent, each with its number as the name."""
    steps = field.items("step")
    return [
        Field(s.value, f"step {s.mapping().get('step_number', n)}") for n, s in enumerate(steps)
    ]


def _write(
    talk: Conversation,
    steps: Sequence[Field],
    runs: dict[int, list[Field]],
    agents: Collection[str],
) -> Field:
    """Adds the steps of one agent, and removes the managed runs that they asked for from `runs`.

    Returns:
        The answer of the agent; null if the agent gave no answer.
    """
    if sum("task" in step.mapping() for step in steps) > 1:  # agent.run(..., reset=False)
        raise Malformed("a second task in the same memory: give each run a record of its own")
    answer = Field(None)
    calls = [_calls(step) for step in steps]
    analyses = programs.examine_all(map(_source, calls), agents)
    for step, made, program in zip(steps, calls, analyses, strict=True):
        keys = step.mapping().keys()
        if "plan" in keys:
            survey = programs.unwrap(step.get("facts").optional_text())
            facts, plan = programs.split_plan(step["plan"].text())
            talk.plan(plan, survey, facts)
        elif "step_number" in keys:
            number = step["step_number"].value
            mine = runs.pop(number, []) if isinstance(number, int) else []
            if program is None:
                _tools(talk, step, made, mine, agents)
            else:
                _program(talk, step, program, mine)
            if step.get("is_final_answer").value:
                answer = step.get("action_output")
        elif not keys & {"task", "system_prompt"}:
            raise Malformed(f"{step} is neither task, plan nor action")
    return answer


def _calls(step: Field) -> list[_Call]:
    calls = step.get("tool_calls")
    if "plan" in step.mapping() or "step_number" not in step.mapping() or not calls.value:
        return []
    return [programs.function_of(call) for call in calls.items(f"{step}, call")]


def _source(calls: Sequence[_Call]) -> str | None:
    """Returns the program of a CodeAgent's step; None for a step of a ToolCallingAgent."""
    if len(calls) != 1 or calls[0][0] != "python_interpreter":
        return None
    arguments = calls[0][1]
    return None if isinstance(arguments.value, dict) else arguments.text()


def _program(talk: Conversation, step: Field, program: StepProgram, runs: Sequence[Field]) -> None:
    if not runs and not program.requests:
        programs.add_step(talk, step, program, _thought(step))
    elif program.adds:
        raise Malformed(f"{step} asks a managed agent and does something besides")
    else:
        _delegations(talk, step, len(program.requests), runs)


def _tools(
    talk: Conversation,
    step: Field,
    calls: Sequence[_Call],
    runs: Sequence[Field],
    agents: Collection[str],
) -> None:
    """Adds a step of a ToolCallingAgent."""
    thought, (output, error) = _thought(step), programs.outcome_of(step)
    calls = [call for call in calls if call[0] != "final_answer"]
    agent_calls = sum(name in agents for name, _ in calls)
    if len(calls) > 1 and agent_calls < len(calls):
        raise Malformed(f"{step} makes {len(calls)} calls at once and keeps one observation")
    if runs and not agent_calls:
        raise Malformed(f"{step} asks no managed agent, and a managed run belongs to it")
    if agent_calls:
        _delegations(talk, step, agent_calls, runs)
        return
    for name, field in calls:
        arguments = field.value
        source = arguments.get("code") if isinstance(arguments, dict) else None
        if tag_of(name) == "code" and isinstance(source, str):
            program = programs.examine(source, ())
            arguments = {**arguments, "code": programs.runnable(program)}
        returned = "\n".join(filter(None, (output, error)))
        talk.call(name, arguments, returned, not error, thought)
    if not calls:
        talk.add_thought(thought)


def _delegations(talk: Conversation, step: Field, agent_calls: int, runs: Sequence[Field]) -> None:
    """Adds the managed runs that a step asked for, of which a failed step may lack some."""
    _, error = programs.outcome_of(step)
    if len(runs) < agent_calls and not error:
        raise Malformed(f"{step} asks a managed agent whose run is not in the file")
    thought = _thought(step)
    if not runs:  # the step failed before it asked an agent
        talk.add_thought(thought)
    for run in runs:
        talk.ask(run["task"].text(), thought)
        thought = ""
        _write(talk, _steps(run["steps"]), {}, ())
        talk.add_thought(run.get("answer").optional_scalar())


def _thought(step: Field) -> str:
    output = step.get("model_output")
    if not isinstance(output.value, list):
        return programs.thought_of(output.optional_text())
    parts = [part.get("text").value for part in output.items(f"{step}, part")]
    return programs.thought_of("\n".join(part for part in parts if isinstance(part, str)))
