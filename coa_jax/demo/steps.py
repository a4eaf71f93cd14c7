"""Determines the progress of a scripted run from its messages.

A question is parsed to a tuple of steps (`coa_jax.demo.grammar`), or to one `Expression`.
Replaying the tool results in the log gives the answers of the completed steps, so scripted agents
need no state. The progress depends only on the question and the tool results, not on stored facts
or gold answers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Container, Sequence

from coa_jax.demo import grammar as grammar
from coa_jax.demo.expressions import Expression, read_expression
from coa_jax.demo.people_grammar import understand_people
from coa_jax.demo.relations import relation_of
from coa_jax.distillation.messages import Kind, Message

AnyStep = grammar.Step | Expression
_Search = grammar.Lookup | grammar.Inverse | grammar.Neighbour

_RESULT = re.compile(r"^\d+\. \[(.*)\]\((\S+)\)$", re.MULTILINE)
_SECTION = re.compile(r"^(.+: .+)\n(.+)$", re.MULTILINE)
_DOCUMENT = re.compile(r"Doc \d+ \(Title: (.*?)\)\n(.*?)(?=\n\nDoc \d+ \(Title: |\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@functools.lru_cache(maxsize=4096)
def steps_of(question: str) -> tuple[AnyStep, ...] | None:
    """Parses a question into the steps that lead to its answer; None if not understood."""
    if program := grammar.understand(question) or understand_people(question):
        return program.steps
    expression = read_expression(question)
    return None if expression is None else (expression,)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a scripted run has come: the steps of its question, and the answers so far.

    Attributes:
        steps: all steps of the question.
        answers: answers of the completed steps, as text.
        failures: number of calls for the current step that did not give the answer of the step.
        problem: what was wrong with the last of these failed calls; "" if no call failed.
        link: URL of the search result to open next; "" if no search result should be opened.
        evidence: source of the last answer, e.g. ``The document Botswana: Capital``.
    """

    steps: tuple[AnyStep, ...]
    answers: tuple[str, ...] = ()
    failures: int = 0
    problem: str = ""
    link: str = ""
    evidence: str = ""

    @property
    def complete(self) -> bool:
        """Whether every step has an answer."""
        return len(self.answers) == len(self.steps)

    @property
    def number(self) -> int:
        """Number of the current step, counted from 1 as in plans."""
        return len(self.answers) + 1

    @property
    def step(self) -> AnyStep:
        """The current step, in which references to earlier steps are replaced by their answers."""
        return bound(self.steps[len(self.answers)], self.answers)


def bound(step: AnyStep, answers: Sequence[str]) -> AnyStep:
    """Returns a step in which ``answers``, those of all earlier steps, replace the references."""
    return step if isinstance(step, Expression) else grammar.resolve_references(step, answers)


def wording(step: AnyStep) -> str:
    """Describes a step in words, for plans."""
    return f"compute {step.what}" if isinstance(step, Expression) else grammar.describe(step)


def operands(step: grammar.Computed, answers: Sequence[str]) -> str:
    """Describes the calculation of a step with its numbers, for example ``1,200 + 300``.

    Args:
        step: a step that computes.
        answers: answers of all earlier steps, as text.
    """
    if isinstance(step, grammar.Count):
        return f"count {answers[step.items.step]}"
    if isinstance(step, grammar.Comparison):
        values = [answers[ref.step] for ref in step.values]
        pairs = zip(step.subjects, values, strict=True)
        return f"{step.operation} of {', '.join(f'{name} {value}' for name, value in pairs)}"
    sign = {"sum": "+", "difference": "-", "ratio": "/"}[step.operation]
    return f"{answers[step.a.step]} {sign} {answers[step.b.step]}"


def tool_for(step: AnyStep) -> str:
    """Returns the tool of a step: ``code`` if the step is a calculation, else ``search``."""
    return "code" if isinstance(step, grammar.Computed | Expression) else "search"


def queries(step: AnyStep) -> tuple[str, ...]:
    """Returns search queries that may find the answer of a step, the best query first.

    Args:
        step: a step without references to other steps.
    """
    assert isinstance(step, _Search)
    if isinstance(step, grammar.Inverse):
        noun = relation_of(step.relation).noun
        other = f"country whose {noun} is {step.value}"
        return grammar.query_for(step), other, f"{step.value} {noun}"
    relation = relation_of(step.relation if isinstance(step, grammar.Lookup) else "neighbour")
    title = f"{step.subject}: {relation.title}"
    return grammar.query_for(step), title, f"{step.subject} {relation.noun}"


def programs(step: AnyStep, answers: Sequence[str]) -> tuple[str, ...]:
    """Returns Python programs that compute the answer of a step, the best program first.

    ``answers`` are the answers of all earlier steps, as text.
    """
    if isinstance(step, Expression):
        setup = f"{step.setup}\n" if step.setup else ""
        source = f"{setup}print({step.source})"
        return source, f"{setup}value = {step.source}\nprint(value)"
    assert isinstance(step, grammar.Computed)
    source = grammar.source_for(step, answers)
    return source, f"value = {source[len('print(') : -1]}\nprint(value)"


def number_of(text: str) -> float | None:
    """Parses a number with or without thousands separators; None if the text is not a number."""
    text = text.replace(",", "").strip()
    return float(text) if _NUMBER.fullmatch(text) else None


def printed(observation: str) -> str | None:
    """Returns the line that a program printed, from its observation.

    The result is None if the program did not print exactly one line.
    """
    lines = observation.removeprefix("[EXECUTED]").strip().split("\n")
    return lines[0].strip() if len(lines) == 1 else None


def _find_link(step: AnyStep, observation: Message, opened: Container[str]) -> str:
    """Returns the URL of the first unopened search result whose title fits a step, or ""."""
    assert isinstance(step, _Search)
    relation = relation_of("neighbour" if isinstance(step, grammar.Neighbour) else step.relation)
    subject_name = None if isinstance(step, grammar.Inverse) else str(step.subject).casefold()
    for title, link in _RESULT.findall(observation.content):
        subject, _, section = title.partition(": ")
        fits = subject_name in (None, subject.casefold()) and section == relation.title
        if fits and link not in opened:
            return link
    return ""


def _read_documents(step: AnyStep, observation: Message) -> tuple[str, str] | str:
    assert isinstance(step, _Search)
    pattern = _SECTION if observation.sender == "crawl_page" else _DOCUMENT
    for title, text in pattern.findall(observation.content):
        value = grammar.read_value(step, title, text)
        if value is not None:
            return value, f"The document {title}"
    return f"No document states {wording(step)}."


def _read_program(
    step: AnyStep, answers: Sequence[str], observation: Message
) -> tuple[str, str] | str:
    if observation.outcome != "ok":
        return "The program failed."
    line = printed(observation.content)
    if isinstance(step, grammar.Comparison):
        valid = line in step.subjects
        return (str(line), "The program") if valid else "It did not print one of the names."
    value = None if line is None else number_of(line)
    if line is None or value is None:
        return "It did not print one number."
    if isinstance(step, grammar.Arithmetic):
        a, b = (number_of(answers[ref.step]) for ref in (step.a, step.b))
        if step.operation == "ratio" and len(line.partition(".")[2]) > 2:
            return "It is not rounded."
        if step.operation == "difference" and a is not None and b is not None:
            return "The sign is wrong." if value * (a - b) < 0 else (line, "The program")
    return line, "The program"


def run_progress(question: str, messages: Sequence[Message]) -> Progress | None:
    """Computes how far a run has come, from its question and its messages so far.

    The result is None if the question fits no known template.
    """
    steps = steps_of(question)
    if steps is None:
        return None
    state = Progress(steps)
    opened: set[str] = set()
    for message in messages:
        if message.recipient == "crawl_page":
            opened.add(message.content)
        if message.kind is not Kind.OBSERVATION or state.complete:
            continue
        step, link = state.step, ""
        if tool_for(step) == "code":
            result = _read_program(step, state.answers, message)
        elif message.sender != "web_search":
            result = _read_documents(step, message)
        elif link := _find_link(step, message, opened):
            result = ""
        else:
            result = f"No result is about {wording(step)}."
        if isinstance(result, str):
            failures = state.failures + bool(result)
            state = dataclasses.replace(state, failures=failures, problem=result, link=link)
        else:
            state = Progress(steps, (*state.answers, result[0]), evidence=result[1])
    return state
