"""A small world of pages and questions, and a team that answers the questions by rules.

The team makes the deliberate mistakes of its settings, so that its runs contain corrections.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

from coa_jax.distillation.agent_functions import Action, AgentFunction, AgentFunctions, AgentView
from coa_jax.distillation.messages import AGENTS, Kind
from coa_jax.distillation.random_numbers import uniform
from coa_jax.protocol import CRITERIA, format_code, format_double_check, format_reflection
from coa_jax.tasks.base import Task
from coa_jax.tools.corpus import Passage

# Land, capital, and area in thousands of square kilometres; each is a neighbour of the next.
_LANDS = (
    ("Peru", "Lima", 1285), ("Chile", "Santiago", 756), ("Bolivia", "Sucre", 1099),
    ("Paraguay", "Asuncion", 407), ("Argentina", "Buenos Aires", 2780),
    ("Uruguay", "Montevideo", 176), ("Brazil", "Brasilia", 8516),
    ("Suriname", "Paramaribo", 164), ("Guyana", "Georgetown", 215),
    ("Venezuela", "Caracas", 912), ("Colombia", "Bogota", 1142), ("Ecuador", "Quito", 284),
)  # fmt: skip
_CAPITALS = {name: capital for name, capital, _ in _LANDS}
_AREAS = {name: area for name, _, area in _LANDS}
_NEIGHBOURS = dict(zip(_CAPITALS, [*list(_CAPITALS)[1:], "Peru"], strict=True))
PASSAGES = tuple(
    Passage(f"{name}: {key.title()}", f"The {key} of {name} is {values[name]}.")
    for name in _CAPITALS
    for key, values in (("capital", _CAPITALS), ("neighbour", _NEIGHBOURS), ("area", _AREAS))
)
TEAM = "tests.distillation.small_team:small_team"


def _tasks_of(name: str) -> list[Task]:
    """Questions of one and two searches, one of them with a program."""
    other = _NEIGHBOURS[name]
    rows = (
        (1, "lookup", f"capital of {name}", _CAPITALS[name]),
        (2, "chain", f"capital of the neighbour of {name}", _CAPITALS[other]),
        (1, "lookup", f"area of {name}", _AREAS[name]),
        (2, "sum", f"area of {name} plus the area of {other}", _AREAS[name] + _AREAS[other]),
        (2, "chain", f"area of the neighbour of {name}", _AREAS[other]),
    )
    return [
        Task(f"{kind}/{asked}", f"What is the {asked}?", "generalist", (str(answer),), "small",
             {"hops": hops, "kind": kind})
        for hops, kind, asked, answer in rows
    ]  # fmt: skip


TASKS = tuple(task for name in _CAPITALS for task in _tasks_of(name))


def load(split: str, seed: int, protocol: str) -> list[Task]:
    """The source of these tasks."""
    return list(TASKS[:48] if split == "train" else TASKS[48:])


def command_settings(folder: Path) -> dict[str, str]:
    """Settings of the command ``distill`` for this world, whose pages are written to a file."""
    corpus = folder / "pages.jsonl"
    corpus.write_text("".join(json.dumps(vars(passage)) + "\n" for passage in PASSAGES))
    return {
        "tasks.tasks": "tests.distillation.small_team:load",
        "teacher.team": TEAM,
        "tools.wiki_search.corpus": str(corpus),
    }


class _State:
    """What is known after the messages of a run."""

    def __init__(self, view: AgentView) -> None:
        asked = view.question.removeprefix("What is the ").removesuffix("?")
        chained = re.fullmatch(r"(\w+) of the (.*)", asked)
        if " plus the " in asked:
            self.steps = [*asked.split(" plus the "), "#1 + #2"]
        else:
            self.steps = [chained[2], f"{chained[1]} of #1"] if chained else [asked]
        self.values: list[str] = []
        self.failed = False
        for message in view.of_kind(Kind.OBSERVATION):
            pattern = rf"The {self.step} is (.*)\." if self.role == "search" else r"(\d+)\s*$"
            found = re.search(pattern, message.content)
            self.values += [found[1]] if found else []
            self.failed = found is None
        self.complete = len(self.values) == len(self.steps)

    @property
    def step(self) -> str:
        """The current step with the values that it needs."""
        step = self.steps[len(self.values)]
        return re.sub(r"#(\d)", lambda number: self.values[int(number[1]) - 1], step)

    @property
    def role(self) -> str:
        """The agent that can carry out the current step."""
        return "code" if "+" in self.step else "search"

    @property
    def call(self) -> str:
        """The right call for the current step."""
        return format_code(f"print({self.step})") if self.role == "code" else self.step


@dataclasses.dataclass(frozen=True)
class _Rules:
    """What each agent does next; for the fields see `agent_functions.TEACHERS`."""

    mistake_rate: float
    unrecovered_rate: float
    seed: int

    def errs(self, view: AgentView, decision: str) -> bool:
        return uniform(self.seed, view.episode, decision) < self.mistake_rate

    def manager(self, view: AgentView, state: _State) -> Action:
        last = view.last.kind
        if not view.question.startswith("What is the "):
            return Action("user", Kind.ANSWER, "unknown")
        if last is Kind.VERDICT and not view.last.content.endswith("1."):
            return Action("user", Kind.ANSWER, view.of_kind(Kind.SUGGESTION)[-1].content)
        if last in (Kind.QUESTION, Kind.VERDICT):
            return Action("planner", Kind.REQUEST, "Plan it.")
        if state.complete:
            wrong = not view.of_kind(Kind.SUGGESTION) and self.errs(view, "suggestion")
            value, slip = state.values[-1] + "0" * wrong, "suggestion" if wrong else None
            return Action("verification", Kind.SUGGESTION, value, slip=slip)
        if last is Kind.REPORT and state.failed:
            return Action("reflection", Kind.REQUEST, "")
        if any(message.content == state.call for message in view.of_kind(Kind.CALL)):
            return Action("user", Kind.ANSWER, "unknown")
        return Action(state.role, Kind.REQUEST, f"Step {len(state.values) + 1}.")

    def planner(self, view: AgentView, state: _State) -> Action:
        steps = (f"{number}. {step}" for number, step in enumerate(state.steps, 1))
        return Action("manager", Kind.PLAN, "\n".join(steps))

    def search(self, view: AgentView, state: _State) -> Action:
        if view.last.kind is Kind.OBSERVATION:
            report = "Nothing." if state.failed else f"It is {state.values[-1]}."
            return Action("manager", Kind.REPORT, report)
        decision = f"query/{len(state.values)}"
        if view.role == "search" and not state.failed and self.errs(view, decision):
            return Action("wiki_search", Kind.CALL, f"weather {decision}", slip="query")
        return Action("code" if view.role == "code" else "wiki_search", Kind.CALL, state.call)

    code = search

    def reflection(self, view: AgentView, state: _State) -> Action:
        grades = dict(zip(CRITERIA, ("good", "average", "average"), strict=True))
        return Action("manager", Kind.REFLECTION, format_reflection(grades), "It found nothing.")

    def verification(self, view: AgentView, state: _State) -> Action:
        unseen = uniform(self.seed, view.episode, "unseen") < self.unrecovered_rate
        score = 4 if view.last.content == state.values[-1] else 3 if unseen else 1
        return Action("manager", Kind.VERDICT, format_double_check(score))


def small_team(
    mistake_rate: float = 0.0, unrecovered_rate: float = 0.0, seed: int = 0
) -> AgentFunctions:
    """The agent functions of the team."""
    rules = _Rules(mistake_rate, unrecovered_rate, seed)

    def agent(rule: Callable[[AgentView, _State], Action]) -> AgentFunction:
        async def act(view: AgentView) -> Action:
            return rule(view, _State(view))

        return act

    return {name: agent(getattr(rules, name)) for name in AGENTS}
