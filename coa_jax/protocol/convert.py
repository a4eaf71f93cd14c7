"""Converts records of chains of agents to another conversation format.

With this conversion, the data of one teacher can be used for every format. A converted record
contains thoughts, tool calls, their results and the answer. The text of a plan becomes a thought.
Reflections, suggested answers and double checks are dropped together with the thought before each,
because agents in other formats do not have these roles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from coa_jax.errors import UserError
from coa_jax.protocol.formats import EpisodeStep, Protocol
from coa_jax.protocol.parser import parse
from coa_jax.protocol.spec import THINK


def in_format(
    tags: Protocol, protocol: Protocol, parts: Iterable[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Converts the parts of a record from the format ``tags`` to another format.

    Args:
        tags: protocol of the record, in the format ``tags``.
        protocol: the same protocol in the new format.
        parts: (``"policy"`` or ``"environment"``, text) of each part, in order.

    Returns:
        The parts in the new format: (``"policy"`` or ``"environment"``, text) of each part.

    Raises:
        UserError: the argument ``tags`` is a protocol in another format.
    """
    if protocol.format is None or tags.format is not None:
        raise UserError(
            f"trajectories of {tags.name} cannot be written as {protocol.name}: only those in tags "
            "can be written in another format"
        )
    steps: list[EpisodeStep] = []
    thoughts: list[str] = []
    call: tuple[str, str] | None = None
    for policy, run in itertools.groupby(parts, key=lambda part: part[0] == "policy"):
        text = "".join(text for _, text in run)
        if not policy:
            if call is not None:
                steps.append(EpisodeStep(tuple(thoughts), *call, observation_body(tags, text)))
                thoughts, call = [], None
            continue
        thought = ""
        for segment in parse(tags, text).segments:
            if segment.role is None or not segment.closed:
                continue
            if segment.role == THINK:
                thought = segment.body
                continue
            if thought and segment.role in ("plan", *tags.tools, tags.answer):
                thoughts.append(thought)
            thought = ""
            if segment.role == "plan":
                thoughts.append(segment.body)
            elif segment.role in tags.tools:
                call = segment.role, segment.body
            elif segment.role == tags.answer:
                steps.append(EpisodeStep(tuple(thoughts), "", segment.body))
                return protocol.format.write(protocol, steps)
    if call is None and thoughts:
        steps.append(EpisodeStep(tuple(thoughts), "", ""))
    return protocol.format.write(protocol, steps)


def observation_body(protocol: Protocol, text: str) -> str:
    """Returns the result of a tool without the observation tags around the result."""
    name = protocol.observation
    inner = text.strip().removeprefix(f"<{name}>").removesuffix(f"</{name}>")
    return inner.removeprefix("\n").removesuffix("\n")
