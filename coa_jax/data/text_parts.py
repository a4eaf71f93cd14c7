"""Determines the author of each part of a trajectory that is given as one text or as turns.

The parser of the protocol finds the observations. The environment is the author of the observations
and of the white space around them. This white space is replaced by the white space that the rollout
loop writes around observations (`wrap_observation`), so that training sees the same tokens as a
rollout. The policy is the author of all other text, which stays unchanged.

If the author of a part cannot be determined, the text is rejected as `Unusable`, because training
must not use the text of a tool as text of the policy.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

from coa_jax.protocol import (
    Protocol,
    Segment,
    get_protocol,
    known_protocols,
    parse,
    protocol_names,
    quote_tool_text,
)

Parts = tuple[tuple[str, str], ...]
"""(``"policy"`` or ``"environment"``, text) of each part, as in `DistilledRecord.parts`."""

POLICY, ENVIRONMENT = "policy", "environment"

_ROLE = re.compile(r"</?([A-Za-z_][A-Za-z0-9_]*)>")
_BRIEF = re.compile(r"Follow the (\w+) protocol(?:\.| with these tools:)")


class Unusable(ValueError):
    """Raised if a row of data cannot be used for training; the message is the reason.

    For example, it is unclear who wrote a part of the text: the policy must not learn to write the
    results of tools.
    """


def wrap_observation(protocol: Protocol, body: str) -> str:
    """Puts observation tags around a text, with the line breaks that rollouts write there."""
    return f"\n<{protocol.observation}>\n{body}\n</{protocol.observation}>\n\n"


def as_observation(protocol: Protocol, text: str) -> str:
    """Puts observation tags around a tool's result, unless it has them, see `wrap_observation`.

    Args:
        protocol: protocol with the observation tag.
        text: the result, with or without observation tags around it.
    """
    head, tail = wrap_observation(protocol, "\0").split("\0")
    if len(text) >= len(head + tail) and text.startswith(head) and text.endswith(tail):
        return text
    inner, opening, closing = text.strip(), head.strip(), tail.strip()
    if inner.startswith(opening) and inner.endswith(closing):
        return wrap_observation(protocol, _body(inner[len(opening) : -len(closing)]))
    return wrap_observation(protocol, quote_tool_text(protocol, text))


def _body(inner: str) -> str:
    """Removes the white space that separates the text of an observation from its tags.

    On each side this is one line end or, if there is no line end, all white space.
    """
    if len(inner) > 3 and inner.startswith("\r\n") and inner.endswith("\r\n"):
        return inner[2:-2]
    start = inner if inner.startswith("\n") else inner.lstrip(" \t")
    inner = start[1:] if start.startswith("\n") else inner.lstrip()
    end = inner if inner.endswith("\n") else inner.rstrip(" \t")
    return end[:-1] if end.endswith("\n") else inner.rstrip()


# --- one text ------------------------------------------------------------------------------


def parts_of(protocol: Protocol, text: str) -> Parts:
    """Splits an assistant message into the parts of the policy and of the environment.

    Args:
        protocol: protocol whose tags the text contains.
        text: the whole message. White space at both ends is ignored.

    Raises:
        Unusable: an observation is not closed or does not follow a call, an observation tag occurs
            at another place, or text without tags follows a call.
    """
    text = text.strip()
    parts: list[tuple[str, str]] = []
    policy, call = "", ""  # text of the policy so far; tool that was called at its end, or ""
    for segment in parse(protocol, text).segments:
        raw = text[segment.start : segment.end]
        if segment.role == protocol.observation:
            if not segment.closed:
                raise Unusable("an observation is never closed")
            if not call:
                raise Unusable("an observation follows no call: the policy may have written it")
            parts += [
                (POLICY, policy.strip()),
                (ENVIRONMENT, wrap_observation(protocol, _body(segment.body))),
            ]
            policy = call = ""
            continue
        policy += raw
        if segment.role is None and not raw.strip():
            continue
        if call and segment.role is None:
            raise Unusable(f"untagged text follows a call of {call}, before its observation")
        _check(protocol, segment, raw)
        call = segment.role if segment.role in protocol.tools and segment.closed else ""
    if policy.strip():
        parts.append((POLICY, policy.strip()))
    return tuple(parts)


def _check(protocol: Protocol, segment: Segment, raw: str) -> None:
    """Checks that a segment of the policy contains no observation tag, even if damaged.

    Observation tags are allowed in programs and other bodies that may quote tags. They are refused
    there if the segment is not closed, or contains its own opening tag again, because such a body
    may contain a real observation.

    Raises:
        Unusable: the segment contains an observation tag that is not allowed.
    """
    if not re.search(rf"<\s*/?\s*{protocol.observation}\b", raw, re.IGNORECASE):
        return
    complete = segment.closed and f"<{segment.role}>" not in segment.body
    if segment.role in protocol.verbatim and complete:
        return
    where = f"inside <{segment.role}>" if segment.role else "outside an observation"
    raise Unusable(f"an observation tag is {where}")


# --- turns ---------------------------------------------------------------------------------


def parts_of_turns(protocol: Protocol, turns: Parts) -> Parts:
    """Converts the turns of a conversation to `DistilledRecord.parts`.

    If no turn belongs to the environment, the text of the policy may contain observations, which
    `parts_of` finds.

    Args:
        protocol: protocol of the record.
        turns: (author, text) of each turn, in order.

    Raises:
        Unusable: a turn of the policy contains an observation tag, although the environment has
            turns of its own, or `parts_of` refuses the text.
    """
    if all(author == POLICY for author, _ in turns):
        return parts_of(protocol, "\n".join(text for _, text in turns))
    parts: list[tuple[str, str]] = []
    for author, run in itertools.groupby(turns, key=lambda turn: turn[0]):
        texts = [text for _, text in run]
        if author == ENVIRONMENT:
            parts += [(ENVIRONMENT, as_observation(protocol, text)) for text in texts]
            continue
        policy_text = "\n".join(texts).strip()
        for segment in parse(protocol, policy_text).segments:
            if segment.role == protocol.observation:
                raise Unusable("an observation stands in a turn of the assistant")
            _check(protocol, segment, policy_text[segment.start : segment.end])
        if policy_text:
            parts.append((POLICY, policy_text))
    return tuple(parts)


class Untagged(Unusable):
    """Raised if neither the text nor its instructions have tags other than ``think``."""


# --- inference of the protocol ------------------------------------------------------------------


def any_protocol() -> Protocol:
    """Returns a protocol with the tags of all registered protocols, to parse any text."""
    protocols = [get_protocol(name) for name in protocol_names()]
    return dataclasses.replace(
        get_protocol("universal"),
        name="any",
        roles=tuple(dict.fromkeys(role for protocol in protocols for role in protocol.roles)),
        tools=tuple(dict.fromkeys(tool for protocol in protocols for tool in protocol.tools)),
        verbatim=frozenset().union(*(protocol.verbatim for protocol in protocols)),
    )


def infer_protocol(text: str, instructions: str) -> tuple[str, tuple[str, ...]]:
    """Infers the protocol of a trajectory from its instructions and its tags.

    1. If the instructions name a registered protocol, this protocol is the result.
    2. Otherwise it is the protocol that has all tags of the text and of the instructions, and the
       fewest further tags.
    3. If this is no single protocol, the tags of the instructions are ignored.

    Args:
        text: text of the policy.
        instructions: the system message, and the user message without the question.

    Returns:
        (name of the protocol, the tags from which it was inferred, sorted). In the first case, the
        sentence that names the protocol takes the place of the tags.

    Raises:
        Untagged: there are no tags from which to infer a protocol.
        Unusable: no protocol has all tags of the text, or several that have them are equally small.
    """
    protocols = {name: get_protocol(name) for name in protocol_names()}
    match = _BRIEF.search(instructions)
    if match and match[1] in {protocol.name for protocol in known_protocols()}:
        return match[1], (match[0],)
    every = any_protocol()
    used = {segment.role for segment in parse(every, text).segments if segment.role is not None}
    shown = used | ({match[1] for match in _ROLE.finditer(instructions)} & set(every.roles))
    for tags in (shown, used):
        fitting = [protocol for protocol in protocols.values() if tags <= set(protocol.roles)]
        fewest = min((len(protocol.roles) for protocol in fitting), default=0)
        smallest = [protocol.name for protocol in fitting if len(protocol.roles) == fewest]
        if len(smallest) == 1:
            return smallest[0], tuple(sorted(tags))
    listed = ", ".join(sorted(used)) or "none"
    if not fitting:
        raise Unusable(f"no protocol has all of its tags ({listed})")
    raise (Untagged if shown <= {"think"} else Unusable)(
        f"its tags ({listed}) are those of several protocols ({', '.join(smallest)}); set protocol"
    )
