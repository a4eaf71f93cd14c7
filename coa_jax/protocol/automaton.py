"""Implements the transition automaton of a protocol.

The Chain-of-Agents paper defines the automaton in §3.1, eq 4, and its rules in App D. The automaton
has three functions. ``advance`` is the transition function. ``allowed_after`` returns the tags that
may come next, for constrained decoding and the rollout loop. ``check`` reports every violation in a
text, for the format reward and for the validation of distilled data.

The automaton reports these kinds of violations:

=====================  ==========================================================================
kind                   meaning
=====================  ==========================================================================
``transition``         the role may not follow the preceding role
``missing_think``      a ``think`` must stand right before the role, and does not
``misplaced_think``    a ``think`` stands at a forbidden place, for example after another ``think``
``missing_replan``     a poor grade or a low score is not followed by a plan
``answer_unverified``  an answer follows a double check that did not pass
``forged_observation`` the policy wrote an observation
``stray_text``         the policy wrote text other than spaces and line ends between segments
``empty_body``         the policy wrote a segment with an empty body
``bad_body``           the body does not have the form that its role requires
``after_answer``       the policy wrote more text after the answer
``missing_answer``     the text ends without a closed answer
=====================  ==========================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from coa_jax.protocol import bodies
from coa_jax.protocol.formats import BodyForm, Protocol, Segment, Violation
from coa_jax.protocol.spec import START, THINK

AuthorName = Literal["policy", "environment"]


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a protocol's automaton after the segments of a text, see `advance`.

    Attributes:
        action: the last action, or ``START`` if there was none.
        thinking: whether a ``think`` was closed after the last action.
        waiting: whether the last action is a tool call that has no observation yet.
        must_plan: whether the next action must be a plan.
        may_answer: False directly after a double check that has no score or a score below
            ``pass_score``, else True.
    """

    action: str = START
    thinking: bool = False
    waiting: bool = False
    must_plan: bool = False
    may_answer: bool = True


_READERS: dict[BodyForm, Callable[[str], object]] = {
    "grades": bodies.parse_reflection,
    "score": bodies.parse_double_check,
    "code": bodies.parse_code,
    "urls": bodies.parse_urls,
    "inspection": bodies.parse_inspection,
    "solution": bodies.parse_solution,
}


def _candidates(protocol: Protocol, state: State) -> frozenset[str]:
    """Returns the actions that may come next, whether or not a ``think`` must come before."""
    actions = protocol.next_actions[state.action]
    if state.must_plan:
        return actions & {"plan"}
    if not state.may_answer:
        return actions - {protocol.answer}
    passed = protocol.must_end and protocol.form_of(state.action) == "score"
    return actions & {protocol.answer} if passed else actions


def allowed_after(protocol: Protocol, state: State) -> frozenset[str]:
    """Returns the roles (tags) that a protocol allows next in a state; none after the answer."""
    if state.waiting:
        return frozenset({protocol.observation})
    candidates = _candidates(protocol, state)
    if state.thinking:
        return frozenset(a for a in candidates if protocol.think_rule[a] != "forbidden")
    direct = frozenset(a for a in candidates if protocol.think_rule[a] != "required")
    needs_think = any(protocol.think_rule[a] != "forbidden" for a in candidates)
    return direct | {THINK} if needs_think else direct


def advance(protocol: Protocol, state: State, role: str, body: str) -> State:
    """Returns the automaton's state after a further segment: the transition function.

    An illegal segment raises no error. The state after such a segment is chosen so that ``check``
    reports each mistake only once:

    * A misplaced ``think`` leaves the state unchanged.
    * If another segment comes in place of an observation, the automaton no longer waits for the
      observation.
    * After any other illegal segment, the automaton continues as if the segment were legal.

    Args:
        protocol: the tags, and the rules about their order.
        state: state before the segment.
        role: tag of the segment.
        body: text between the tags of the segment.
    """
    if role == THINK:
        if state.waiting or THINK in allowed_after(protocol, state):
            return dataclasses.replace(state, thinking=True, waiting=False)
        return state
    if role == protocol.observation:
        return dataclasses.replace(state, waiting=False)
    must_plan, may_answer = False, True
    if protocol.form_of(role) == "grades":
        must_plan = "poor" in (bodies.parse_reflection(body) or {}).values()
    elif protocol.form_of(role) == "score":
        score = bodies.parse_double_check(body)
        may_answer = score is not None and score >= protocol.pass_score
        must_plan = score is not None and not may_answer
    return State(role, False, role in protocol.tools, must_plan, may_answer)


def check(
    protocol: Protocol, segments: Sequence[Segment], authors: Sequence[AuthorName] | None = None
) -> list[Violation]:
    """Returns all violations of the rules about the order and the bodies of segments.

    Violations that the parser reports, such as nested tags, are not included.

    Args:
        protocol: the tags, and the rules about their order.
        segments: all segments of the text, as ``parse`` returns them.
        authors: author of each segment. With None, the environment is the author of all
            observations, and the policy of all other segments. Segments of the environment that are
            not observations are ignored.

    Returns:
        The violations in the order of their positions.
    """
    if authors is not None and len(authors) != len(segments):
        raise ValueError(f"{len(authors)} authors for {len(segments)} segments")
    violations: list[Violation] = []
    state, answered, end = State(), False, 0
    for index, segment in enumerate(segments):
        role, end = segment.role, segment.end
        by_policy = role != protocol.observation if authors is None else authors[index] == "policy"
        if role is None:
            if by_policy and segment.body.strip():
                kind = "after_answer" if state.action == protocol.answer else "stray_text"
                position = end - len(segment.body.lstrip())
                violations.append(Violation(kind, position, "text outside of tags"))
            continue
        if role == protocol.observation and by_policy:
            message = "an observation that no tool wrote"
            violations.append(Violation("forged_observation", segment.start, message))
        elif role != protocol.observation and not by_policy:
            continue
        violations.extend(_transition_violations(protocol, state, segment))
        if by_policy and segment.closed:
            violations.extend(body_violations(protocol, segment))
            answered = answered or role == protocol.answer
        state = advance(protocol, state, role, segment.body)
    if not answered:
        violations.append(Violation("missing_answer", end, f"no closed <{protocol.answer}>"))
    return violations


def _transition_violations(protocol: Protocol, state: State, segment: Segment) -> list[Violation]:
    role = segment.role
    assert role is not None
    if role in allowed_after(protocol, state):
        return []
    after = f"<{THINK}>" if state.thinking else f"<{state.action}>"
    if state.action == protocol.answer:
        kind, message = "after_answer", f"<{role}> after <{protocol.answer}>"
    elif role == THINK and not state.waiting:
        kind, message = "misplaced_think", f"<{THINK}> may not stand here"
    elif state.waiting or role not in protocol.next_actions[state.action]:
        kind, message = "transition", f"<{role}> may not follow {after}"
    elif role in _candidates(protocol, state) and state.thinking:
        kind, message = "misplaced_think", f"no <{THINK}> may stand before <{role}>"
    elif role in _candidates(protocol, state):
        kind, message = "missing_think", f"<{role}> without a <{THINK}> before it"
    elif role == protocol.answer:
        kind, message = "answer_unverified", f"<{role}> although the double check did not pass"
    elif state.must_plan:
        kind, message = "missing_replan", f"after this <{state.action}> a plan must come"
    else:
        kind, message = "transition", f"<{role}> although the double check passed"
    return [Violation(kind, segment.start, message)]


def body_violations(protocol: Protocol, segment: Segment) -> list[Violation]:
    """Returns the violations in the body of a segment, regardless of the segment's position.

    Args:
        protocol: the tags, and the formats of their bodies.
        segment: a closed segment that has a role.
    """
    assert segment.role is not None
    if not segment.body.strip():
        return [Violation("empty_body", segment.start, f"<{segment.role}> is empty")]
    form = protocol.form_of(segment.role)
    # A parser of bodies returns None or an empty tuple if the body does not have the form.
    if form == "text" or _READERS[form](segment.body) not in (None, ()):
        return []
    message = f"the body of <{segment.role}> does not have the form '{form}'"
    return [Violation("bad_body", segment.start, message)]
