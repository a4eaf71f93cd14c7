"""Chains of agents written in another format, so that the same teacher serves both.

The format gets what a tool-integrated policy has: thoughts, plans, calls, results and the answer.
A plan is a thought.  The further agents (reflection, suggested answer, double check) are left out,
with the thought before each: they are what a chain of agents adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from coa_jax.errors import UserError
from coa_jax.protocol.formats import Step
from coa_jax.protocol.parser import parse
from coa_jax.protocol.spec import THINK, Protocol

_THOUGHTS = (THINK, "plan")


def in_format(
    tags: Protocol, protocol: Protocol, parts: Iterable[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """The parts of a record in the format of a protocol.

    Args:
        tags: protocol of the parts.
        protocol: the same in the other format.
        parts: (``"policy"`` or ``"environment"``, text) in order.

    Raises:
        UserError: the parts are in a third format.
    """
    if protocol.format is None or tags.format is not None:
        raise UserError(
            f"trajectories of {tags.name} cannot be written as {protocol.name}: only those in tags "
            "can be written in another format"
        )
    steps: list[Step] = []
    thoughts: list[str] = []
    call: tuple[str, str] | None = None
    for policy, run in itertools.groupby(parts, key=lambda part: part[0] == "policy"):
        text = "".join(text for _, text in run)
        if not policy:
            if call is not None:
                steps.append(Step(tuple(thoughts), *call, _body(tags, text)))
                thoughts, call = [], None
            continue
        thought = ""
        for segment in parse(tags, text).segments:
            if segment.role is None or not segment.closed:
                continue
            if segment.role == THINK:
                thought = segment.body
                continue
            if thought and segment.role in (*_THOUGHTS, *tags.tools, tags.answer):
                thoughts.append(thought)
            thought = ""
            if segment.role in _THOUGHTS:
                thoughts.append(segment.body)
            elif segment.role in tags.tools:
                call = segment.role, segment.body
            elif segment.role == tags.answer:
                steps.append(Step(tuple(thoughts), "", segment.body))
                return protocol.format.write(protocol, steps)
    if call is None and thoughts:
        steps.append(Step(tuple(thoughts), "", ""))
    return protocol.format.write(protocol, steps)


def _body(tags: Protocol, text: str) -> str:
    """A tool's text without the tags around it."""
    name = tags.observation
    inner = text.strip().removeprefix(f"<{name}>").removesuffix(f"</{name}>")
    return inner.removeprefix("\n").removesuffix("\n")
