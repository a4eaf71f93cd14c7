"""Reads result files of OAgents, which have one JSON object per line (fields: docs/data.md).

In OAgents, a manager (CodeAgent) writes programs, which ask the ``search_agent`` to search and
crawl. The file stores the runs of the search agent in ``search_agent_actions``, each under the text
of the task that the manager gave it. The reader assigns each run to the step of the manager whose
program asked for it. If a program contains the text of the task literally, this text decides. Other
runs are assigned in the order of the file, which is the order in which they ran.

A planning step becomes a survey of facts, which is a thought, and a plan. If a process judge ran,
``score`` and ``evaluate_thought`` of a step become a reflection.

The format lacks:

- thoughts of the search agent between its calls: only the calls are stored;
- separate results of a program that asks the search agent and also computes or calls tools: one
  observation contains everything (such a record is rejected);
- the first of two runs of the search agent on the same task, because the second run overwrote it
  (the record is rejected if both steps exist);
- a verification (see `coa_jax.distill.arrange` for the replacement);
- the text of the tool if the observation is null, which becomes an empty observation with the
  outcome ``error``;
- token counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.distill.messages import Kind, clean
from coa_jax.distill.readers.base import (
    Conversation,
    Malformed,
    Reader,
    Trace,
    accepted,
    each_line,
    error_of,
    finite,
    items,
    mapping,
    need,
    optional_text,
    scalar,
    text,
)
from coa_jax.distill.readers.calls import body_of, tag_of
from coa_jax.distill.readers.programs import (
    Program,
    examine_all,
    split_plan,
    tell,
    thought_of,
    unwrap,
)

AGENT = "search_agent"
_Run = tuple[str, dict[str, Any] | None]
"""A task and the search agent's run on it; the run is None if the step failed before the run."""

_KNOWN_STEPS = ("task", "planning", "action", "unknown")


def read_result(value: Any) -> Trace:
    """Converts the JSON object of one line to a trace."""
    record = mapping(value, "the record")
    question = text(need(record, "question"), "'question'")
    steps = [
        mapping(step, f"step {n}")
        for n, step in enumerate(items(need(record, "intermediate_steps"), "'intermediate_steps'"))
    ]
    for number, step in enumerate(steps):
        kind = need(step, "step_type", f"step {number}")
        if kind not in _KNOWN_STEPS:
            raise Malformed(f"step {number} has the unknown type {str(kind)[:40]!r}")
    talk = Conversation(question)
    programs = _programs(steps)
    runs = _join(record.get("search_agent_actions"), steps, programs)
    for number, step in enumerate(steps):
        if step["step_type"] == "planning":
            _planning(talk, step, number)
        elif step["step_type"] == "action":
            _action(talk, step, number, programs.get(number), runs.get(number, ()))
    prediction = need(record, "prediction")
    if prediction is not None:
        answer = scalar(prediction, "'prediction'").strip()
        if answer:
            talk.add(Kind.ANSWER, "manager", "user", answer)
    error = record.get("agent_error")
    kept = ("agent_name", "parsing_error", "iteration_limit_exceeded", "task")
    metadata = {key: record[key] for key in kept if isinstance(record.get(key), str | int | bool)}
    return Trace(
        talk.finish(_episode(record), str(error) if error else ""),
        accepted(record.get("true_answer"), "'true_answer'"),
        metadata,
    )


def _episode(record: dict[str, Any]) -> str:
    identity = record.get("task_id")
    return "" if identity is None else scalar(identity, "'task_id'")


def _planning(talk: Conversation, step: dict[str, Any], number: int) -> None:
    facts = unwrap(optional_text(step.get("facts"), f"'facts' of step {number}"))
    inner, plan = split_plan(optional_text(step.get("plan"), f"'plan' of step {number}"))
    if not plan:
        raise Malformed(f"the planning step {number} contains no plan")
    talk.add(Kind.PLAN, "planner", "manager", plan, "\n\n".join(t for t in (facts, inner) if t))


def _source(step: dict[str, Any], number: int) -> str | None:
    """Returns the program of an action step; None if the output of the model has no program."""
    calls = step.get("tool_calls")
    if not calls:
        return None
    calls = items(calls, f"'tool_calls' of step {number}")
    if len(calls) > 1:
        raise Malformed(f"step {number} makes {len(calls)} calls at once and keeps one observation")
    call = mapping(calls[0], f"a call of step {number}")
    function = mapping(need(call, "function", f"a call of step {number}"), "'function'")
    name = text(need(function, "name", "'function'"), f"the tool of step {number}")
    if tag_of(name) != "code":
        raise Malformed(f"step {number} calls {name[:40]!r}, where a manager writes programs")
    return text(need(function, "arguments", "'function'"), f"the program of step {number}")


def _action(
    talk: Conversation,
    step: dict[str, Any],
    number: int,
    program: Program | None,
    runs: Sequence[_Run],
) -> None:
    output = optional_text(step.get("model_output"), f"'model_output' of step {number}")
    seen = optional_text(step.get("observations"), f"'observations' of step {number}")
    error, source = error_of(step, f"step {number}"), _source(step, number)
    thought = thought_of(output)
    if source is None or program is None:  # nothing ran, because the output could not be parsed
        talk.say(thought)
    elif program.requests:
        if program.adds:
            raise Malformed(f"step {number} asks {AGENT} and does something besides")
        _delegation(talk, thought, runs)
    else:
        tell(talk, source, program, (seen, error), thought, f"step {number}")
    _judgement(talk, step, number)


def _delegation(talk: Conversation, thought: str, runs: Sequence[_Run]) -> None:
    words = thought
    for task, run in runs:
        talk.add(Kind.REQUEST, "manager", "search", " ".join(task.split()), words)
        words = ""
        if run is None:
            continue
        for call in items(need(run, "tool_calls", "a search run"), "'tool_calls' of a search run"):
            call = mapping(call, "a call of search_agent")
            name = text(need(call, "name", "a call of search_agent"), "the name of a call")
            if name == "final_answer":
                continue
            returned = call.get("observation")
            seen = optional_text(returned, f"the observation of {name}")
            tag = tag_of(name)
            body = body_of(tag, need(call, "args", f"a call of {name}"))
            talk.call(tag, body, seen, ok=returned is not None)
        answer = run.get("answer")
        if answer is not None:
            talk.say(scalar(answer, "the answer of search_agent"))


def _judgement(talk: Conversation, step: dict[str, Any], number: int) -> None:
    score, where = step.get("score"), f"step {number}"
    words = optional_text(step.get("evaluate_thought"), f"'evaluate_thought' of {where}")
    if score is not None or words:
        what = f"'score' of {where}"
        content = "" if score is None else f"score: {finite(score, what):g}"
        talk.add(Kind.REFLECTION, "reflection", "manager", content or words, words)


def _key(task: str) -> str:
    return " ".join(clean(task).split())


def _programs(steps: list[dict[str, Any]]) -> dict[int, Program]:
    """Returns the analysis of each step's program, by the number of the step."""
    sources = [
        _source(step, number) if step["step_type"] == "action" else None
        for number, step in enumerate(steps)
    ]
    programs = enumerate(examine_all(sources, (AGENT,)))
    return {number: program for number, program in programs if program is not None}


def _join(
    actions: Any, steps: list[dict[str, Any]], programs: Mapping[int, Program]
) -> dict[int, list[_Run]]:
    """Returns the search agent's runs, by the number of the manager's step that asked for them."""
    raw = {} if actions is None else mapping(actions, "'search_agent_actions'")
    runs = {_key(task): mapping(run, "a search run") for task, run in raw.items()}
    if len(runs) < len(raw):
        raise Malformed("two tasks in 'search_agent_actions' differ in blanks only")
    failed = {number for number in programs if error_of(steps[number], f"step {number}")}
    asked = {n: [t for _, t in p.requests] for n, p in programs.items() if p.requests}
    joined: dict[int, list[_Run]] = {number: [] for number in asked}
    stated: set[str] = set()
    for number, tasks in asked.items():
        for key in (_key(task) for task in tasks if task is not None):
            if key in stated:
                raise Malformed(
                    f"step {number} asks {AGENT} for the same task again, and the file keeps only "
                    "one of the two runs"
                )
            if key not in runs and number not in failed:
                raise Malformed(f"step {number} asks {AGENT} for a task that has no run")
            stated.add(key)
            joined[number].append((key, runs.get(key)))
    left = [key for key in runs if key not in stated]
    sites = [number for number, tasks in asked.items() for task in tasks if task is None]
    if len(set(sites)) == 1:  # a loop asks several times at the same place of the program
        sites = sites[:1] * len(left)
    if len(left) != len(sites):
        raise Malformed(
            f"{len(left)} runs of {AGENT} for {len(sites)} places that ask for a task that is put "
            "together: no telling which is whose"
        )
    for number, key in zip(sites, left, strict=True):
        joined[number].append((key, runs[key]))
    order = {key: position for position, key in enumerate(runs)}
    for found in joined.values():
        found.sort(key=lambda run: order.get(run[0], len(order)))
    return joined


read: Reader = each_line(read_result)
