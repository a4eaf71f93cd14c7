"""The chain-of-agents protocols as data (paper §3.1, Tab 1, App D).

A protocol says which tags exist, which of them call tools, which action may follow which, where a
``think`` must stand, and which form the body of each tag has. Parser, automaton, prompts and the
rollout loop read these tables and contain no rules of their own. A new agent is a new tag.

Each protocol has two levels. ``lenient``, the default, has no suffix: ``code``. The level ``paper``
requires everything that the instructions of the paper require: ``code:paper``. ``lenient`` accepts
every text that ``paper`` accepts. docs/protocol.md compares both with the paper's text.

In place of a level, the suffix can be another conversation format: ``code:hermes`` has the tools of
``code``, called in the style of Hermes and Qwen; see `coa_jax.protocol.formats`.

This module does not depend on tokens, models, tools or tasks.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from coa_jax.bounds import OneOf
from coa_jax.errors import UserError
from coa_jax.extensions import Named
from coa_jax.protocol.formats import FORMATS, TAGS, Format, find_format

START = "start"
"""The state before the first tag."""

THINK = "think"

ThinkRule = Literal["required", "optional", "forbidden"]
BodyForm = Literal["text", "grades", "score", "code", "urls", "inspection", "solution"]
"""What the body of a tag must be.

``text`` anything that is not blank; ``grades`` three ``criterion: grade`` pairs; ``score`` a
sentence with one whole number from 1 to 4; ``code`` a fenced program with optional standard input;
``urls`` addresses joined by ``|``; ``inspection`` a JSON object with ``file_path``; ``solution``
``\\boxed{...}`` or one fenced program.
"""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A set of tags and the rules for their order and bodies.

    Attributes:
        name: name of the protocol, as in `get_protocol`.
        roles: every tag: ``think`` first, then in the order in which prompts explain them.
        tools: the tags that call a tool; an observation follows each.
        next_actions: action (or ``START``) -> the actions that may follow it. ``think`` and the
            observation are not actions: their places follow from ``think_rule`` and ``tools``.
        think_rule: action -> whether a ``think`` must, may or must not stand right before it.
        body_form: tag -> form of its body; a missing tag has the form ``text``.
        verbatim: tags whose bodies may contain other tags without breaking a rule: text of the
            environment, and programs.
        described: tag -> description for the policy, for tools that the prompts do not know.
        notes: tag -> a sentence that the prompt adds about a tool, such as its packages.
        pass_score: lowest ``double_check`` score after which ``answer`` may come.
        must_end: whether only ``answer`` may follow a ``double_check`` that passed.
        observation: tag of the environment's text.
        answer: tag that ends the episode.
        schemas: tag -> JSON schema of the arguments, for a tool whose body is a JSON object.
        format: conversation format; None for tags.
    """

    name: str
    roles: tuple[str, ...]
    tools: tuple[str, ...]
    next_actions: Mapping[str, frozenset[str]]
    think_rule: Mapping[str, ThinkRule]
    body_form: Mapping[str, BodyForm]
    verbatim: frozenset[str]
    described: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pass_score: int = 3
    must_end: bool = False
    observation: str = "observation"
    answer: str = "answer"
    schemas: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    format: Format | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Closing tags at which decoding stops so that a tool can run or the episode can end."""
        return tuple(f"</{role}>" for role in (*self.tools, self.answer))

    def form(self, role: str) -> BodyForm:
        """Returns the form of the body of ``role``."""
        return self.body_form.get(role, "text")


TOOL_FORMS: Mapping[str, BodyForm] = types.MappingProxyType(
    {
        "web_search": "text",
        "wiki_search": "text",
        "crawl_page": "urls",
        "code": "code",
        "visual_inspector": "inspection",
    }
)
"""Every tool tag that a protocol can have, with the form of its arguments (paper Tab 1, App D)."""


def _frozen(table: Mapping[str, tuple[str, ...]]) -> Mapping[str, frozenset[str]]:
    return types.MappingProxyType({key: frozenset(value) for key, value in table.items()})


def _verifying(name: str, tools: tuple[str, ...]) -> Protocol:
    """Returns the web agent's automaton with any tools (paper §3.1, App D.1).

    An answer is reached only through ``suggested_answer`` and a ``double_check`` that passes. The
    ``answer`` may follow the double check directly, as in the paper's own trajectories.
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
    forms: dict[str, BodyForm] = {tool: TOOL_FORMS.get(tool, "text") for tool in tools}
    actions = ("plan", *tools, "reflection", "suggested_answer", "double_check")
    think_rule: dict[str, ThinkRule] = {action: "required" for action in actions}
    return Protocol(
        name=name,
        roles=(THINK, "plan", *tools, "observation", *actions[1 + len(tools) :], "answer"),
        tools=tools,
        next_actions=_frozen(next_actions),
        think_rule=types.MappingProxyType({**think_rule, "answer": "optional"}),
        body_form=types.MappingProxyType(
            {**forms, "reflection": "grades", "double_check": "score"}
        ),
        verbatim=frozenset({"observation", "code"}),
    )


def _mhqa() -> Protocol:
    """Six functions, no verification agent, reflection in free text (paper App D)."""
    tools = ("wiki_search",)
    next_actions = {
        START: ("plan", *tools),
        "plan": (*tools, "reflection", "answer"),
        "wiki_search": ("plan", *tools, "reflection", "answer"),
        "reflection": ("plan", *tools, "answer"),
        "answer": (),
    }
    return Protocol(
        name="mhqa",
        roles=(THINK, "plan", *tools, "observation", "reflection", "answer"),
        tools=tools,
        next_actions=_frozen(next_actions),
        think_rule=types.MappingProxyType(
            {
                "plan": "required",
                "wiki_search": "required",
                "reflection": "required",
                "answer": "required",
            }
        ),
        body_form=types.MappingProxyType({}),
        verbatim=frozenset({"observation"}),
    )


def _code() -> Protocol:
    """plan, (think, code, observation, reflection) repeated, think, answer (paper App D.2-D.3).

    Zero rounds are legal: a correct answer that needed no program is not a format error.
    """
    next_actions = {
        START: ("plan",),
        "plan": ("code", "answer"),
        "code": ("reflection",),
        "reflection": ("code", "answer"),
        "answer": (),
    }
    return Protocol(
        name="code",
        roles=(THINK, "plan", "code", "observation", "reflection", "answer"),
        tools=("code",),
        next_actions=_frozen(next_actions),
        think_rule=types.MappingProxyType(
            {
                "plan": "forbidden",
                "code": "required",
                "reflection": "forbidden",
                "answer": "required",
            }
        ),
        body_form=types.MappingProxyType({"code": "code", "answer": "solution"}),
        verbatim=frozenset({"observation", "code", "answer"}),
    )


LEVELS = ("lenient", "paper")
"""Levels of strictness of a protocol, see the module docstring."""

Level = Annotated[str, OneOf("", *LEVELS)]
"""Type of a setting for the level; "" keeps the level in the name of the protocol."""

FormatName = Annotated[str, Named(FORMATS, "", TAGS)]
"""Type of a setting for the format; "" keeps the format in the name of the protocol."""


def _as_the_paper_demands(protocol: Protocol) -> Protocol:
    """Returns the level ``paper`` of a protocol, which accepts a subset of the lenient texts.

    - A trajectory begins with a plan.
    - Every program is reviewed: ``reflection`` follows ``code`` (App D.2-D.3).
    - A ``double_check`` that passes ends the task: only the answer may follow it (App D.1).
    - In protocols without a verification agent, a plan is carried out: a tool, not the answer,
      follows the plan.
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
        next_actions=types.MappingProxyType(table),
        must_end="double_check" in protocol.roles,
    )


def split_level(name: str) -> tuple[str, str]:
    """Splits a protocol name into the name without a suffix, and its level or format.

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
    """Returns the name of a protocol at another level, or in another format.

    Args:
        name: name of the protocol, with or without a suffix.
        level: new level; "" keeps the level of the name.
        form: new format; "" keeps the format of the name, ``tags`` is the chain of agents.

    Raises:
        UserError: the level or the format is unknown, or a format other than tags would get the
            level ``paper``.
    """
    if level not in ("", *LEVELS):
        raise UserError(f"protocol level {level!r} is unknown; use one of: {', '.join(LEVELS)}")
    family, own = split_level(name)
    if form not in ("", TAGS):
        find_format(form, by_setting=True)
        own = form
    elif form == TAGS and own not in LEVELS:
        own = LEVELS[0]
    if own not in LEVELS and level == LEVELS[1]:
        raise UserError(f"only {TAGS} has the level {level}; the format {own} has no levels")
    chosen = own if own not in LEVELS else level or own
    return family if chosen == LEVELS[0] else f"{family}:{chosen}"


_BUILT_IN = (
    _verifying("web", ("web_search", "crawl_page")),
    _verifying("web_wiki", ("wiki_search",)),
    _mhqa(),
    _code(),
    _verifying("generalist", ("wiki_search", "code")),
    _verifying("universal", ("web_search", "crawl_page", "code", "visual_inspector")),
)
TURNS = Protocol(
    name="turns",
    roles=(),
    tools=(),
    next_actions=types.MappingProxyType({START: frozenset()}),
    think_rule=types.MappingProxyType({}),
    body_form=types.MappingProxyType({}),
    verbatim=frozenset(),
)
"""A protocol without tags and rules: whole turns of a conversation, which an environment
answers.
"""

_PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (*_BUILT_IN, TURNS)}


def protocol_names() -> tuple[str, ...]:
    """Returns the names that `get_protocol` accepts, without suffixes and without `TURNS`."""
    return tuple(name for name, protocol in _PROTOCOLS.items() if protocol.roles)


def made_protocols() -> tuple[Protocol, ...]:
    """Returns the protocols that are not built in."""
    built_in = {protocol.name for protocol in (*_BUILT_IN, TURNS)}
    return tuple(made for name, made in _PROTOCOLS.items() if name not in built_in)


def names_with_levels() -> tuple[str, ...]:
    """Returns the names that `get_protocol` accepts, each at both levels, without `TURNS`."""
    names = protocol_names()
    return (*names, *(f"{name}:{LEVELS[1]}" for name in names))


def get_protocol(name: str) -> Protocol:
    """Returns the protocol of a name.

    ``web``, ``mhqa`` and ``code`` are the paper's three agents. ``web_wiki`` is the web agent over
    an encyclopaedia. ``generalist`` is the web agent's automaton over ``wiki_search`` and ``code``.
    ``universal`` has all tools of the web and code agents and the visual inspector. ``turns`` has
    no tags, see `TURNS`.

    Args:
        name: a name, optionally followed by ``:paper`` for that level, or by a colon and a format.

    Raises:
        UserError: the protocol, level or format is unknown.
    """
    family, level = split_level(name)
    if family not in _PROTOCOLS:
        known = ", ".join(_PROTOCOLS)
        raise UserError(
            f"protocol {family!r} is unknown; use one of: {known}, or one of your tools "
            "(tools.protocol; its protocols.json stands beside the data of the run)"
        )
    protocol = _PROTOCOLS[family]
    if level in LEVELS:
        return _as_the_paper_demands(protocol) if level == "paper" else protocol
    return dataclasses.replace(protocol, name=name, format=find_format(level))


def add_protocol(protocol: Protocol) -> None:
    """Registers a protocol under its name, so that tasks can use it.

    Raises:
        UserError: the name belongs to a built-in protocol, or contains a colon.
    """
    if protocol.name in {built_in.name for built_in in (*_BUILT_IN, TURNS)}:
        raise UserError(f"the protocol {protocol.name!r} is built in; choose another name")
    if ":" in protocol.name:
        raise UserError(f"the protocol {protocol.name!r}: choose a name without a colon")
    _PROTOCOLS[protocol.name] = protocol


def known_protocols() -> tuple[Protocol, ...]:
    """All protocols of this process as they are now, for `restore_protocols` in another one."""
    return tuple(_PROTOCOLS.values())


def restore_protocols(protocols: Iterable[Protocol]) -> None:
    """Enters what `known_protocols` returned in the process that sent it."""
    _PROTOCOLS.update({protocol.name: protocol for protocol in protocols})


def add_note(tool: str, note: str) -> None:
    """Adds a sentence about a tool to the prompts of all protocols of this process.

    Args:
        tool: tag of the tool.
        note: the sentence, which replaces an earlier note; "" for none.
    """
    for name, protocol in _PROTOCOLS.items():
        if tool in protocol.tools and protocol.notes.get(tool, "") != note:
            _PROTOCOLS[name] = dataclasses.replace(protocol, notes={**protocol.notes, tool: note})


def protocol_with_tools(
    name: str,
    tools: tuple[str, ...],
    described: Mapping[str, str] | None = None,
    schemas: Mapping[str, Mapping[str, object]] | None = None,
) -> Protocol:
    """Returns the web agent's automaton with other tools, e.g. a tool not seen in training.

    Args:
        name: name of the new protocol; `add_protocol` registers it.
        tools: tags from ``TOOL_FORMS`` or ``described``, without repetition; empty for a policy
            that answers from memory.
        described: tag -> description for the policy, of tools that the prompts do not know. Their
            bodies may be any text.
        schemas: tag -> JSON schema of the arguments, see `Protocol`.

    Raises:
        UserError: ``tools`` repeats a tag, or has an unknown tag.
    """
    described = described or {}
    unknown = [tool for tool in tools if tool not in TOOL_FORMS and tool not in described]
    if unknown or len(set(tools)) != len(tools):
        known = ", ".join((*TOOL_FORMS, *described))
        raise UserError(
            f"protocol {name!r} cannot have the tools {tools!r}; use any, once each, of: {known}"
        )
    made = _verifying(name, tools)
    return dataclasses.replace(made, described=dict(described), schemas=dict(schemas or {}))
