"""Makes the deliberate mistakes of the scripted agents, so that runs contain corrections.

Each mistake is one that tool results reveal: a query for another fact, a program that fails or
prints an unexpected value, or a suggested answer that the documents contradict. Whether a decision
goes wrong depends only on the seed, the task and the decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from coa_jax.demo.expressions import Expression
from coa_jax.demo.grammar import Arithmetic, Comparison, Computed, Inverse, Lookup, Neighbour
from coa_jax.demo.relations import RELATIONS
from coa_jax.demo.steps import AnyStep, number_of, programs
from coa_jax.distillation.random_numbers import uniform


@dataclasses.dataclass(frozen=True)
class Mistakes:
    """Decides when agents with scripted rules make a deliberate mistake, and which mistake.

    Attributes:
        rate: probability that a decision is a deliberate mistake.
        unrecovered_rate: probability that a wrong suggested answer passes the double check.
        seed: seed of these random choices.
    """

    rate: float = 0.0
    unrecovered_rate: float = 0.0
    seed: int = 0

    def happens(self, episode: str, decision: str) -> bool:
        """Returns whether a decision becomes a deliberate mistake, given the id of the run."""
        return uniform(self.seed, episode, decision) < self.rate

    def stays_unseen(self, episode: str) -> bool:
        """Returns whether the verification in a run, given by its id, overlooks a wrong answer."""
        return uniform(self.seed, episode, "overlook") < self.unrecovered_rate

    def choose(self, episode: str, decision: str, options: Sequence[str]) -> str:
        """Chooses an option; the choice depends only on the seed, the run and the decision.

        Args:
            episode, decision: id of the run, and name of the decision.
            options: texts to choose from.
        """
        return options[int(uniform(self.seed, episode, f"{decision}/choice") * len(options))]

    def wrong_query(
        self, episode: str, decision: str, steps: Sequence[AnyStep], step: AnyStep
    ) -> str:
        """Returns a wrong search query for the subject of a step.

        The query asks for a relation that the question does not name, such as the capital instead
        of the population, or consists of the subject alone.

        Args:
            episode: id of the run.
            decision: name of the choice for which random numbers are drawn, e.g. ``"query/2"``.
            steps: all steps of the question.
            step: the current step, in which references are replaced by earlier answers.
        """
        assert isinstance(step, Lookup | Inverse | Neighbour)
        named = {s.relation for s in steps if isinstance(s, Lookup | Inverse)} | {"neighbour"}
        subject = str(step.value if isinstance(step, Inverse) else step.subject)
        queries = [
            f"{relation.noun} {relation.preposition} {subject}"
            for key, relation in RELATIONS.items()
            if key not in named
        ]
        if isinstance(step, Inverse) or uniform(self.seed, episode, f"{decision}/form") < 2 / 3:
            return self.choose(episode, decision, queries)
        # A query with an entity alone finds common facts about it, which may include the wanted
        # fact.
        return subject

    def wrong_program(
        self, episode: str, decision: str, step: AnyStep, answers: Sequence[str]
    ) -> str:
        """Returns a wrong program, which fails or has an output that shows the mistake.

        Args:
            episode: id of the run.
            decision: name of the choice for which random numbers are drawn, e.g. ``"query/2"``.
            step: the current step.
            answers: answers of the earlier steps.
        """
        right = programs(step, answers)[0]
        options = [right[:-1]]  # an unclosed bracket
        if isinstance(step, Arithmetic):
            a, b = answers[step.a.step], answers[step.b.step]
            first, second = number_of(a), number_of(b)
            if "," in a and "," in b and step.operation != "ratio":
                sign = "+" if step.operation == "sum" else "-"
                options.append(f"print({a} {sign} {b})")  # commas make it a tuple
            if step.operation == "difference" and first and second and first != second:
                options.append(f"print({b} - {a})".replace(",", ""))
            # Python prints more than two decimal places of this number.
            long = first and second and len(repr(first / second).partition(".")[2]) > 2
            if step.operation == "ratio" and long:
                options.append(right.replace("print(round(", "print(").replace(", 2))", ")"))
        return self.choose(episode, decision, options)


def wrong_value(step: AnyStep, answers: Sequence[str]) -> str:
    """Returns a wrong answer that the results of the steps contradict.

    The wrong answer is the answer of an earlier step, the right number with a misread digit, or the
    subject of the question.

    Args:
        step: the last step, in which references are replaced by earlier answers.
        answers: answers of all steps; the last answer is right.
    """
    right = answers[-1]
    if isinstance(step, Comparison):
        return next(str(name) for name in step.subjects if name != right)
    for other in reversed(answers[:-1]):
        if other.casefold() != right.casefold():
            return other
    if number_of(right) is not None:
        return _misread(right)
    if isinstance(step, Expression | Computed):
        return f"{right}0"
    return step.value if isinstance(step, Inverse) else str(step.subject)


def _misread(number: str) -> str:
    """Returns a number with two neighbouring digits swapped, or with an additional digit."""
    for i in range(len(number) - 1, 0, -1):
        a, b = number[i - 1], number[i]
        if a.isdigit() and b.isdigit() and a != b and not (i == 1 and b == "0"):
            return number[: i - 1] + b + a + number[i + 1 :]
    return f"{number}0"
