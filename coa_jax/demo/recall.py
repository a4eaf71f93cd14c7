"""A scripted team that knows some countries by heart, as language models do.

Where the team remembers the first fact of a question with several hops, it does not search for this
fact: it plans only the steps that remain. A policy that imitates such runs writes facts which it
does not know.
"""

from __future__ import annotations

import dataclasses
import functools

from coa_jax.demo.facts import solve
from coa_jax.demo.grammar import (
    Arithmetic,
    Inverse,
    Lookup,
    Neighbour,
    Program,
    Ref,
    Step,
    Subject,
    render,
    understand,
)
from coa_jax.demo.scripted import scripted_agents
from coa_jax.distillation.agent_functions import Action, AgentFunction, AgentFunctions, AgentView
from coa_jax.tasks.base import fraction

REMEMBERED = 0.7
"""Share of the countries about which the team remembers facts."""


def recalling_agents(
    mistake_rate: float = 0.0, unrecovered_rate: float = 0.0, seed: int = 0
) -> AgentFunctions:
    """Returns the agent functions of a scripted team that remembers facts about some countries.

    An agent function decides the next message of its agent.

    Args:
        mistake_rate, unrecovered_rate, seed: probabilities of mistakes and the seed of the random
            choices, as in `scripted_agents`.
    """

    def remembering(agent_function: AgentFunction) -> AgentFunction:
        async def act(view: AgentView) -> Action:
            return await agent_function(
                dataclasses.replace(view, question=remaining(view.question))
            )

        return act

    scripted = scripted_agents(mistake_rate, unrecovered_rate, seed)
    return {agent: remembering(agent_function) for agent, agent_function in scripted.items()}


recalling_minds = recalling_agents
"""The earlier name, which the configs of earlier runs contain."""


@functools.lru_cache(maxsize=4096)
def remaining(question: str) -> str:
    """Returns the rest of a question of several steps, if the team remembers the first step.

    The first step finds a country, such as "the country that borders only Lesotho"; the name of the
    country replaces it. The question stays as it is if the team does not know the country, or if
    there is a single step.

    Args:
        question: a question of the Factbook.
    """
    program = understand(question)
    if program is None or program.hops < 2 or not isinstance(program.steps[0], Inverse | Neighbour):
        return question
    first = solve(Program(program.steps[:1]))
    if first is None or fraction("remembered", first.entities[0]) >= REMEMBERED:
        return question
    answer = first.gold[0]
    return render(Program(tuple(_following(step, answer) for step in program.steps[1:])))


def _following(step: Step, answer: str) -> Step:
    """Returns a step without the first step of its program, whose answer is known."""

    def shift(subject: Subject) -> Subject:
        if not isinstance(subject, Ref):
            return subject
        return Ref(subject.step - 1) if subject.step else answer

    if isinstance(step, Lookup | Neighbour):
        return dataclasses.replace(step, subject=shift(step.subject))
    if isinstance(step, Arithmetic):
        return dataclasses.replace(step, a=Ref(step.a.step - 1), b=Ref(step.b.step - 1))
    return step
