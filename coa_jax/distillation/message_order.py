"""Reorders the messages of a run of any system so that a protocol allows them.

A protocol says which tags a trajectory contains, such as a plan or a tool call, and in which order.
Systems differ in what they write down: most never verify an answer, some plan late, and a chat log
has no plan at all. The rules of the conversion are:

- If the protocol has no tag for a message, the message becomes a thought.
- If the protocol requires a tag that the run lacks, words of the run become the tag, or the tag is
  invented, provided that `Completion` allows this.
- Tool calls and their results are never changed.

The automaton of the protocol checks the reordered run. A run that cannot be reordered is refused
with a reason.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

from coa_jax.config.fields import Between, Bounded
from coa_jax.data.trajectory import DistilledRecord, part_violations
from coa_jax.distillation.convert import (
    Unconvertible,
    convert,
    may_replan,
    same_answer,
    verdict_score,
)
from coa_jax.distillation.messages import Kind, Message, MessageLog
from coa_jax.distillation.readers.base import Trace
from coa_jax.protocol import (
    CRITERIA,
    START,
    TOOL_FORMS,
    Protocol,
    format_double_check,
    format_reflection,
    get_protocol,
    parse_boxed,
    parse_reflection,
    parse_solution,
)
from coa_jax.tasks.grading import grade_answer, normalize_answer, parse_number
from coa_jax.tools.words import words

_SCORE = re.compile(r"score: (-?\d+(?:\.\d+)?)\s*\Z")
_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_NO_END = re.compile(
    r"(?:^\s*\d+|(?:^|[\s(])(?:[^\W\d_]|[ei]\.[eg]|approx|ca|cf|vs|etc|nos?|fig|eq|resp|dr|mrs?|ms"
    r"|prof|st|sec|ch|pp|vol|al|incl|max|min|jr|sr|inc|u\.s))\.\Z",
    re.IGNORECASE | re.MULTILINE,
)
"""Matches the ends of list numbers, initials and abbreviations, which end no sentence."""

_LIST_NUMBER = re.compile(r"^\s*\d+[.)](?=\s|\Z)", re.MULTILINE)
_REVIEW_WORDS = 3
_REWORDED = frozenset(
    {"not", "isnt", "wasnt", "cannot", "no", "nor", "never", "neither", "none", "or", "either"}
    | {"maybe", "perhaps", "but", "instead", "rather", "except", "without", "wrong", "incorrect"}
)
"""Words that change the meaning of an answer if they are added to it."""

SEARCHES = [tag for tag, form in TOOL_FORMS.items() if form == "text"]
"""Tags of the tools that search. If a protocol has one of them, it stands for the others."""


@dataclasses.dataclass(frozen=True)
class Completion(Bounded):
    """Settings that say which tags may be added when a run of another system is converted.

    Such a system takes steps, such as a verification, for which it writes no message of its own.

    Attributes:
        plan: whether, in a run without a plan, the first thought becomes the plan.
        thoughts: whether a standard sentence, such as "I use wiki_search.", is invented if the
            protocol requires a thought where the run has none.
        verification: whether a suggested answer and its verification are invented before an answer
            that the run did not verify. On the scale from 1 (wrong) to 4, the verification scores
            4 if a tool result contains the answer, else 3. A run is refused if its answer is not
            an accepted answer, or if the protocol requires a higher score.
        review: whether the text after a tool result becomes its review (reflection), if the
            protocol requires a review and the run has none. The review is the first sentence; if it
            has fewer than three words, the next sentences are added. The remaining text is the
            thought before the next call.
        good_from, average_from: lowest scores, from 0 to 10, that become the grades good and
            average; a lower score becomes poor. The scores come from a process judge, a model that
            scored each step of the run. All criteria in the review of a step get its grade. The
            protocol requires a new plan after poor; if the run has none there, poor becomes
            average.
    """

    plan: bool = True
    thoughts: bool = False
    verification: bool = False
    review: bool = True
    good_from: Annotated[float, Between(0, 10)] = 7.0
    average_from: Annotated[float, Between(0, 10)] = 4.0


def reorder_messages(
    log: MessageLog, protocol: str, how: Completion | None = None, gold: tuple[str, ...] = ()
) -> MessageLog:
    """Reorders the messages of a run so that a protocol allows them.

    Args:
        log: the messages of the run.
        protocol: name of the protocol.
        how: tags that may be added; None for the defaults of `Completion`.
        gold: accepted answers of the question; an invented verification needs one of them.

    Raises:
        Unconvertible: the run cannot be written under this protocol.
        UserError: the protocol is unknown.
    """
    if log.answer is None:
        raise Unconvertible(f"the run has no answer: {log.error or log.ending}")
    arranged = _Arranged(get_protocol(protocol), how or Completion(), gold)
    for position, message in enumerate(log.messages):
        arranged.add_message(message, log.messages[position + 1 :])
    messages = tuple(dataclasses.replace(m, index=i) for i, m in enumerate(arranged.messages))
    return dataclasses.replace(log, protocol=protocol, messages=messages)


def trajectory_of(
    trace: Trace, protocol: str, how: Completion | None = None
) -> tuple[MessageLog, DistilledRecord]:
    """Converts a log of another system to a trajectory of a protocol.

    Args:
        trace: the log.
        protocol: name of the protocol.
        how: settings for adding tags that the log lacks; None for the defaults of `Completion`.

    Returns:
        The reordered messages, and the trajectory as a record.

    Raises:
        Unconvertible: the log cannot be converted; the message says why.
        UserError: the protocol is unknown.
    """
    how = how or Completion()
    log = reorder_messages(trace.log, protocol, how, trace.gold)
    record = convert(log, protocol, trace.gold, trace.metadata, how.thoughts)
    broken = part_violations(protocol, record.parts)
    if broken:
        first = broken[0]
        raise Unconvertible(f"breaks the protocol {protocol}: {first.kind}: {first.message}")
    return log, record


def _words(text: str) -> list[str]:
    """Returns the words of a text without list numbers."""
    return words(_LIST_NUMBER.sub("", text))


def _first_sentence(text: str) -> tuple[str, str]:
    """Splits off the first sentence, with further sentences until there are enough words."""
    count = begin = 0
    for end in _SENTENCE.finditer(text):
        at = end.start()
        if "\n" not in end[0] and _NO_END.search(text, max(begin, at - 20), at):
            continue
        count += len(_words(text[begin:at]))
        if count >= _REVIEW_WORDS:
            return text[:at].strip(), text[end.end() :].strip()
        begin = at
    return text.strip(), ""


def _rewords(suggested: str, answer: str) -> bool:
    """Returns whether an answer is the suggested answer in other words.

    This is so if the answers are equal, or if one answer contains all words of the other in a row
    and the additional words contain no negation or alternative, as in "Paris" and "It is Paris, in
    France.". Two different numbers are never the same answer.
    """
    if same_answer(suggested, answer):
        return True
    if parse_number(suggested) and parse_number(answer):
        return False
    texts = (f" {normalize_answer(text)} " for text in (suggested, answer))
    short, long = sorted(texts, key=len)
    if not short.strip() or short not in long:
        return False
    before, _, behind = long.partition(short)
    return not _REWORDED & {*before.split(), *behind.split()}


class _Arranged:
    """The reordered messages so far, and the last tag that these messages write."""

    def __init__(self, rules: Protocol, how: Completion, gold: tuple[str, ...]) -> None:
        self.rules, self.how, self.gold = rules, how, gold
        self.messages: list[Message] = []
        self.last = START
        self.passed = False
        self.suggested = ""
        self.spoken = 0  # number of self.messages up to the last written tag
        self.reviews = rules.next_actions.get("code") == frozenset({"reflection"})
        self._tags = re.compile("|".join(f"</?{role}>" for role in rules.roles))

    def add_message(self, message: Message, rest: tuple[Message, ...]) -> None:
        """Adds a message, after changes that the protocol requires."""
        message = self._without_tags(message)
        match message.kind:
            case Kind.PLAN:
                self._tag_or_say("plan", message)
            case Kind.CALL:
                self._call(message)
            case Kind.REFLECTION:
                self._reflection(message, rest)
            case Kind.SUGGESTION:
                self.suggested = message.content
                self._append("suggested_answer", self._before_action(message))
            case Kind.VERDICT:
                self.passed = (verdict_score(message.content) or 0) >= self.rules.pass_score
                self._append("double_check", message)
            case Kind.ANSWER:
                self._answer(message)
            case _:
                self.messages.append(message)

    # --- kinds of messages -----------------------------------------------------------------

    def _tag_or_say(self, role: str, message: Message) -> None:
        """Writes a message under its tag if the protocol allows the tag here, else as a thought."""
        # `convert` writes a later plan as a thought if the protocol allows a single plan.
        later = role == "plan" and not may_replan(self.rules) and not self.reviews
        if later or role in self.rules.next_actions[self.last]:
            self._append(role, message)
        else:
            self._append_report(message)

    def _call(self, message: Message) -> None:
        message = self._before_action(message)
        tag = message.recipient
        if tag not in self.rules.tools and tag in SEARCHES:
            tag = next((name for name in SEARCHES if name in self.rules.tools), tag)
        if tag not in self.rules.tools:
            raise Unconvertible(
                f"calls {message.recipient}, for which the protocol {self.rules.name} has no tag"
            )
        self._append(tag, dataclasses.replace(message, recipient=tag))

    def _reflection(self, message: Message, rest: tuple[Message, ...]) -> None:
        scored, grades = _SCORE.match(message.content), self.rules.form_of("reflection") == "grades"
        if scored and grades:
            grade = self._grade(float(scored[1]), rest)
            body = format_reflection(dict.fromkeys(CRITERIA, grade))
            message = dataclasses.replace(message, content=body)
        elif scored:
            words = message.thought or message.content
            message = dataclasses.replace(message, content=words, thought="")
        if grades and parse_reflection(message.content) is None:
            self._append_report(message)
        else:
            self._tag_or_say("reflection", message)

    def _grade(self, score: float, rest: tuple[Message, ...]) -> str:
        if score >= self.how.good_from:
            return "good"
        quiet = (Kind.REPORT, Kind.REQUEST)
        following = next((m.kind for m in rest if m.kind not in quiet), None)
        if score >= self.how.average_from or following is not Kind.PLAN:
            return "average"
        return "poor"

    def _answer(self, message: Message) -> None:
        message = self._before_action(message)
        rules = self.rules
        if "double_check" in rules.roles and not (self.last == "double_check" and self.passed):
            if not self.how.verification:
                raise Unconvertible("the answer is not verified (traces.completion.verification)")
            self._verify(message)
            message = dataclasses.replace(message, thought="")
        elif "double_check" in rules.roles and not _rewords(self.suggested, message.content):
            raise Unconvertible("the answer is another one than the suggested answer that passed")
        if rules.form_of(rules.answer) == "solution" and parse_solution(message.content) is None:
            boxed = f"\\boxed{{{message.content.strip()}}}"
            message = dataclasses.replace(message, content=boxed)
        self._append("answer", message)

    def _verify(self, answer: Message) -> None:
        """Adds a suggested answer and its score, which tells whether a tool result contains it."""
        text = parse_boxed(answer.content) or answer.content
        if grade_answer(text, self.gold) != 1.0:
            raise Unconvertible("the answer is not verified and equals no accepted answer")
        score = 4 if self._observed(text) else 3
        if score < self.rules.pass_score:
            raise Unconvertible("the answer is not verified and no tool result contains it")
        made = Message(0, "manager", "verification", Kind.SUGGESTION, answer.content)
        self._append(
            "suggested_answer", dataclasses.replace(made, thought=answer.thought, invented=True)
        )
        body = format_double_check(score)
        made = Message(0, "verification", "manager", Kind.VERDICT, body, invented=True)
        self._append("double_check", made)

    def _observed(self, answer: str) -> bool:
        """Returns whether a tool result contains an answer, or an accepted answer, as words."""
        accepted = [f" {normalize_answer(text)} " for text in (answer, *self.gold)]
        results = [m.content for m in self.messages if m.kind is Kind.OBSERVATION]
        return any(
            words.strip() and words in f" {normalize_answer(result)} "
            for result in results
            for words in accepted
        )

    # --- missing tags ----------------------------------------------------------------------

    def _before_action(self, message: Message) -> Message:
        """Adds the plan or the review that must precede an action.

        Returns:
            The action, without its thought if the thought has been used.
        """
        bare = dataclasses.replace(message, thought="")
        if self.last == START and self.rules.next_actions[START] == frozenset({"plan"}):
            words = self._pop_unused_thoughts(message.thought)
            if not words or not self.how.plan:
                raise Unconvertible("there is no plan and no thought that could stand for one")
            self._append("plan", Message(0, "planner", "manager", Kind.PLAN, words))
            return bare
        if self.rules.next_actions[self.last] == frozenset({"reflection"}):
            if self.rules.form_of("reflection") == "grades":
                raise Unconvertible("a result has neither a review nor a grade")
            words = self._pop_unused_thoughts(message.thought)
            if not words or not self.how.review:
                raise Unconvertible("a result is not reviewed, and nothing is said about it")
            first, rest = _first_sentence(words)
            if len(_words(first)) < _REVIEW_WORDS:
                raise Unconvertible(
                    f"a result is not reviewed: the words after it are fewer than {_REVIEW_WORDS}"
                )
            self._append("reflection", Message(0, "reflection", "manager", Kind.REFLECTION, first))
            return dataclasses.replace(bare, thought=rest)
        return message

    def _pop_unused_thoughts(self, last: str) -> str:
        """Removes and returns the thoughts that no tag has used yet; `last` is the newest."""
        waiting = self.messages[self.spoken :]
        used = [m for m in waiting if m.kind in (Kind.QUESTION, Kind.OBSERVATION)]
        words = [t for m in waiting if m not in used for t in (m.thought, m.content) if t.strip()]
        self.messages[self.spoken :] = used
        self.spoken = len(self.messages)
        return "\n".join([*words, *([last] if last.strip() else [])])

    # --- writing ---------------------------------------------------------------------------

    def _append(self, role: str, message: Message) -> None:
        self.messages.append(message)
        if role in self.rules.roles:
            self.last, self.spoken = role, len(self.messages)

    def _append_report(self, message: Message) -> None:
        self.messages.append(dataclasses.replace(message, kind=Kind.REPORT))

    def _without_tags(self, message: Message) -> Message:
        """Removes tags of the protocol from the prose of a message, but not from call arguments."""
        if message.kind is Kind.OBSERVATION:
            return message
        message = dataclasses.replace(message, thought=self._tags.sub("", message.thought))
        if message.kind in (Kind.CALL, Kind.ANSWER, Kind.SUGGESTION, Kind.QUESTION):
            return message
        return dataclasses.replace(message, content=self._tags.sub("", message.content))
