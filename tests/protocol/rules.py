"""Finds the violations in a text, if the environment is the author of all observations."""

from __future__ import annotations

from coa_jax.protocol import Protocol, Violation, check, parse


def violations(protocol: Protocol, text: str, complete: bool = True) -> list[Violation]:
    """Violations in the order of their positions; a missing answer only if the text is complete."""
    parsed = parse(protocol, text)
    found = [*parsed.violations, *check(protocol, parsed.segments)]
    found = [each for each in found if complete or each.kind != "missing_answer"]
    return sorted(found, key=lambda violation: violation.position)
