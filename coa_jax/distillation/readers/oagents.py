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
- the first of two runs of the search agent on the same task, because the second run overwrote it.
  If two requests of the manager name the same task, the record is rejected;
- a verification (`coa_jax.distillation.message_order` can add one);
- the text of the tool if the observation is null. Such an observation becomes an empty observation
  with the outcome ``error``;
- token counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coa_jax.distillation.messages import Kind, clean
from coa_jax.distillation.readers import programs
from coa_jax.distillation.readers.base import Conversation, Field, Malformed, Trace
from coa_jax.distillation.readers.programs import StepProgram
from coa_jax.distillation.readers.tool_calls import tag_of

AGENT = "search_agent"
_Run = tuple[str, Field]
"""A task and the search agent's run on it; the run is null if the step failed before the run."""

_KNOWN_STEPS = ("task", "planning", "action", "unknown")
_KEPT = ("agent_name", "parsing_error", "iteration_limit_exceeded", "task")


def is_result(value: Any) -> bool:
    """Returns whether a JSON value is a run in the result files of OAgents, an agent framework."""
    steps = value.get("intermediate_steps") if isinstance(value, dict) else None
    return isinstance(steps, list) and (
        "search_agent_actions" in value
        or any(isinstance(step, dict) and "step_type" in step for step in steps)
    )


def read_result(record: Any) -> Trace:
    """Converts a run in a result file of OAgents (the JSON object of one line) to a trace.

    Raises:
        Malformed: the record cannot be converted; the message says why.
    """
    fields = Field(record)
    question, steps = fields["question"].text(), fields["intermediate_steps"].items("step")
    for step in steps:
        kind = step["step_type"].value
        if kind not in _KNOWN_STEPS:
            raise Malformed(f"{step} has the unknown type {str(kind)[:40]!r}")
    talk = Conversation(question)
    analyses = programs.examine_all(map(_source, steps), (AGENT,))
    runs = _join(fields.get("search_agent_actions"), steps, analyses)
    for number, (step, program) in enumerate(zip(steps, analyses, strict=True)):
        match step["step_type"].value:
            case "planning":
                _planning(talk, step)
            case "action":
                _action(talk, step, program, runs.get(number, ()))
    talk.answer(fields["prediction"].optional_scalar().strip())
    error = fields.get("agent_error").value
    metadata = {key: record[key] for key in _KEPT if isinstance(record.get(key), str | int | bool)}
    return Trace(
        talk.finish(fields.get("task_id").optional_scalar(), str(error) if error else ""),
        fields.get("true_answer").answers(),
        metadata,
    )


def _planning(talk: Conversation, step: Field) -> None:
    facts = programs.unwrap(step.get("facts").optional_text())
    inner, plan = programs.split_plan(step.get("plan").optional_text())
    if not plan:
        raise Malformed(f"the planning {step} contains no plan")
    talk.plan(plan, facts, inner)


def _source(step: Field) -> str | None:
    """Returns the program of a step; None for a step in which the manager wrote no program."""
    calls = step.get("tool_calls")
    if step["step_type"].value != "action" or not calls.value:
        return None
    first, *others = calls.items(f"{step}, call")
    if others:
        raise Malformed(f"{step} makes {1 + len(others)} calls at once and keeps one observation")
    name, arguments = programs.function_of(first)
    if tag_of(name) != "code":
        raise Malformed(f"{step} calls {name[:40]!r}, where a manager writes programs")
    return arguments.text()


def _action(
    talk: Conversation, step: Field, program: StepProgram | None, runs: Sequence[_Run]
) -> None:
    thought = programs.thought_of(step.get("model_output").optional_text())
    programs.outcome_of(step)  # refuses damaged fields, even if the step needs no outcome
    if program is None:  # nothing ran, because the output could not be parsed
        talk.add_thought(thought)
    elif not program.requests:
        programs.add_step(talk, step, program, thought)
    elif program.adds:
        raise Malformed(f"{step} asks {AGENT} and does something besides")
    else:
        _delegation(talk, thought, runs)
    score, words = step.get("score"), step.get("evaluate_thought").optional_text()
    if score or words:
        content = f"score: {score.finite():g}" if score else words
        talk.add(Kind.REFLECTION, "reflection", "manager", content, words)


def _delegation(talk: Conversation, thought: str, runs: Sequence[_Run]) -> None:
    for task, run in runs:
        talk.ask(task, thought)
        thought = ""
        if not run:
            continue
        for call in run["tool_calls"].items(f"{run}, call"):
            name = call["name"].text()
            if name != "final_answer":
                returned = call.get("observation")
                talk.call(name, call["args"].value, returned.optional_text(), ok=bool(returned))
        talk.add_thought(run.get("answer").optional_scalar())


def _key(task: str) -> str:
    return " ".join(clean(task).split())


def _join(
    actions: Field, steps: Sequence[Field], analyses: Sequence[StepProgram | None]
) -> dict[int, list[_Run]]:
    """Returns the search agent's runs, by the number of the manager's step that asked for them."""
    raw = actions.mapping() if actions else {}
    runs = {_key(task): Field(run, "a search run") for task, run in raw.items()}
    for run in runs.values():
        run.mapping()
    if len(runs) < len(raw):
        raise Malformed("two tasks in 'search_agent_actions' differ in blanks only")
    requested = {n: [t for _, t in p.requests] for n, p in enumerate(analyses) if p and p.requests}
    joined: dict[int, list[_Run]] = {number: [] for number in requested}
    stated: set[str] = set()
    for number, tasks in requested.items():
        for key in (_key(task) for task in tasks if task is not None):
            if key in stated:
                raise Malformed(
                    f"step {number} asks {AGENT} for the same task again, and the file keeps only "
                    "one of the two runs"
                )
            if key not in runs and not programs.error_of(steps[number]):
                raise Malformed(f"step {number} asks {AGENT} for a task that has no run")
            stated.add(key)
            joined[number].append((key, runs.get(key, Field(None))))
    unstated = [key for key in runs if key not in stated]
    sites = [number for number, tasks in requested.items() for task in tasks if task is None]
    if len(set(sites)) == 1:  # a loop asks several times at the same place of the program
        sites = sites[:1] * len(unstated)
    if len(unstated) != len(sites):
        raise Malformed(
            f"{len(unstated)} runs of {AGENT} for {len(sites)} places that ask for a task that is "
            "put together: no telling which is whose"
        )
    for number, key in zip(sites, unstated, strict=True):
        joined[number].append((key, runs[key]))
    order = {key: position for position, key in enumerate(runs)}
    for joined_runs in joined.values():
        joined_runs.sort(key=lambda run: order.get(run[0], len(order)))
    return joined
