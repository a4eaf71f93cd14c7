"""Scripted agents for questions about tools that only the prompt describes.

An agent function decides the messages of an agent. These agent functions know the kinds of tools
(`coa_jax.demo.drawn_tools`), but not the tools of a task. They choose a tool by its description,
and write the call in the form that the description demands. The plan and the thoughts name the tool
and its form, so that a small policy can copy both.
"""

from __future__ import annotations

import re

from coa_jax.demo.drawn_tools import KINDS, UNKNOWN, Use, kind_of, shape_of, write_call
from coa_jax.distillation.agent_functions import Action, AgentView
from coa_jax.distillation.messages import Kind
from coa_jax.protocol import format_double_check, get_protocol


def _tool_for(view: AgentView, use: Use) -> str:
    """Returns the tag of the tool that can answer; "" if the protocol has none."""
    described = get_protocol(view.protocol).described
    return next((tag for tag, text in described.items() if kind_of(text) == use.kind), "")


def _read(use: Use, text: str) -> str:
    """Returns the value of the asked field from the result of a tool."""
    nouns = [noun for _, noun in KINDS[use.kind]["fields"]]
    named = re.search(rf"\b{nouns[use.field]}(?:: | is | )(\S+?)(?=[;,]?(?: |$))", text)
    return named[1] if named else re.split(r", | \(", text.rstrip(")"))[use.field]


def act(view: AgentView, use: Use) -> Action:
    """Decides the next message of any agent of the team.

    Args:
        view: what the agent knows about the run.
        use: what the question asks of a tool.
    """
    tag, observations = _tool_for(view, use), view.of_kind(Kind.OBSERVATION)
    answer = _read(use, observations[-1].content) if observations else UNKNOWN
    match view.role, view.last.kind:
        case "manager", Kind.QUESTION:
            text = f"The tool {tag} can tell it." if tag else "No tool can tell it."
            return Action("planner", Kind.REQUEST, text)
        case "planner", _:
            return Action("manager", Kind.PLAN, f"1. {tag or 'answer without a tool'}")
        case "manager", Kind.PLAN if tag:
            return Action("search", Kind.REQUEST, "Step 1.")
        case "search", Kind.REQUEST:
            text = get_protocol(view.protocol).described[tag]
            shape, order = shape_of(text)
            words = re.findall("[A-Z]+", shape)
            pairs = ", ".join(f"{w} {use.values[s]}" for w, s in zip(words, order, strict=True))
            thought = f"{tag} takes {shape}: {pairs}."
            return Action(tag, Kind.CALL, write_call(text, use.values), thought)
        case "search", _:
            return Action("manager", Kind.REPORT, f"#1 is {answer}.")
        case "manager", Kind.VERDICT:
            return Action("user", Kind.ANSWER, answer)
        case "manager", _:
            return Action("verification", Kind.SUGGESTION, answer)
    thought = f"The tool {tag} states it." if tag else "No tool states it."
    return Action("manager", Kind.VERDICT, format_double_check(4), thought)
