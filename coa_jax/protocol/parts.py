"""Finds violations of a protocol in a text whose parts have known authors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from coa_jax.protocol.automaton import AuthorName, check
from coa_jax.protocol.formats import Protocol, Segment, Violation
from coa_jax.protocol.parser import make_parser, parse
from coa_jax.protocol.spec import get_protocol


def part_violations(
    protocol: str, parts: Iterable[tuple[str, str]], ended: bool = True
) -> list[Violation]:
    """Returns the violations of a protocol in a text, in the order of their positions.

    Consecutive parts of the policy are parsed together. Each part of the environment is an
    observation, whatever text it contains. Therefore the text of a tool cannot violate a rule, and
    an observation that the policy wrote is a violation.

    Args:
        protocol: name of the protocol.
        parts: (``"policy"`` or ``"environment"``, text) of each part, in order.
        ended: whether the policy has ended its last turn. In formats other than ``tags``, a turn
            can become the answer only when it has ended.
    """
    rules = get_protocol(protocol)
    if not rules.roles:
        return []
    if rules.format is not None:
        return _format_violations(rules, parts, ended)
    segments: list[Segment] = []
    authors: list[AuthorName] = []
    violations: list[Violation] = []
    offset = 0
    for policy, run in itertools.groupby(parts, key=lambda part: part[0] == "policy"):
        texts = [text for _, text in run]
        if policy:
            parsed = parse(rules, "".join(texts))
            segments += [
                dataclasses.replace(s, start=s.start + offset, end=s.end + offset)
                for s in parsed.segments
            ]
            violations += [
                dataclasses.replace(v, position=v.position + offset) for v in parsed.violations
            ]
            authors += ["policy"] * len(parsed.segments)
            offset += sum(map(len, texts))
            continue
        for text in texts:
            if text.strip():  # blank text is no observation
                end = offset + len(text)
                segments.append(Segment(rules.observation, text, offset, end, True))
                authors.append("environment")
            offset += len(text)
    violations += check(rules, segments, authors)
    return sorted(violations, key=lambda violation: violation.position)


def _format_violations(
    rules: Protocol, parts: Iterable[tuple[str, str]], ended: bool
) -> list[Violation]:
    """Returns the violations of a text in a format other than ``tags``.

    The text of the environment is not checked.
    """
    assert rules.format is not None
    reader, segments = make_parser(rules), list[Segment]()
    policy = environment = 0  # number of characters of each author so far
    shifts: list[tuple[int, int]] = []  # these numbers after each part of the environment
    for author, text in parts:
        if author == "policy":
            segments += reader.feed(text)
            policy += len(text)
            continue
        if rules.format.turns:
            segments += reader.end_turn()
        reader.interrupt()
        environment += len(text)
        shifts.append((policy, environment))
    segments += reader.end_turn() if ended else reader.finish()

    def place(position: int) -> int:
        return position + max((shift for start, shift in shifts if start <= position), default=0)

    violations = [dataclasses.replace(v, position=place(v.position)) for v in reader.violations]
    if not any(segment.role == rules.answer for segment in segments):
        message = "the last turn is not an answer"
        violations.append(Violation("missing_answer", policy + environment, message))
    return sorted(violations, key=lambda violation: violation.position)
