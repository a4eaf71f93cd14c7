"""Defines the chain-of-agents protocols as data (Chain-of-Agents paper §3.1, Tab 1, App D).

A protocol says which tags exist, which tags call tools, which action may follow which action, where
a ``think`` must stand, and which form the body of each tag must have. Parser, automaton, prompts
and rollout loop read these tables and contain no rules of their own. Therefore a new tag is enough
to add a new agent.

Each protocol exists at two levels of strictness. The level ``lenient`` is the default and has no
suffix, as in ``code``. The level ``paper`` has a suffix, as in ``code:paper``; it requires
everything that the instructions in the paper require. The level ``lenient`` accepts every text that
the level ``paper`` accepts. docs/protocol.md compares both levels with the paper.

A suffix may also be a conversation format instead of a level. For example, ``code:hermes`` has the
tools of ``code``, which are called in the style of Hermes and Qwen; see `coa_jax.protocol.formats`.

This module does not depend on tokens, models, tools or tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated

from coa_jax.config.extensions import Named
from coa_jax.config.fields import OneOf
from coa_jax.errors import UserError
from coa_jax.protocol.built_in import TOOL_FORMS
from coa_jax.protocol.formats import (
    BAD_CALL,
    FORMATS,
    TAGS,
    BodyForm,
    Protocol,
    ThinkRule,
    find_format,
)

START = "start"
"""Name of the state before the first tag."""

THINK = "think"


def _frozen(table: Mapping[str, Iterable[str]]) -> Mapping[str, frozenset[str]]:
    return {key: frozenset(value) for key, value in table.items()}


def _verifying_protocol(name: str, tools: tuple[str, ...]) -> Protocol:
    """Returns a protocol with given tools and the rules of the web agent (paper §3.1, App D.1).

    An ``answer`` requires a ``suggested_answer`` and then a ``double_check`` that passes. The
    ``answer`` may follow the ``double_check`` directly, as in the trajectories of the paper.
    """
    next_actions = {
        START: ("plan",),
        "plan": (*tools, "suggested_answer"),
        **{tool: (*tools, "reflection", "suggested_answer") for tool in tools},
        "reflection": ("plan", *tools, "suggested_answer"),
        "suggested_answer": ("double_check",),
        "double_check": ("plan", *tools, "answer"),
        "answer": (),
    }
    checks = ("reflection", "suggested_answer", "double_check")
    think_rule: dict[str, ThinkRule] = dict.fromkeys(("plan", *tools, *checks), "required")
    forms: dict[str, BodyForm] = {tool: TOOL_FORMS.get(tool, "text") for tool in tools}
    return Protocol(
        name=name,
        roles=(THINK, "plan", *tools, "observation", *checks, "answer"),
        tools=tools,
        next_actions=_frozen(next_actions),
        think_rule={**think_rule, "answer": "optional"},
        body_form={**forms, "reflection": "grades", "double_check": "score"},
        verbatim=frozenset({"observation", "code"}),
    )


def _unverified_protocol(name: str, tools: tuple[str, ...], free: bool = False) -> Protocol:
    """Returns a protocol with given tools and the rules of the multi-hop agent (paper App D).

    It has no verification, and reflections in free text. If it is free, every ``think`` is optional
    and an answer may come first.
    """
    next_actions = {
        START: ("plan", *tools, *(("answer",) if free else ())),
        "plan": (*tools, "reflection", "answer"),
        **{tool: ("plan", *tools, "reflection", "answer") for tool in tools},
        "reflection": ("plan", *tools, "answer"),
        "answer": (),
    }
    return Protocol(
        name=name,
        roles=(THINK, "plan", *tools, "observation", "reflection", "answer"),
        tools=tools,
        next_actions=_frozen(next_actions),
        think_rule=dict.fromkeys(
            ("plan", *tools, "reflection", "answer"), "optional" if free else "required"
        ),
        body_form={tool: TOOL_FORMS.get(tool, "text") for tool in tools},
        verbatim=frozenset({"observation", *({"code"} & {*tools})}),
    )


_MHQA = _unverified_protocol("mhqa", ("wiki_search",))

# A plan comes first. Then follow any number of rounds of think, code, observation and reflection,
# and finally think and answer. An answer without any round is legal, because a question may need
# no program.
_CODE = Protocol(
    name="code",  # App D.2-D.3
    roles=(THINK, "plan", "code", "observation", "reflection", "answer"),
    tools=("code",),
    next_actions=_frozen(
        {
            START: ("plan",),
            "plan": ("code", "answer"),
            "code": ("reflection",),
            "reflection": ("code", "answer"),
            "answer": (),
        }
    ),
    think_rule={
        "plan": "forbidden",
        "code": "required",
        "reflection": "forbidden",
        "answer": "required",
    },
    body_form={"code": "code", "answer": "solution"},
    verbatim=frozenset({"observation", "code", "answer"}),
)


LEVELS = ("lenient", "paper")
"""Levels of strictness of a protocol, from the less strict to the stricter level."""

Level = Annotated[str, OneOf("", *LEVELS)]
"""Type of a setting for the level. The value "" keeps the level in the name of the protocol."""

FormatName = Annotated[str, Named(FORMATS, "", TAGS)]
"""Type of a setting for the format. The value "" keeps the format in the name of the protocol."""


def _as_the_paper_demands(protocol: Protocol) -> Protocol:
    """Returns a protocol at the level ``paper``, which has these additional rules:

    * A trajectory must begin with a plan.
    * A ``reflection`` must follow each ``code`` (App D.2-D.3).
    * The answer must follow a ``double_check`` that passes (App D.1).
    * In protocols without ``double_check``, a tool must follow a plan.
    """
    demanded = {START: {"plan"}, "code": {"reflection"}}
    if "double_check" not in protocol.roles:
        demanded["plan"] = set(protocol.tools)
    table = {
        action: following & demanded.get(action, following) or following
        for action, following in protocol.next_actions.items()
    }
    return dataclasses.replace(
        protocol,
        name=f"{protocol.name}:{LEVELS[1]}",
        next_actions=table,
        must_end="double_check" in protocol.roles,
    )


def split_level(name: str) -> tuple[str, str]:
    """Splits the name of a protocol at the colon: (name, level of strictness or format).

    For example, ``code:hermes`` gives (``code``, ``hermes``). Without a colon, the second part is
    the default level ``lenient``. The level ``paper`` is stricter, see docs/protocol.md.

    Raises:
        UserError: the suffix is neither a level nor a format.
    """
    family, colon, suffix = name.partition(":")
    if colon and suffix != LEVELS[1]:
        try:
            find_format(suffix)
        except UserError as error:
            raise UserError(
                f"protocol {name!r} has no level {suffix!r}; use {family} or {family}:{LEVELS[1]} "
                f"({error})"
            ) from None
    return family, suffix or LEVELS[0]


def at_level(name: str, level: str, form: str = "") -> str:
    """Returns the name of a protocol with another level of strictness or another format.

    A name has a suffix for either a level or a format, because only the format ``tags`` has levels.

    Args:
        name: name of the protocol, with or without a suffix.
        level: new level, ``lenient`` or ``paper`` (stricter, see docs/protocol.md); "" keeps the
            present level.
        form: new format, such as ``hermes``, or ``tags`` for a chain of agents; "" keeps the
            present format.

    Raises:
        UserError: the level or the format is unknown, or the level is ``paper`` and the format is
            not ``tags``.
    """
    if level not in ("", *LEVELS):
        raise UserError(f"protocol level {level!r} is unknown; use one of: {', '.join(LEVELS)}")
    family, suffix = split_level(name)
    if form not in ("", TAGS):
        find_format(form, by_setting=True)
        suffix = form
    elif form == TAGS and suffix not in LEVELS:
        suffix = LEVELS[0]
    if suffix not in LEVELS and level == LEVELS[1]:
        raise UserError(f"only {TAGS} has the level {level}; the format {suffix} has no levels")
    chosen = suffix if suffix not in LEVELS else level or suffix
    return family if chosen == LEVELS[0] else f"{family}:{chosen}"


TURNS = Protocol(
    name="turns",
    roles=(),
    tools=(),
    next_actions={START: frozenset()},
    think_rule={},
    body_form={},
    verbatim=frozenset(),
)
"""A protocol without tags and rules. An environment answers each whole turn of the policy."""

_BUILT_IN = (
    _verifying_protocol("web", ("web_search", "crawl_page")),
    _verifying_protocol("web_wiki", ("wiki_search",)),
    _MHQA,
    _CODE,
    _verifying_protocol("generalist", ("wiki_search", "code")),
    _verifying_protocol("universal", ("web_search", "crawl_page", "code", "visual_inspector")),
    TURNS,
)
_PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in _BUILT_IN}


def protocol_names() -> tuple[str, ...]:
    """Returns the names of the registered protocols that have tags, without suffixes.

    Names that begin with ``_`` are left out, because such protocols belong to single tasks.
    """
    return tuple(name for name, p in _PROTOCOLS.items() if p.roles and name[0] != "_")


def made_protocols() -> tuple[Protocol, ...]:
    """Returns the registered protocols that are not built in, see `add_protocol`."""
    built_in = {protocol.name for protocol in _BUILT_IN}
    return tuple(made for name, made in _PROTOCOLS.items() if name not in built_in)


def names_with_levels() -> tuple[str, ...]:
    """Returns the names of the registered protocols that have tags, at both levels of strictness.

    Each protocol has a name without a suffix (level ``lenient``) and one with ``:paper``. Names
    with a format, such as ``code:hermes``, are left out.
    """
    names = protocol_names()
    return (*names, *(f"{name}:{LEVELS[1]}" for name in names))


def get_protocol(name: str) -> Protocol:
    """Returns the protocol with a given name. These protocols are built in:

    * ``web``, ``mhqa`` and ``code``: the agents of the Chain-of-Agents paper for web search,
      multi-hop questions and programs. In ``web``, the policy must check each answer with
      ``double_check``; the other two have no such check.
    * ``web_wiki``: the rules of ``web``, with the tool ``wiki_search``.
    * ``generalist``: the rules of ``web``, with the tools ``wiki_search`` and ``code``.
    * ``universal``: the rules of ``web``, with the tools ``web_search``, ``crawl_page``, ``code``
      and ``visual_inspector``.
    * ``turns``: no tags, see `TURNS`.

    Args:
        name: name of the protocol. The suffix ``:paper`` selects the stricter level ``paper`` (see
            docs/protocol.md), and a suffix such as ``:hermes`` selects a format.

    Raises:
        UserError: the protocol, level or format is unknown.
    """
    family, level = split_level(name)
    if family not in _PROTOCOLS:
        names = ", ".join(name for name in _PROTOCOLS if name[0] != "_")
        raise UserError(
            f"protocol {family!r} is unknown; use one of: {names}, or one of your tools "
            "(tools.protocol; its protocols.json is in the directory of the data or the run)"
        )
    protocol = _PROTOCOLS[family]
    if level in LEVELS:
        return _as_the_paper_demands(protocol) if level == "paper" else protocol
    return dataclasses.replace(protocol, name=name, format=find_format(level))


def add_protocol(protocol: Protocol) -> None:
    """Registers a protocol under its name, so that `get_protocol` finds it and tasks can use it.

    Raises:
        UserError: the name belongs to a built-in protocol, or contains a colon.
    """
    if protocol.name in {built_in.name for built_in in _BUILT_IN}:
        raise UserError(f"the protocol {protocol.name!r} is built in; choose another name")
    if ":" in protocol.name:
        raise UserError(f"the protocol {protocol.name!r}: choose a name without a colon")
    _PROTOCOLS[protocol.name] = protocol


def known_protocols() -> tuple[Protocol, ...]:
    """Returns all protocols that are registered in this process.

    With this result, `restore_protocols` registers the same protocols in another process.
    """
    return tuple(_PROTOCOLS.values())


def restore_protocols(protocols: Iterable[Protocol]) -> None:
    """Registers protocols that `known_protocols` returned in another process.

    Worker processes call this function, because protocols are registered per process.
    """
    _PROTOCOLS.update({protocol.name: protocol for protocol in protocols})


def add_note(tool: str, note: str) -> None:
    """Adds a sentence about a tool to the prompts of all protocols that have the tool.

    Args:
        tool: tag of the tool.
        note: the sentence, which replaces an earlier note about the tool; "" only removes an
            earlier note.
    """
    for name, protocol in _PROTOCOLS.items():
        if tool in protocol.tools and protocol.notes.get(tool, "") != note:
            _PROTOCOLS[name] = dataclasses.replace(protocol, notes={**protocol.notes, tool: note})


def protocol_with_tools(
    name: str,
    tools: tuple[str, ...],
    described: Mapping[str, str] | None = None,
    schemas: Mapping[str, Mapping[str, object]] | None = None,
    free: bool = False,
) -> Protocol:
    """Returns a new protocol with given tools and the rules of the protocol ``web``.

    The new protocol is not registered; `add_protocol` registers it.

    Args:
        name: name of the new protocol.
        tools: tags of the tools, each from ``TOOL_FORMS`` or ``described``. Without tools, the
            policy answers from memory.
        described: tag -> description for the policy, for tools that are not in ``TOOL_FORMS``. The
            body of such a tag may be any text.
        schemas: tag -> JSON schema of the arguments, for tools whose body is a JSON object.
        free: True replaces the rules of ``web`` by those of ``mhqa``, which demand no
            ``double_check`` before an answer. In addition, every ``think`` is then optional, and an
            answer may come first.

    Raises:
        UserError: ``tools`` contains a tag twice, an unknown tag, or the tag of a role, such as
            ``answer``.
    """
    described = described or {}
    unknown = [tool for tool in tools if tool not in TOOL_FORMS and tool not in described]
    if unknown or len(set(tools)) != len(tools):
        allowed = ", ".join((*TOOL_FORMS, *described))
        raise UserError(
            f"protocol {name!r} cannot have the tools {tools!r}; use any, once each, of: {allowed}"
        )
    made = _unverified_protocol(name, tools, free) if free else _verifying_protocol(name, tools)
    # Such a tool would never be called, or would be called with the policy's thoughts or answer.
    if taken := [tag for tag in tools if made.roles.count(tag) > 1 or tag == BAD_CALL]:
        raise UserError(f"a tool cannot have the name {taken[0]!r}, which a role has; rename it")
    return dataclasses.replace(made, described=dict(described), schemas=dict(schemas or {}))
