"""The transition automaton of a protocol (paper §3.1, eq 4 and the rules of App D).

One state machine serves three users: ``check`` reports every broken rule of a text, for format
rewards and for the validation of distilled data; ``allowed_next`` says which tags may come next,
for decoding under constraints and for the harness; ``advance`` is the step that both are made of.

Kinds of violation reported here:

=====================  =====================================================================
``transition``         this role may not follow the one before it
``missing_think``      a ``think`` must stand right before this role
``misplaced_think``    a ``think`` where none may stand (twice in a row, before a code reflection)
``missing_replan``     a poor grade or a low score must be followed by a plan
``answer_unverified``  an answer although the double check did not pass
``forged_observation`` the policy wrote an observation
``stray_text``         text of the policy between segments that is not blank
``empty_body``         a segment of the policy with nothing in it
``bad_body``           a body without the form that its role asks for
``after_answer``       the policy goes on after the answer
``missing_answer``     the text ends without a closed answer
=====================  =====================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from coa_jax.protocol import bodies
from coa_jax.protocol.parser import Segment, Violation, parse
from coa_jax.protocol.spec import START, THINK, BodyForm, Protocol

AuthorName = Literal["policy", "environment"]


@dataclasses.dataclass(frozen=True)
class State:
    """Where a trajectory stands.

    Attributes:
        action: the last action, or ``START``.
        thinking: a ``think`` was closed after it.
        waiting: the action is a tool call that has no observation yet.
        must_plan: the next action has to be a plan.
        may_answer: the last double check passed, or the protocol has none.
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
    """Actions that may come next, with or without a ``think`` before them."""
    actions = protocol.next_actions[state.action]
    if state.must_plan:
        return actions & {"plan"}
    if not state.may_answer:
        return actions - {protocol.answer}
    passed = protocol.must_end and protocol.form(state.action) == "score"
    return actions & {protocol.answer} if passed else actions


def allowed_after(protocol: Protocol, state: State) -> frozenset[str]:
    """Roles that may come next in a state; empty after the answer."""
    if state.waiting:
        return frozenset({protocol.observation})
    candidates = _candidates(protocol, state)
    if state.thinking:
        return frozenset(a for a in candidates if protocol.think_rule[a] != "forbidden")
    direct = frozenset(a for a in candidates if protocol.think_rule[a] != "required")
    needs_think = any(protocol.think_rule[a] != "forbidden" for a in candidates)
    return direct | {THINK} if needs_think else direct


def advance(protocol: Protocol, state: State, role: str, body: str) -> State:
    """The state after a closed segment.

    Total: a ``think`` where none may stand changes nothing, a missing observation is waited for no
    longer, and after any other illegal role the automaton goes on from that role, so that one
    mistake is reported once.
    """
    if role == THINK:
        if state.waiting or THINK in allowed_after(protocol, state):
            return dataclasses.replace(state, thinking=True, waiting=False)
        return state
    if role == protocol.observation:
        return dataclasses.replace(state, waiting=False)
    must_plan, may_answer = False, True
    if protocol.form(role) == "grades":
        must_plan = "poor" in (bodies.parse_reflection(body) or {}).values()
    elif protocol.form(role) == "score":
        score = bodies.parse_double_check(body)
        may_answer = score is not None and score >= protocol.pass_score
        must_plan = score is not None and not may_answer
    return State(role, False, role in protocol.tools, must_plan, may_answer)


def allowed_next(protocol: Protocol, segments: Iterable[Segment]) -> frozenset[str]:
    """Roles that may be opened after ``segments``; none inside a segment that is still open."""
    state = State()
    for segment in segments:
        if not segment.closed:
            return frozenset()
        if segment.role is not None:
            state = advance(protocol, state, segment.role, segment.body)
    return allowed_after(protocol, state)


def check(
    protocol: Protocol,
    segments: Sequence[Segment],
    authors: Sequence[AuthorName] | None = None,
    complete: bool = True,
) -> list[Violation]:
    """Reports every broken rule about the order and the bodies of segments.

    Args:
        protocol: the rules.
        segments: from ``parse``; its lexical violations are not repeated here.
        authors: who wrote each segment.  None takes observations for the environment's and all else
            for the policy's.  Of what the environment wrote only observations are looked at.
        complete: the text is over, so that a missing answer is a violation.

    Returns:
        Violations in the order of their positions.
    """
    if authors is not None and len(authors) != len(segments):
        raise ValueError(f"{len(authors)} authors for {len(segments)} segments")
    found: list[Violation] = []
    state, answered, end = State(), False, 0
    for index, segment in enumerate(segments):
        role, end = segment.role, segment.end
        by_policy = role != protocol.observation if authors is None else authors[index] == "policy"
        if role is None:
            if by_policy and segment.body.strip():
                kind = "after_answer" if state.action == protocol.answer else "stray_text"
                position = end - len(segment.body.lstrip())
                found.append(Violation(kind, position, "text outside of tags"))
            continue
        if role == protocol.observation and by_policy:
            found.append(
                Violation("forged_observation", segment.start, "an observation that no tool wrote")
            )
        elif role != protocol.observation and not by_policy:
            continue
        found.extend(_transition_violations(protocol, state, segment))
        if by_policy and segment.closed:
            found.extend(body_violations(protocol, segment))
            answered = answered or role == protocol.answer
        state = advance(protocol, state, role, segment.body)
    if complete and not answered:
        found.append(Violation("missing_answer", end, f"no closed <{protocol.answer}>"))
    return found


def _transition_violations(protocol: Protocol, state: State, segment: Segment) -> list[Violation]:
    role = segment.role
    assert role is not None
    if role in allowed_after(protocol, state):
        return []

    def violation(kind: str, message: str) -> list[Violation]:
        return [Violation(kind, segment.start, message)]

    if state.action == protocol.answer:
        return violation("after_answer", f"<{role}> after <{protocol.answer}>")
    if role == THINK and not state.waiting:
        return violation("misplaced_think", f"<{THINK}> may not stand here")
    after = f"<{THINK}>" if state.thinking else f"<{state.action}>"
    if state.waiting or role not in protocol.next_actions[state.action]:
        return violation("transition", f"<{role}> may not follow {after}")
    if role not in _candidates(protocol, state):
        if state.must_plan and role != protocol.answer:
            return violation("missing_replan", f"after this <{state.action}> a plan must come")
        if role != protocol.answer:
            return violation("transition", f"<{role}> although the double check passed")
        return violation("answer_unverified", f"<{role}> although the double check did not pass")
    if state.thinking:
        return violation("misplaced_think", f"no <{THINK}> may stand before <{role}>")
    return violation("missing_think", f"<{role}> without a <{THINK}> before it")


def body_violations(protocol: Protocol, segment: Segment) -> list[Violation]:
    """What is wrong with the body of a closed segment that has a role, wherever it stands."""
    assert segment.role is not None
    if not segment.body.strip():
        message = f"<{segment.role}> is empty"
        return [Violation("empty_body", segment.start, message)]
    form = protocol.form(segment.role)
    # A reader says "no" with None or with an empty tuple.
    if form == "text" or _READERS[form](segment.body) not in (None, ()):
        return []
    message = f"the body of <{segment.role}> does not have the form '{form}'"
    return [Violation("bad_body", segment.start, message)]


def violations(protocol: Protocol, text: str, complete: bool = True) -> list[Violation]:
    """Every broken rule of a text, lexical ones included, in the order of their positions.

    Authors are taken as in ``check`` with None, so a forged observation goes unseen here; use
    ``coa_jax.trajectory.trajectory_violations`` where authors are known.
    """
    if not protocol.roles:
        return []
    parsed = parse(protocol, text)
    if protocol.format is not None:
        return list(parsed.violations)
    found = [*parsed.violations, *check(protocol, parsed.segments, complete=complete)]
    return sorted(found, key=lambda violation: violation.position)
