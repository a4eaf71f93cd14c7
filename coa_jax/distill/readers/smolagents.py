"""Reads the steps of smolagents agents, one run per file or per line.

docs/data.md shows the three accepted forms.

``managed_runs`` lists the runs of managed agents in the order in which they were made.

The format lacks:

- runs of several questions with one memory, by ``agent.run(..., reset=False)`` (the record is
  rejected);
- the steps of managed agents, unless ``managed_runs`` is present, because a manager does not store
  them. A record without them is rejected, because the source of the manager's knowledge would be
  missing. For the same reason a record is rejected if a program uses values that the run was given
  (``additional_args``), or uses tools in another way than by a single call with literal arguments;
- separate results of a program that asks a managed agent and also computes, because one observation
  contains both (the record is rejected);
- separate results of parallel calls in one step, because ``observations`` mixes them (the record is
  rejected; ``max_tool_threads`` does not help, so ask the model for one call at a time);
- white space around tool results, which smolagents strips;
- images.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from coa_jax.distill.messages import Kind
from coa_jax.distill.readers.base import (
    Conversation,
    Malformed,
    Reader,
    Trace,
    accepted,
    each_line,
    error_of,
    items,
    mapping,
    need,
    optional_text,
    scalar,
    text,
    total_usage,
)
from coa_jax.distill.readers.calls import body_of, tag_of
from coa_jax.distill.readers.programs import (
    Program,
    examine,
    examine_all,
    importing,
    split_plan,
    tell,
    thought_of,
    unwrap,
)


def read_run(value: Any) -> Trace:
    """Converts the JSON value of one run to a trace."""
    record = {"steps": value} if isinstance(value, list) else mapping(value, "the record")
    steps = _steps(need(record, "steps"))
    managed = items(record.get("managed_runs") or [], "'managed_runs'")
    runs: dict[int, list[dict[str, Any]]] = {}
    for run in (mapping(run, "a managed run") for run in managed):
        caller = need(run, "caller_step", "a managed run")
        if not isinstance(caller, int):
            raise Malformed("'caller_step' of a managed run is not a number")
        runs.setdefault(caller, []).append(run)
    tasks = [step["task"] for step in steps if "task" in step]
    question = text(record.get("question") or (tasks or [None])[0], "the task")
    talk = Conversation(question)
    agents = {str(run.get("agent")) for group in runs.values() for run in group}
    answer = _write(talk, steps, runs, agents)
    if runs:
        raise Malformed(f"a managed run belongs to step {next(iter(runs))}, which is not there")
    given = next((record[k] for k in ("answer", "output") if record.get(k) is not None), answer)
    if given is not None:
        talk.add(Kind.ANSWER, "manager", "user", scalar(given, "the answer").strip())
    identity = record.get("task_id")
    episode = "" if identity is None else scalar(identity, "'task_id'")
    every = [*steps, *(s for r in managed for s in _steps(r.get("steps")))]
    usage = total_usage((s.get("token_usage") for s in every), "input_tokens", "output_tokens")
    state = record.get("state")
    metadata = {"state": state} if isinstance(state, str) else {}
    gold = accepted(record.get("gold"), "'gold'")
    error = optional_text(record.get("error"), "'error'")
    return Trace(talk.finish(episode, error), gold, metadata, usage=usage)


def is_run(value: Sequence[Any]) -> bool:
    """Returns whether a list contains the steps of one run, and not several runs."""
    return not all(isinstance(v, list) or (isinstance(v, dict) and "steps" in v) for v in value)


def _steps(value: Any) -> list[dict[str, Any]]:
    return [mapping(step, f"step {n}") for n, step in enumerate(items(value, "'steps'"))]


def _write(
    talk: Conversation,
    steps: Sequence[Mapping[str, Any]],
    runs: dict[int, list[dict[str, Any]]],
    agents: Collection[str],
) -> Any:
    """Adds the steps of one agent, and removes the managed runs that they asked for from `runs`.

    Returns:
        The answer of the agent; None if the agent gave no answer.
    """
    if sum("task" in step for step in steps) > 1:  # agent.run(..., reset=False)
        raise Malformed("a second task in the same memory: give each run a record of its own")
    answer = None
    where = [f"step {step.get('step_number', number)}" for number, step in enumerate(steps)]
    calls = [_calls(step, at) for step, at in zip(steps, where, strict=True)]
    programs = examine_all(map(_source, calls, where), agents)
    for step, at, made, program in zip(steps, where, calls, programs, strict=True):
        if "plan" in step:
            survey = unwrap(optional_text(step.get("facts"), f"'facts' of {at}"))
            facts, plan = split_plan(text(step["plan"], f"'plan' of {at}"))
            thought = "\n\n".join(t for t in (survey, facts) if t)
            talk.add(Kind.PLAN, "planner", "manager", plan, thought)
        elif "step_number" in step:
            number = step["step_number"]
            mine = runs.pop(number, []) if isinstance(number, int) else []
            if program is None:
                _tools(talk, step, at, made, mine, agents)
            else:
                _program(talk, step, at, (made[0][1], program), mine)
            if step.get("is_final_answer"):
                answer = step.get("action_output")
        elif not ("task" in step or "system_prompt" in step):
            raise Malformed(f"{at} is neither task, plan nor action")
    return answer


def _calls(step: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    if "plan" in step or "step_number" not in step:
        return []
    return [_call(call, where) for call in items(step.get("tool_calls") or [], "'tool_calls'")]


def _source(calls: Sequence[tuple[str, Any]], where: str) -> str | None:
    """Returns the program of a CodeAgent's step; None for a step of a ToolCallingAgent."""
    if len(calls) != 1 or calls[0][0] != "python_interpreter" or isinstance(calls[0][1], dict):
        return None
    return text(calls[0][1], f"the program of {where}")


def _program(
    talk: Conversation,
    step: Mapping[str, Any],
    where: str,
    written: tuple[str, Program],
    runs: Sequence[dict[str, Any]],
) -> None:
    source, program = written
    thought, error = _thought(step, where), error_of(step, where)
    seen = optional_text(step.get("observations"), f"'observations' of {where}")
    if runs or program.requests:
        if program.adds:
            raise Malformed(f"{where} asks a managed agent and does something besides")
        if len(runs) < len(program.requests) and not error:
            raise Malformed(f"{where} asks a managed agent whose run is not in the file")
        _delegations(talk, thought, runs)
        return
    tell(talk, source, program, (seen, error), thought, where)


def _tools(
    talk: Conversation,
    step: Mapping[str, Any],
    where: str,
    calls: Sequence[tuple[str, Any]],
    runs: Sequence[dict[str, Any]],
    agents: Collection[str],
) -> None:
    """Adds a step of a ToolCallingAgent."""
    thought, error = _thought(step, where), error_of(step, where)
    seen = optional_text(step.get("observations"), f"'observations' of {where}")
    calls = [call for call in calls if call[0] != "final_answer"]
    asked = [name for name, _ in calls if name in agents]
    if len(calls) > 1 and len(asked) < len(calls):
        raise Malformed(f"{where} makes {len(calls)} calls at once and keeps one observation")
    if len(runs) < len(asked) and not error:
        raise Malformed(f"{where} asks a managed agent whose run is not in the file")
    if runs and not asked:
        raise Malformed(f"{where} asks no managed agent, and a managed run belongs to it")
    if asked:
        _delegations(talk, thought, runs)
        return
    for name, arguments in calls:
        tag = tag_of(name)
        if tag == "code" and isinstance(arguments, dict) and isinstance(arguments.get("code"), str):
            source = arguments["code"]
            arguments = {**arguments, "code": importing(source, examine(source, ()))}
        returned = "\n".join(part for part in (seen, error) if part)
        talk.call(tag, body_of(tag, arguments), returned, not error, thought)
    if not calls:
        talk.say(thought)


def _delegations(talk: Conversation, thought: str, runs: Sequence[dict[str, Any]]) -> None:
    if not runs:  # the step failed before it asked an agent
        talk.say(thought)
    words = thought
    for run in runs:
        task = text(need(run, "task", "a managed run"), "the task of a managed run")
        talk.add(Kind.REQUEST, "manager", "search", " ".join(task.split()), words)
        words = ""
        _write(talk, _steps(need(run, "steps", "a managed run")), {}, ())
        if run.get("answer") is not None:
            talk.say(scalar(run["answer"], "the answer of a managed run"))


def _thought(step: Mapping[str, Any], where: str) -> str:
    output = step.get("model_output")
    if isinstance(output, list):  # parts of a message
        parts = [mapping(part, f"'model_output' of {where}").get("text") for part in output]
        output = "\n".join(part for part in parts if isinstance(part, str))
    return thought_of(optional_text(output, f"'model_output' of {where}"))


def _call(value: Any, where: str) -> tuple[str, Any]:
    function = mapping(
        need(mapping(value, f"a call of {where}"), "function", f"a call of {where}"), "'function'"
    )
    name = text(need(function, "name", f"a call of {where}"), f"the tool of {where}")
    return name, need(function, "arguments", f"a call of {where}")


read: Reader = each_line(read_run)
