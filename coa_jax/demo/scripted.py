"""Implements scripted agents, which solve the generated tasks by rules, without a language model.

An agent function decides the next message of its agent. A scripted agent parses the question and
the tool results with the grammar of the tasks, and uses nothing else. If the question is of another
kind, the answer is "unknown". The sentences of scripted agents are short and regular, and every
name and number is copied from the question or from a tool result. So a small policy can learn to
write such runs from left to right.
"""

from __future__ import annotations

from collections.abc import Callable

from coa_jax.demo import drawn_tools_agents, steps
from coa_jax.demo.drawn_tools import UNKNOWN, understand
from coa_jax.demo.grammar import Computed
from coa_jax.demo.mistakes import Mistakes, wrong_value
from coa_jax.demo.steps import Progress
from coa_jax.distillation.agent_functions import Action, AgentFunction, AgentFunctions, AgentView
from coa_jax.distillation.messages import Kind
from coa_jax.protocol import (
    CRITERIA,
    format_code,
    format_double_check,
    format_reflection,
    get_protocol,
    parse_double_check,
    parse_reflection,
)


def _state(view: AgentView) -> Progress:
    state = steps.run_progress(view.question, view.messages)
    if state is None:
        raise ValueError("the scripted agents do not understand this question")
    return state


# --- manager -------------------------------------------------------------------------------


def _ask_for_step(state: Progress, again: bool = False) -> Action:
    """Asks the agent that can carry out the current step to do so."""
    if isinstance(state.step, Computed):
        text = f"Step {state.number}: {steps.operands(state.step, state.answers)}."
    else:
        text = f"Step {state.number}{' again' if again else ''}."
    return Action(steps.tool_for(state.step), Kind.REQUEST, text)


def _conclude(mistakes: Mistakes, view: AgentView, state: Progress) -> Action:
    """Suggests the last answer for verification, or answers if the protocol has no verification."""
    protocol, value = get_protocol(view.protocol), state.answers[-1]
    if protocol.form_of(protocol.answer) == "solution":
        return Action("user", Kind.ANSWER, f"\\boxed{{{value}}}", f"The result is {value}.")
    if "suggested_answer" not in protocol.roles:
        return Action("user", Kind.ANSWER, value)
    second = bool(view.of_kind(Kind.VERDICT))
    if not second and mistakes.happens(view.episode, "suggestion"):
        wrong = wrong_value(steps.bound(state.steps[-1], state.answers), state.answers)
        return Action("verification", Kind.SUGGESTION, wrong, slip="suggestion")
    thought = f"#{len(state.steps)} is {value}." if second else ""
    return Action("verification", Kind.SUGGESTION, value, thought)


def _after_report(mistakes: Mistakes, view: AgentView, state: Progress) -> Action:
    called = view.of_kind(Kind.CALL)[-1].recipient
    following = get_protocol(view.protocol).next_actions.get(called)
    reviewed = following == frozenset({"reflection"})  # the protocol reviews every result
    if reviewed or state.problem:
        return Action("reflection", Kind.REQUEST, "")
    return _conclude(mistakes, view, state) if state.complete else _ask_for_step(state)


def _next_call(view: AgentView, state: Progress) -> str | None:
    """Returns the best call for the current step that was not made before, or None."""
    made = {message.content for message in view.of_kind(Kind.CALL)}
    if steps.tool_for(state.step) == "code":
        ways = tuple(format_code(source) for source in steps.programs(state.step, state.answers))
    else:
        ways = steps.queries(state.step)
    return next((way for way in ways if way not in made), None)


def _after_reflection(mistakes: Mistakes, view: AgentView, state: Progress) -> Action:
    if state.complete:
        return _conclude(mistakes, view, state)
    if _next_call(view, state) is None:
        return Action("user", Kind.ANSWER, UNKNOWN)
    grades = parse_reflection(view.last.content) or {}
    if "poor" in grades.values():
        return Action("planner", Kind.REQUEST, "Plan again.")
    return _ask_for_step(state, again=bool(state.problem))


def manage(mistakes: Mistakes, view: AgentView) -> Action:
    """Decides the next message of the manager, the agent that directs the others.

    The manager first asks for a plan, and then for each step in order. Then the manager suggests an
    answer, has the answer verified, and finally gives it. If the result of a step is not as
    expected, the manager asks for a reflection.

    Args:
        mistakes: decides which decisions become deliberate mistakes.
        view: what the agent knows about the run.
    """
    state = steps.run_progress(view.question, view.messages)
    if state is None:
        return Action("user", Kind.ANSWER, UNKNOWN)
    match view.last.kind:
        case Kind.QUESTION:
            first = state.steps[0]
            text = "Solve it in steps." if len(state.steps) > 1 else f"Find {steps.wording(first)}."
            if len(state.steps) == 1 and steps.tool_for(first) == "code":
                text = "One program computes it."
            return Action("planner", Kind.REQUEST, text)
        case Kind.PLAN:
            return _conclude(mistakes, view, state) if state.complete else _ask_for_step(state)
        case Kind.REPORT:
            return _after_report(mistakes, view, state)
        case Kind.REFLECTION:
            return _after_reflection(mistakes, view, state)
        case Kind.VERDICT:
            if (parse_double_check(view.last.content) or 0) >= 3:
                return Action("user", Kind.ANSWER, view.of_kind(Kind.SUGGESTION)[-1].content)
            return Action("planner", Kind.REQUEST, "Plan again.")
        case _:
            raise ValueError(f"a manager gets no {view.last.kind}")


# --- the other agents ---------------------------------------------------------------------


def plan(mistakes: Mistakes, view: AgentView) -> Action:
    """Decides the message of the planner: the remaining steps, one per line.

    In the plan, "#k" stands for the answer of step k.

    Args:
        mistakes: not used, because the planner makes no mistakes.
        view: what the agent knows about the run.
    """
    state = _state(view)
    if state.complete:
        count = len(state.steps)
        return Action("manager", Kind.PLAN, f"{count}. answer #{count}")
    remaining = enumerate((state.step, *state.steps[state.number :]), state.number)
    lines = (f"{number}. {steps.wording(step)}" for number, step in remaining)
    return Action("manager", Kind.PLAN, "\n".join(lines))


def _report(state: Progress) -> Action:
    text = state.problem or f"#{len(state.answers)} is {state.answers[-1]}."
    return Action("manager", Kind.REPORT, text)


def search(mistakes: Mistakes, view: AgentView) -> Action:
    """Decides the next message of the search agent: a query for the current step, or a report.

    On the web, the agent opens the search result that fits the step before it reports what the page
    says.

    Args:
        mistakes: decides which decisions become deliberate mistakes.
        view: what the agent knows about the run.
    """
    state = _state(view)
    if state.link:
        return Action("crawl_page", Kind.CALL, state.link)
    if view.last.kind is Kind.OBSERVATION:
        return _report(state)
    tool = "web_search" if "web_search" in view.tools else "wiki_search"
    decision = f"query/{state.number}"
    if state.failures == 0 and mistakes.happens(view.episode, decision):
        query = mistakes.wrong_query(view.episode, decision, state.steps, state.step)
        if all(query != message.content for message in view.of_kind(Kind.CALL)):
            return Action(tool, Kind.CALL, query, slip="query")
    return Action(tool, Kind.CALL, _next_call(view, state) or "")


def code(mistakes: Mistakes, view: AgentView) -> Action:
    """Decides the next message of the code agent: a program, or a report of its output.

    Args:
        mistakes: decides which decisions become deliberate mistakes.
        view: what the agent knows about the run.
    """
    state = _state(view)
    if view.last.kind is Kind.OBSERVATION:
        return _report(state)
    decision = f"program/{state.number}"
    if state.failures == 0 and mistakes.happens(view.episode, decision):
        source = mistakes.wrong_program(view.episode, decision, state.step, state.answers)
        return Action("code", Kind.CALL, format_code(source), slip="program")
    return Action("code", Kind.CALL, _next_call(view, state) or "")


def reflect(mistakes: Mistakes, view: AgentView) -> Action:
    """Decides the message of the reflection agent, which grades the last call by its result.

    If the result is as expected, all three grades are Good. Otherwise ``information_conflict`` is
    Good, ``trajectory_monitoring`` is Fair, and ``tool_effectiveness`` is Fair if the call was
    vague, failed or found nothing, or Poor if it did not ask what the step asks. Poor requires a
    new plan.

    Args:
        mistakes: not used, because grades contain no mistakes.
        view: what the agent knows about the run.
    """
    state = _state(view)
    if not state.problem:
        grades = dict.fromkeys(CRITERIA, "good")
        return Action("manager", Kind.REFLECTION, format_reflection(grades), "It is as expected.")
    last_call = view.of_kind(Kind.CALL)[-1]
    grade = "average"
    if steps.tool_for(state.step) == "code":
        thought = "The program has an error."
        if view.of_kind(Kind.OBSERVATION)[-1].outcome == "ok":
            thought, grade = "The program is wrong.", "poor"
    elif last_call.recipient == "crawl_page":
        thought = "The page does not state it."
    elif last_call.content in steps.queries(state.step):
        thought = "The query found nothing."
    elif set(last_call.content.split()) <= set(steps.queries(state.step)[0].split()):
        thought = "The query is too vague."
    else:
        thought, grade = "The query is wrong.", "poor"
    grades = dict(zip(CRITERIA, ("good", grade, "average"), strict=True))
    return Action("manager", Kind.REFLECTION, format_reflection(grades), thought)


def verify(mistakes: Mistakes, view: AgentView) -> Action:
    """Decides the message of the verification agent: whether the results support the answer.

    The message is a verdict on the suggested answer.

    Args:
        mistakes: decides whether a wrong suggested answer is overlooked.
        view: what the agent knows about the run.
    """
    state, suggested = _state(view), view.last.content
    right = state.answers[-1]
    verb = "printed" if steps.tool_for(state.steps[-1]) == "code" else "states"
    if suggested == right:
        score, thought = 4, f"{state.evidence} {verb} it."
    elif mistakes.stays_unseen(view.episode):
        score, thought = 3, f"{state.evidence} {verb} it."
    else:
        score = 2 if _digits(suggested) == _digits(right) != [] else 1
        thought = f"#{len(state.steps)} is {right}, not {suggested}."
    return Action("manager", Kind.VERDICT, format_double_check(score), thought)


def _digits(text: str) -> list[str]:
    """Returns the sorted digits of a text, which do not change if two digits are swapped."""
    return sorted(filter(str.isdigit, text))


def scripted_agents(
    mistake_rate: float = 0.0, unrecovered_rate: float = 0.0, seed: int = 0
) -> AgentFunctions:
    """Returns the agent functions of a team whose agents all follow scripted rules.

    An agent function decides the next message of its agent.

    Args:
        mistake_rate: probability that a decision of an agent function is a deliberate mistake.
        unrecovered_rate: probability that a wrong suggested answer passes the double check.
        seed: seed of these random choices.
    """
    mistakes = Mistakes(mistake_rate, unrecovered_rate, seed)

    def agent_function(rule: Callable[[Mistakes, AgentView], Action]) -> AgentFunction:
        async def act(view: AgentView) -> Action:
            use = understand(view.question)
            return rule(mistakes, view) if use is None else drawn_tools_agents.act(view, use)

        return act

    return {
        "manager": agent_function(manage),
        "planner": agent_function(plan),
        "search": agent_function(search),
        "code": agent_function(code),
        "reflection": agent_function(reflect),
        "verification": agent_function(verify),
    }


scripted_minds = scripted_agents
"""The earlier name, which the entry points of earlier installations contain."""
