"""Converts chains of agents to another conversation format, so that one teacher serves all formats.

The converted record has the parts of a tool-integrated agent: thoughts, plans, calls, results and
the answer. Plans become thoughts. The other agents of a chain (reflection, suggested answer, double
check) are left out, with the thought before each: baselines in other formats do not have them.
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
    """Converts the parts of a record to the format of another protocol.

    Args:
        tags: protocol of the parts, in tags.
        protocol: the same protocol in the other format.
        parts: (``"policy"`` or ``"environment"``, text) in order.

    Returns:
        Parts in the new format, as ``parts``.

    Raises:
        UserError: the parts are not written in tags.
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
    """Returns the text of a tool's result without the tags around it."""
    name = tags.observation
    inner = text.strip().removeprefix(f"<{name}>").removesuffix(f"</{name}>")
    return inner.removeprefix("\n").removesuffix("\n")
