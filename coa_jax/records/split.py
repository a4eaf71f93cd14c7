"""Determines the author of each part of a trajectory, given as one text or as turns.

The parser of the protocol finds the observations. An observation and the white space around it
belong to the environment and get the form in which the rollout loop inserts observations (`frame`).
So training sees the tokens of a rollout, whatever white space the file has there. All other text
belongs to the policy and is unchanged.

If the author of some words cannot be determined, the text is rejected as `Unusable`: training must
not learn text of a tool.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

from coa_jax.protocol import Protocol, Segment, get_protocol, parse, protocol_names, quote_tool_text

Parts = tuple[tuple[str, str], ...]
"""(``"policy"`` or ``"environment"``, text) in order, as in `DistilledRecord.parts`."""

POLICY, ENVIRONMENT = "policy", "environment"

_ROLE = re.compile(r"</?([A-Za-z_][A-Za-z0-9_]*)>")
_BRIEF = re.compile(r"Follow the (\w+) protocol\.")


class Unusable(ValueError):
    """A record that cannot be used safely for training; the message is the reason."""


def frame(protocol: Protocol, body: str) -> str:
    """Returns an observation in the form in which the rollout loop inserts it."""
    return f"\n<{protocol.observation}>\n{body}\n</{protocol.observation}>\n\n"


def is_framed(protocol: Protocol, text: str) -> bool:
    """Returns whether a text has the form of `frame`."""
    head, tail = frame(protocol, "\0").split("\0")
    return len(text) >= len(head) + len(tail) and text.startswith(head) and text.endswith(tail)


def observation(protocol: Protocol, text: str) -> str:
    """Returns a tool's result, given with or without its tags, in the form of `frame`."""
    inner, name = text.strip(), protocol.observation
    opening, closing = f"<{name}>", f"</{name}>"
    if is_framed(protocol, text):
        return text
    if inner.startswith(opening) and inner.endswith(closing):
        return frame(protocol, _body(inner[len(opening) : -len(closing)]))
    return frame(protocol, quote_tool_text(protocol, text))


def _body(inner: str) -> str:
    """Returns the text between observation tags without one line end at each side.

    On a side without a line end, the white space is only a separator and is removed.
    """
    if len(inner) > 3 and inner.startswith("\r\n") and inner.endswith("\r\n"):
        return inner[2:-2]
    start = inner if inner.startswith("\n") else inner.lstrip(" \t")
    inner = start[1:] if start.startswith("\n") else inner.lstrip()
    end = inner if inner.endswith("\n") else inner.rstrip(" \t")
    return end[:-1] if end.endswith("\n") else inner.rstrip()


# --- one text ------------------------------------------------------------------------------


def parts_of(protocol: Protocol, text: str) -> Parts:
    """Splits an assistant's turn into the parts of the policy and of the environment.

    Args:
        protocol: protocol of the tags.
        text: the whole turn; white space at its ends is ignored.

    Raises:
        Unusable: an observation is not closed, or does not follow a call; or an observation tag
            occurs anywhere else; or untagged text follows a call.
    """
    text = text.strip()
    parts: list[tuple[str, str]] = []
    said, call = "", ""  # the policy's text so far, and the tool whose call ends it
    for segment in parse(protocol, text).segments:
        raw = text[segment.start : segment.end]
        if segment.role == protocol.observation:
            if not segment.closed:
                raise Unusable("an observation is never closed")
            if not call:
                raise Unusable("an observation follows no call: the policy may have written it")
            parts += [(POLICY, said.strip()), (ENVIRONMENT, frame(protocol, _body(segment.body)))]
            said = call = ""
            continue
        blank = segment.role is None and not raw.strip()
        if not blank:
            if call and segment.role is None:
                raise Unusable(f"untagged text follows a call of {call}, before its observation")
            _check(protocol, segment, raw)
            call = segment.role if segment.role in protocol.tools and segment.closed else ""
        said += raw
    if said.strip():
        parts.append((POLICY, said.strip()))
    return tuple(parts)


def check_policy(protocol: Protocol, text: str) -> None:
    """Rejects text of the policy that contains an observation tag.

    Raises:
        Unusable: the text contains one.
    """
    for segment in parse(protocol, text).segments:
        if segment.role == protocol.observation:
            raise Unusable("an observation stands in a turn of the assistant")
        _check(protocol, segment, text[segment.start : segment.end])


def _check(protocol: Protocol, segment: Segment, raw: str) -> None:
    """Rejects an observation tag, even a damaged one, in a segment of the policy.

    A program may print such a tag. But if the tag of a program or an answer is never closed, or is
    opened again inside, its body may contain a real observation.
    """
    if not re.search(rf"<\s*/?\s*{protocol.observation}\b", raw, re.IGNORECASE):
        return
    whole = segment.closed and f"<{segment.role}>" not in segment.body
    if segment.role in protocol.verbatim and whole:
        return
    where = f"inside <{segment.role}>" if segment.role else "outside of an observation"
    raise Unusable(f"a tag of observations stands {where}")


# --- turns ---------------------------------------------------------------------------------


def parts_of_turns(protocol: Protocol, turns: Parts) -> Parts:
    """Converts the turns of a conversation to the form of `DistilledRecord.parts`.

    The turns state their authors; white space around an observation is normalised here as well.

    Args:
        protocol: protocol of the record.
        turns: (author, text) in order.

    Raises:
        Unusable: see `check_policy`; see `parts_of` if no turn belongs to the environment.
    """
    runs = [
        (author, [text for _, text in run])
        for author, run in itertools.groupby(turns, key=lambda turn: turn[0])
    ]
    if all(author == POLICY for author, _ in runs):
        return parts_of(protocol, "\n".join(text for _, text in turns))
    parts: list[tuple[str, str]] = []
    for author, texts in runs:
        if author == ENVIRONMENT:
            parts += [(ENVIRONMENT, observation(protocol, text)) for text in texts]
            continue
        said = "\n".join(texts).strip()
        check_policy(protocol, said)
        if said:
            parts.append((POLICY, said))
    return tuple(parts)


# --- inference of the protocol ------------------------------------------------------------------


def any_protocol() -> Protocol:
    """Returns a protocol with the tags of all known ones, to parse text of unknown protocol."""
    known = [get_protocol(name) for name in protocol_names()]
    return dataclasses.replace(
        get_protocol("universal"),
        name="any",
        roles=tuple(dict.fromkeys(role for protocol in known for role in protocol.roles)),
        tools=tuple(dict.fromkeys(tool for protocol in known for tool in protocol.tools)),
        verbatim=frozenset().union(*(protocol.verbatim for protocol in known)),
    )


def infer_protocol(text: str, instructions: str) -> tuple[str, tuple[str, ...]]:
    """Infers the protocol of a trajectory: the smallest one that includes all used tags.

    Used tags are those of the policy's segments and, if a protocol has them as well, the tags that
    the instructions name.

    Args:
        text: the assistant's turn.
        instructions: system message, and user message without the question.

    Returns:
        Name of the protocol, and the tags that decided, sorted.

    Raises:
        Unusable: no protocol has these tags, or several of the same size do.
    """
    known = {name: get_protocol(name) for name in protocol_names()}
    named = _BRIEF.search(instructions)
    if named and named[1] in known:
        return named[1], (named[0],)
    every = any_protocol()
    used = {segment.role for segment in parse(every, text).segments if segment.role is not None}
    shown = used | ({match[1] for match in _ROLE.finditer(instructions)} & set(every.roles))
    for tags in (shown, used):
        fitting = [protocol for protocol in known.values() if tags <= set(protocol.roles)]
        fewest = min((len(protocol.roles) for protocol in fitting), default=0)
        smallest = [protocol.name for protocol in fitting if len(protocol.roles) == fewest]
        if len(smallest) == 1:
            return smallest[0], tuple(sorted(tags))
    listed = ", ".join(sorted(used)) or "none"
    if not fitting:
        raise Unusable(f"no protocol has all of its tags ({listed})")
    raise Unusable(
        f"its tags ({listed}) are those of several protocols ({', '.join(smallest)}); set protocol"
    )
