"""Converts the message log of the teacher to a chain-of-agents trajectory.

The activation of an agent becomes a tag, and the output of the agent becomes the body of the tag.
The result of a tool becomes an observation (paper §3.2.1). Other messages between agents, such as
requests, reports and rationales, are thoughts of the single policy: they become the `think` segment
before the tag. The conversion does not depend on which system wrote the log.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from coa_jax.data.text_parts import ENVIRONMENT, POLICY
from coa_jax.data.trajectory import (
    Author,
    DistilledRecord,
    SegmentSpan,
    StopReason,
    ToolCall,
    Trajectory,
)
from coa_jax.distillation.messages import Kind, Message, MessageLog, clean
from coa_jax.model.encode import observation_text
from coa_jax.protocol import (
    START,
    Protocol,
    format_double_check,
    format_reflection,
    get_protocol,
    parse,
    parse_boxed,
    parse_double_check,
    parse_reflection,
    quote_tool_text,
)
from coa_jax.tasks.grading import grade_answer

_DEFAULT_THOUGHT: Mapping[str, str] = {
    "plan": "I split the question into steps.",
    "reflection": "I look back at the work so far.",
    "suggested_answer": "I can suggest an answer.",
    "double_check": "I check the suggested answer.",
    "answer": "The answer is settled.",
}
_OF_FOUR = re.compile(r"(?<![\d.,/-])([1-4])\s*(?:/|of|out of)\s*4\b(?![.,]\d)")
_OWN_PLACE = re.compile(
    r"\W*([1-4])(?![.,]\d)\s*(?:[-:;,.)*\u2013\u2014].*)?|.*[\s:=*]([1-4])[\s.!*]*", re.DOTALL
)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Unconvertible(ValueError):
    """Raised if a run cannot be converted to a trajectory of its protocol; the message says why."""


class _Writer:
    """Collects segments into parts; keeps thoughts until the next tag is written."""

    def __init__(self, protocol: str, thoughts: bool) -> None:
        self.rules, self.may_invent = get_protocol(protocol), thoughts
        self.count = 0  # number of the policy's segments so far
        self.invented: list[int] = []  # numbers of the segments that the run does not contain
        self.parts: list[tuple[str, str]] = []
        self.segments: list[str] = []
        self.thoughts: list[str] = []

    def think(self, text: str) -> None:
        """Adds a thought, which will be written before the next tag."""
        if text.strip():
            self.thoughts.append(text.strip())

    def take_thoughts(self) -> str:
        """Returns the thoughts that are not written yet as one text, and forgets them."""
        text, self.thoughts = " ".join(self.thoughts), []
        return text

    def tag(self, role: str, body: str, invented: bool = False) -> None:
        """Writes a tag, after the thoughts so far if the protocol allows a `think` segment here."""
        rule = self.rules.think_rule[role]
        if rule == "required" or (rule == "optional" and self.thoughts):
            thought = self.take_thoughts()
            if not (thought or invented or self.may_invent):
                raise Unconvertible(f"no thought before <{role}> (traces.completion.thoughts)")
            text = thought or _DEFAULT_THOUGHT.get(role, f"I use {role}.")
            self._add(f"<think>{text}</think>", invented=not thought)
        self._add(f"<{role}>{body}</{role}>", invented)

    def _add(self, segment: str, invented: bool) -> None:
        self.invented += [self.count] if invented else []
        self.count += 1
        self.segments.append(segment)

    def observe(self, text: str) -> None:
        """Ends the policy's part and adds a part of the environment."""
        self.close()
        text = observation_text(self.rules, quote_tool_text(self.rules, text))
        self.parts.append((ENVIRONMENT, text))

    def close(self) -> None:
        """Ends the policy's part, which contains the segments collected so far."""
        if self.segments:
            self.parts.append((POLICY, "\n".join(self.segments)))
            self.segments = []


def verdict_score(content: str) -> int | None:
    """Parses the score of a verdict, an integer from 1 to 4, from free text.

    A verdict is the judgement of a suggested answer. The function finds the score in these texts:

    - the body of a double check that has the form of the protocol;
    - a text with ``3 of 4`` or ``3/4``;
    - a text that begins or ends with its only number.

    In all other texts no number is clearly the score, so the result is None.
    """
    score = parse_double_check(content)
    if score is not None:
        return score
    scores = {int(score) for score in _OF_FOUR.findall(content)}
    if len(scores) == 1:
        return scores.pop()
    alone = _OWN_PLACE.fullmatch(content)
    if scores or alone is None or len(_NUMBER.findall(content)) != 1:
        return None
    return int(alone[1] or alone[2])


def same_answer(answer: str, other: str) -> bool:
    """Returns whether two answers are equal, disregarding case, punctuation and articles.

    The box ``\\boxed`` around an answer is disregarded too. Numbers are compared by value, as in
    graders.
    """
    answer, other = (parse_boxed(text) or text for text in (answer, other))
    same = " ".join(answer.split()) == " ".join(other.split())
    return same or grade_answer(answer, (other,)) == 1.0 or grade_answer(other, (answer,)) == 1.0


def may_replan(rules: Protocol) -> bool:
    """Returns whether a protocol allows a further plan after the first action of a trajectory."""
    return any("plan" in to for at, to in rules.next_actions.items() if at != START)


def _write_reflection(writer: _Writer, message: Message) -> None:
    grades, body = parse_reflection(message.content), message.content
    if writer.rules.think_rule["reflection"] == "forbidden":
        # No `think` may precede the review, so all thoughts so far become the review.
        if grades is None or not writer.thoughts:
            writer.think(message.content)
        body = writer.take_thoughts()
    elif grades is not None and writer.rules.form_of("reflection") == "grades":
        body = format_reflection(grades)
    writer.tag("reflection", body)


def _write(writer: _Writer, message: Message) -> None:
    rules = writer.rules
    if message.kind is Kind.QUESTION:
        return
    if message.kind is Kind.OBSERVATION:
        writer.observe(message.content)
        return
    writer.think(message.thought)
    match message.kind:
        case Kind.REQUEST | Kind.REPORT:
            writer.think(message.content)
        case Kind.PLAN:
            # If the protocol allows a single plan, later plans become thoughts.
            if may_replan(rules) or not (writer.parts or writer.segments):
                writer.tag("plan", message.content)
            else:
                writer.think(message.content)
        case Kind.CALL:
            writer.tag(message.recipient, message.content)
        case Kind.REFLECTION:
            _write_reflection(writer, message)
        case Kind.SUGGESTION:
            if "suggested_answer" in rules.roles:
                writer.tag("suggested_answer", message.content, message.invented)
            else:
                writer.think(f"The answer may be {message.content}.")
        case Kind.VERDICT if "double_check" in rules.roles:
            score = verdict_score(message.content)
            body = message.content if score is None else format_double_check(score)
            writer.tag("double_check", body, message.invented)
        case Kind.ANSWER:
            writer.tag("answer", message.content)


def corrected_itself(log: MessageLog, protocol: str) -> bool:
    """Returns whether a run replaced a suggested answer whose verification gave a low score.

    The Chain-of-Agents paper gives such runs more weight in the training data (§3.2.1).

    Args:
        log: messages of the run.
        protocol: name of the protocol, which defines the lowest score that passes.
    """
    pass_score, suggested, low = get_protocol(protocol).pass_score, "", []
    for message in log.messages:
        if message.kind is Kind.SUGGESTION:
            suggested = message.content
        elif message.kind is Kind.VERDICT:
            score = verdict_score(message.content)
            if score is not None and score < pass_score:
                low.append(suggested)
    return any(not same_answer(answer, suggested) for answer in low)


def figures_of(log: MessageLog, protocol: str) -> dict[str, Any]:
    """Returns statistics of a run by name, such as the number of tool calls, for its record.

    Args:
        log: messages of the run.
        protocol: name of the protocol, see `corrected_itself`.
    """
    return {
        "messages": len(log.messages),
        "tool_calls": len(log.calls),
        "reflections": log.count(Kind.REFLECTION),
        "double_checks": log.count(Kind.VERDICT),
        "corrected": corrected_itself(log, protocol),
        "mistakes": list(log.mistakes),
    }


def convert(
    log: MessageLog,
    protocol: str,
    gold: tuple[str, ...] = (),
    metadata: Mapping[str, Any] | None = None,
    thoughts: bool = True,
) -> DistilledRecord:
    """Converts a run of the teacher to a trajectory of one policy.

    Args:
        log: messages of the run. If the run ended without an answer, the trajectory has no answer.
        protocol: name of the protocol of the trajectory. Messages whose role has no tag in the
            protocol become thoughts.
        gold: accepted answers of the task, stored for graders.
        metadata: metadata to store in the record, in addition to statistics of the run.
        thoughts: whether a standard sentence is written if the protocol requires a thought, and
            the run has none.

    Returns:
        The record. Its parts, joined, are the text after the prompt. Unpaired surrogates, which a
        model may write, are replaced in the same way as tokenizers replace them. If segments were
        invented, such as standard thoughts, ``metadata["invented"]`` lists their indices among the
        segments of the policy, from 0.

    Raises:
        Unconvertible: a required thought is missing, and ``thoughts`` is False.
        UserError: the protocol is unknown.
    """
    writer = _Writer(protocol, thoughts)
    for message in log.messages:
        _write(writer, message)
    writer.close()
    return DistilledRecord(
        id=log.episode,
        question=clean(log.question),
        protocol=protocol,
        gold=tuple(map(clean, gold)),
        parts=tuple((author, clean(text)) for author, text in writer.parts),
        answer=clean(log.answer or ""),
        metadata={
            **(metadata or {}),
            **figures_of(log, protocol),
            **({"invented": writer.invented} if writer.invented else {}),
        },
    )


def invented_segments(record: DistilledRecord) -> frozenset[int]:
    """Returns the indices of invented segments among the policy's segments, see `convert`."""
    numbers = record.metadata.get("invented")
    if not isinstance(numbers, list | tuple):
        return frozenset()
    return frozenset(number for number in numbers if isinstance(number, int))


def as_trajectory(record: DistilledRecord, log: MessageLog) -> Trajectory:
    """Converts a run to a trajectory without token ids, for graders and reports.

    Args:
        record: result of `convert` for ``log``.
        log: messages of the run.
    """
    rules, nothing = get_protocol(record.protocol), np.zeros(0)
    spans: list[SegmentSpan] = []
    for author, text in record.parts:
        if author == ENVIRONMENT:
            spans.append(SegmentSpan(rules.observation, Author.ENVIRONMENT, text, 0, 0))
        else:
            spans += [
                SegmentSpan(s.role, Author.POLICY, text[s.start : s.end], 0, 0)
                for s in parse(rules, text).segments
            ]
    calls = []
    for call, result in itertools.pairwise(log.messages):
        if call.kind is Kind.CALL and result.kind is Kind.OBSERVATION:
            outcome = result.outcome or "ok"
            texts = call.recipient, call.content, result.content
            calls.append(ToolCall(*texts, outcome, outcome == "ok", 0.0, 0.0))
    return Trajectory(
        task_id=log.episode,
        sample_id=0,
        question=record.question,
        protocol=record.protocol,
        tokens=nothing,
        author=nothing,
        logp=nothing,
        text=record.text,
        segments=tuple(spans),
        tool_calls=tuple(calls),
        stop_reason=StopReason.EOS if log.answer is None else StopReason.ANSWER,
        reward=None,
        gold=record.gold,
        metadata=record.metadata,
    )
