"""Creates the tools of a run from its configuration."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from coa_jax.config.extensions import (
    Extension,
    ExtensionKind,
    Named,
    Reference,
    bind,
    find,
    is_path,
    refuse_result,
)
from coa_jax.config.fields import Bounded, OneOf, Place, Text, Variable, check
from coa_jax.config.preflight import Answer, Needs, Probe, code_needs, code_probes
from coa_jax.errors import UserError
from coa_jax.protocol import (
    LEVELS,
    TOOL_FORMS,
    add_note,
    add_protocol,
    get_protocol,
    names_with_levels,
    protocol_names,
    protocol_with_tools,
    split_level,
)
from coa_jax.run.settings import build_config
from coa_jax.storage import cache_folder, version
from coa_jax.tools.base import Tool
from coa_jax.tools.budgeted import Budgeted
from coa_jax.tools.code import CodeConfig, CodeTool
from coa_jax.tools.concurrency import run_blocking
from coa_jax.tools.corpus import read_corpus
from coa_jax.tools.crawl_page import CrawlConfig, CrawlPage
from coa_jax.tools.dense import check_retrieval, load_retriever
from coa_jax.tools.function import FunctionTool, as_tool
from coa_jax.tools.mcp_tool import McpConfig, McpTool
from coa_jax.tools.net.budget import CallBudget
from coa_jax.tools.net.chat import trusting
from coa_jax.tools.recorded import Recorded, StoreConfig, open_store
from coa_jax.tools.visual_inspector import VisualConfig
from coa_jax.tools.web_search import WebSearch, WebSearchConfig
from coa_jax.tools.wiki_search import WikiConfig, WikiSearch

TOOLS = ExtensionKind(
    "tool",
    "coa_jax.tools",
    {
        name: f"coa_jax.tools.{name}:make_tool"
        for name in ("wiki_search", "code", "web_search", "crawl_page", "visual_inspector")
    },
    offers=("config", "search"),
    adapt=as_tool,
)
"""The setting for a tool, which is a class or a function that returns a tool. Its parameters may be
``config`` (the `ToolsConfig`), ``search`` (the `WikiSearch` of the run) and options of its own.
A function that does the work of a tool itself may be used too, see `FunctionTool`.
"""

OWN_TOOLS = "own_tools"
"""Name of the new protocol of a run whose tools no registered protocol has."""

_WANTED = (
    "an object with a name, a deadline in seconds, and "
    "async def __call__(self, arguments: str, context: ToolContext) -> Observation"
)


@dataclasses.dataclass(frozen=True)
class ToolsConfig(Bounded):
    """The tools of a run, and their limits.

    Attributes:
        names: tools of the policy: built-in names or package.module:name. The built-in tools are
            ``wiki_search``, ``code``, ``web_search``, ``crawl_page`` and ``visual_inspector``. A
            name may also be a key of ``mcp`` or ``own``, or that of a tool in an installed package.
        protocol: name of a new protocol with exactly these tools. Tasks can then name this protocol
            (``questions.jsonl:protocol=NAME``). "" creates no protocol.
        wiki_search: settings of ``wiki_search``, and of the local index of ``web_search``.
        code: settings of ``code``.
        remote_key_env: environment variable with the bearer token of ``wiki_search.url`` and
            ``code.url``.
        unsafe: whether programs run, and web pages are parsed, without isolation. The environment
            variable ``COA_JAX_ALLOW_UNSAFE_CODE=1`` must be set too.
        web_search: search service of ``web_search``.
        crawl_page: settings of ``crawl_page``.
        visual_inspector: settings of ``visual_inspector`` and its vision model.
        mcp: tag -> settings of a tool of a Model Context Protocol server, see `McpConfig`.
        own: tag -> ``path`` and ``options`` of a custom tool (docs/extending.md), see `Extension`.
        budgets: tag -> price of a call, and limits on the calls of the tool in all processes of a
            run, see `CallBudget`. A call counts once, however many requests the tool makes, and not
            at all if ``store`` answers the call.
        store: settings for storing answers of tools.
    """

    names: tuple[Place, ...] = ("wiki_search", "code")
    protocol: Annotated[str, Text(100, r"([A-Za-z]\w*)?", "a name of letters and digits")] = ""
    wiki_search: WikiConfig = dataclasses.field(default_factory=WikiConfig)
    code: CodeConfig = dataclasses.field(default_factory=CodeConfig)
    remote_key_env: Variable = ""
    unsafe: bool = False
    web_search: WebSearchConfig = dataclasses.field(default_factory=WebSearchConfig)
    crawl_page: CrawlConfig = dataclasses.field(default_factory=CrawlConfig)
    visual_inspector: VisualConfig = dataclasses.field(default_factory=VisualConfig)
    mcp: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    budgets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        letters = Annotated[str, Text(100, r"[a-z][a-z0-9_]*", "letters a-z, digits and _")]
        for kind, group in (("mcp", self.mcp), ("own", self.own)):
            for tag in group:
                check(tag, letters, kind)
        for tag, settings in self.mcp.items():
            if tag in TOOLS.built_in:
                raise UserError(f"mcp.{tag} is a tool that is built in; choose another tag")
            if tag in self.own:
                raise UserError(f"mcp.{tag} is in own, too; choose another tag for one of them")
            build_config(McpConfig, settings, f"mcp.{tag}")
        for tag, settings in self.own.items():
            if not build_config(Extension, settings, f"own.{tag}").path and not TOOLS.knows(tag):
                raise UserError(f"own.{tag}.path is missing; give package.module:name")
        for tag, settings in self.budgets.items():
            build_config(CallBudget, settings, f"budgets.{tag}")
        tool_name = Annotated[str, Named(TOOLS, *self.mcp, *self.own)]
        check(self.names, tuple[tool_name, ...], "names")
        check(self.store.tools, tuple[tool_name, ...], "store.tools")
        for address in filter(None, (self.wiki_search.url, self.code.url)):
            trusting(address)  # before any setting is written to a file

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags with which the policy calls the tools in ``names``, in the same order.

        Raises:
            UserError: there is no tool with one of the names.
        """
        return tuple(_tag(name) if is_path(name) else name for name in self.names)

    def needs(self) -> Needs:
        """Returns what the tools in ``names`` need, see `config.preflight`."""
        return sum((_needs(name, self) for name in self.names), Needs())

    def probes(self, made: bool = False) -> dict[str, Probe]:
        """Returns for each tool a function that checks it before a run, see `config.preflight`.

        The key ``store`` checks the file or bucket in which answers of tools are stored.

        Args:
            made: whether the tools were created already. If True, three kinds of checks are left
                out: those of ``store``, of built-in tools that call no server, and of tools whose
                answers are replayed from ``store``.
        """
        names, store = self.names, self.store
        if made:
            local = {*TOOLS.built_in} - {*self.own}
            names = tuple(n for n in names if n not in local or _needs(n, self).servers)
            names = tuple(n for n in names if not (store.replays and store.keeps(n)))
        probes: dict[str, Probe] = {name: functools.partial(_probe, name, self) for name in names}
        return probes | ({"store": store.probe} if store.path and not made else {})


_OneTool: TypeAlias = str | Tool | Callable[..., Any]
Tools: TypeAlias = ToolsConfig | Mapping[str, Any] | Sequence[_OneTool] | _OneTool
"""Settings of tools; or a tool or a list of tools, each a name, an object or a typed function."""


def check_protocol(name: str, tools: ToolsConfig, where: str = "protocol") -> None:
    """Checks that a protocol exists, or that the settings of the tools create it.

    Args:
        name: name of the protocol.
        tools: settings of the tools.
        where: name of the setting that contains the name, used in the error message.

    Raises:
        UserError: there is no such protocol.
    """
    made = (tools.protocol, f"{tools.protocol}:{LEVELS[1]}") if tools.protocol else ()
    check(name, Annotated[str, OneOf(*names_with_levels(), *made)], where)


def make_tools(config: ToolsConfig, described: Mapping[str, str] | None = None) -> list[Tool]:
    """Creates the tools of a run, and the protocol that the settings name.

    Args:
        config: settings of the tools.
        described: tag -> description for the policy, for each tag to which the environment responds
            instead of a tool. The created protocol also has these tags.

    Raises:
        UserError: a name is unknown, a setting, package or key is missing, programs cannot be
            isolated on this machine, or ``mcp`` or ``own`` has a tool that ``names`` lacks.
    """
    for group in ("mcp", "own"):
        for tag in sorted(set(getattr(config, group)) - set(config.names)):
            raise UserError(
                f"config.tools.{group}.{tag} has no effect, because config.tools.names has only "
                f"{', '.join(config.names) or 'no tools'}; add {tag} to config.tools.names"
            )
    wiki = config.wiki_search
    passages = read_corpus(wiki.corpus) if wiki.corpus else None
    check_retrieval(wiki.retrieval, wiki.encoder)
    folder = cache_folder("wiki", wiki.corpus)
    load = functools.partial(load_retriever, wiki.retrieval, wiki.encoder, folder=folder)
    search = WikiSearch(wiki.top_k, passages=passages, load=load)
    tools = [_make_tool(name, config, search) for name in config.names]
    if config.protocol:
        user_descriptions = dict(described or {})
        new = [tool for tool in tools if isinstance(tool, McpTool) or tool.name not in TOOL_FORMS]
        descriptions = {tool.name: _description(tool) for tool in new} | user_descriptions
        pairs = [(tool.name, getattr(tool, "schema", None)) for tool in new]
        schemas = {name: schema for name, schema in pairs if isinstance(schema, Mapping)}
        tags = tuple(dict.fromkeys((*(tool.name for tool in tools), *user_descriptions)))
        add_protocol(protocol_with_tools(config.protocol, tags, descriptions, schemas))
    if "code" in config.names:
        add_note("code", _libraries_note(config, tools))
    return _stored(_budgeted(tools, config), config)


def _budgeted(tools: list[Tool], config: ToolsConfig) -> list[Tool]:
    unknown = sorted(set(config.budgets) - {tool.name for tool in tools})
    if unknown:
        raise UserError(
            f"config.tools.budgets.{unknown[0]} is the budget of no tool; the tools are "
            f"{', '.join(tool.name for tool in tools) or 'none'}"
        )
    budgets = {
        tag: build_config(CallBudget, x, f"budgets.{tag}") for tag, x in config.budgets.items()
    }
    return [Budgeted(t, budgets[t.name]) if t.name in budgets else t for t in tools]


def _make_tool(name: str, config: ToolsConfig, search: WikiSearch) -> Tool:
    """Creates the tool with a name, and checks that it has the interface of a tool."""
    if name in config.mcp:
        return McpTool(name, build_config(McpConfig, config.mcp[name], f"config.tools.mcp.{name}"))
    where = f"config.tools.own.{name}" if name in config.own else "config.tools.names"
    extension = _extension(name, config)
    path = extension.path or name
    _check_result_type(find(TOOLS, path, where), path, extension.options, where)
    tool = bind(TOOLS, path, extension.options, where)(config=config, search=search)
    fits = isinstance(tool, Tool) and isinstance(tool.name, str)
    if not fits or not isinstance(tool.deadline, int | float) or not _takes_a_call(tool):
        raise refuse_result(TOOLS, path, tool, _WANTED, where)
    tag = _tag(name) if is_path(name) else name
    if tool.name != tag:
        mismatch = f"has the name {tool.name!r}, and the config calls it {tag!r}"
        raise UserError(f"{where}: the tool {path} {mismatch}; give both the same")
    return tool


def _check_result_type(code: Any, path: str, options: Mapping[str, Any], where: str) -> None:
    """Refuses a function if neither types nor options say whether it is or creates a tool."""
    if not inspect.isfunction(code) or options or "return" in code.__annotations__:
        return
    parameters = inspect.signature(code).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.name not in TOOLS.offers]
    if required:
        raise UserError(
            f"{where}: {path} has no result type, so it is not clear whether it does the work of a "
            f"tool; write its type, such as -> str (or give the option {required[0]})"
        )


def names_function(config: ToolsConfig) -> bool:
    """Returns whether the settings name, by its import path, a function as a tool."""
    names = [name for name in config.names if name not in config.mcp]
    paths = [_extension(name, config).path or name for name in names]
    codes = [find(TOOLS, path, "config.tools.names") for path in paths]
    return any(isinstance(c, functools.partial) and c.func is FunctionTool for c in codes)


def _needs(name: str, config: ToolsConfig) -> Needs:
    if name in config.mcp:
        return build_config(McpConfig, config.mcp[name]).needs().under(f"mcp.{name}")
    extension = _extension(name, config)
    needs = code_needs(TOOLS, extension.path or name, extension.options, config=config)
    return needs.under(f"own.{name}") if name in config.own else needs


def _probe(name: str, config: ToolsConfig, seconds: float) -> Answer | Awaitable[Answer]:
    """Asks a function that creates a tool, or else the created tool, whether it can be called."""
    extension, where = _extension(name, config), "config.tools.names"
    path = extension.path or name
    if name not in config.mcp and not isinstance(find(TOOLS, path, where), type):
        for probe in code_probes(TOOLS, path, extension.options, where, config=config).values():
            return probe(seconds)
    alone = dataclasses.replace(
        with_names(config, (name,)),
        protocol="",
        budgets={},
        wiki_search=dataclasses.replace(config.wiki_search, corpus=""),
        store=StoreConfig(),
    )
    (tool,) = make_tools(alone)
    ask: Probe | None = getattr(tool, "probe", None)
    return ask(seconds) if ask else (True, "a tool of your own")  # only a call could check it


def _extension(name: str, config: ToolsConfig) -> Extension:
    return build_config(Extension, config.own.get(name, {}), f"config.tools.own.{name}")


def _tag(path: str) -> str:
    """Returns the tag of ``package.module:name``: its attribute ``name``, or else the last part."""
    code = find(TOOLS, path, "config.tools.names")
    tag = getattr(code, "name", None)
    return tag if isinstance(tag, str) else path.rpartition(":")[2]


def _takes_a_call(tool: Tool) -> bool:
    """Returns whether a tool is an asynchronous callable that takes arguments and a context."""
    called = type(tool).__call__
    try:
        inspect.signature(called).bind(tool, "", None)
    except TypeError:
        return False
    return inspect.iscoroutinefunction(called)


def _description(tool: Tool) -> str:
    """Returns the description of a tool: ``description``, or the first line of its docstring.

    Raises:
        UserError: the tool has neither.
    """
    if isinstance(tool, McpTool):
        return run_blocking(tool.describe())
    first = (type(tool).__doc__ or "").strip().partition("\n")[0]
    description = getattr(tool, "description", None) or first
    if not isinstance(description, str) or not description:
        raise UserError(
            f"config.tools.protocol: nothing says what the tool {tool.name!r} does; give its class "
            "a docstring or an attribute description"
        )
    return description


def protocol_of(tools: ToolsConfig, trained: str = "") -> tuple[str, ToolsConfig]:
    """Chooses a protocol (the tags that the policy may write) for the given tools.

    The first protocol in this list whose condition holds is chosen:

    1. the protocol that the settings of the tools name, if they name one,
    2. the protocol ``trained``, if it has a tag for at least one of the tools; `tools_for` then
       leaves out the tools without a tag,
    3. ``generalist``, if it has a tag for each of the tools,
    4. a registered protocol with exactly these tools, if there is one,
    5. a new protocol with these tools, named ``own_tools``.

    Args:
        tools: settings of the tools.
        trained: name of the protocol with which the policy was trained; "" if unknown.

    Returns:
        (name of the protocol, settings of the tools). This function does not create a new protocol:
        the returned settings contain its name, and `make_tools` creates and registers the protocol
        together with the tools.
    """
    names = set(tools.names)
    if tools.protocol:
        return tools.protocol, tools
    if trained and not set(get_protocol(trained).tools).isdisjoint(tools.tags):
        return trained, tools
    if names <= set(get_protocol("generalist").tools):
        return "generalist", tools
    same = [name for name in protocol_names() if set(get_protocol(name).tools) == names]
    if same:
        return same[0], tools
    return OWN_TOOLS, dataclasses.replace(tools, protocol=OWN_TOOLS)


def tools_for(
    protocol: str, config: ToolsConfig, described: Mapping[str, str] | None = None
) -> list[Tool]:
    """Creates those tools of a run for which a protocol has a tag.

    Args:
        protocol: name of the protocol. It may have the suffix of a level of strictness
            (``web:paper``) or of a format (``web:hermes``).
        config: settings of the tools. Tools for which the protocol has no tag are left out.
        described: see `make_tools`.

    Raises:
        UserError: the protocol is unknown, or for the reasons that `make_tools` lists.
    """
    if split_level(protocol)[0] != config.protocol:
        tags = get_protocol(protocol).tools
        pairs = zip(config.names, config.tags, strict=True)
        names = tuple(name for name, tag in pairs if tag in tags)
        config = dataclasses.replace(with_names(config, names), protocol="")
    return make_tools(config, described)


def with_names(config: ToolsConfig, names: tuple[str, ...]) -> ToolsConfig:
    """Returns the settings with the tools ``names`` only.

    The entries of ``mcp`` and ``own`` for other tools are removed.

    Raises:
        UserError: there is no tool with one of the names.
    """
    lost = {*config.mcp, *config.own} - {*names}
    mcp, own = (
        {tag: settings for tag, settings in group.items() if tag not in lost}
        for group in (config.mcp, config.own)
    )
    store = config.store
    if lost & {*store.tools}:
        stored = tuple(name for name in store.tools if name not in lost)
        # Without a name, the store would hold the answers of all tools.
        store = dataclasses.replace(store, tools=stored, path=store.path if stored else "")
    return dataclasses.replace(config, names=names, mcp=mcp, own=own, store=store)


def _libraries_note(config: ToolsConfig, tools: list[Tool]) -> str:
    """Returns the sentence about the packages that programs can import, for prompts."""
    if notes := [tool.libraries.note() for tool in tools if isinstance(tool, CodeTool)]:
        return notes[0]
    packages = ", ".join(config.code.libraries)
    return f"It can import the standard library and these packages: {packages}." if packages else ""


def _index(config: ToolsConfig) -> str:
    """Returns a text that differs between local indexes with different content or retrieval."""
    wiki = config.wiki_search
    parts: list[object] = [wiki.retrieval, wiki.top_k, 300]  # the length of passages
    parts += [dataclasses.asdict(wiki.encoder)] if wiki.retrieval != "bm25" else []
    parts += [version(wiki.corpus)] if wiki.corpus else []
    return json.dumps(parts)


def _source(tool: Tool, name: str, config: ToolsConfig) -> str:
    """Returns a text that identifies the corpus or settings on which a tool's answers depend."""
    inner = tool.tool if isinstance(tool, Budgeted) else tool
    if isinstance(inner, WikiSearch | WebSearch | CrawlPage):
        return _index(config)
    if is_path(name) or name in config.own:
        return json.dumps([name, dataclasses.asdict(_extension(name, config))], default=str)
    return ""


def listed(tools: Tools) -> ToolsConfig | Mapping[str, Any] | Sequence[_OneTool]:
    """Returns a list of given tools, or of a single tool; settings of tools stay as they are."""
    if isinstance(tools, ToolsConfig | Mapping):
        return tools
    return list(tools) if isinstance(tools, Iterable) and not isinstance(tools, str) else [tools]


def named_tools(tools: Tools) -> dict[str, Any]:
    """Converts tools to a mapping of settings: a field of `ToolsConfig` -> its value.

    Args:
        tools: settings of tools, or a tool, or a list of tools. Each tool is a name, an object or a
            typed function, and the objects and functions become entries of ``own``.

    Raises:
        UserError: a function is no tool, see `FunctionTool`, or two tools have the same name.
    """
    several = listed(tools)
    if isinstance(several, ToolsConfig):
        return dataclasses.asdict(several)
    if isinstance(several, Mapping):
        return dict(several)
    names, extensions = [], {}
    for tool in several:
        if isinstance(tool, str):
            names.append(tool)
            continue
        if not isinstance(tool, Tool):
            tool = FunctionTool(tool)
        names.append(tool.name)
        extensions[tool.name] = {"path": Reference(functools.partial(_existing, tool), tool.name)}
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"tools: two have the name {repeated[0]!r}; give each a name of its own")
    return {"names": tuple(names), **({"own": extensions} if extensions else {})}


def _existing(tool: Tool, /) -> Tool:
    """Returns an existing tool, where a function that creates a tool is required."""
    return tool


def _stored(tools: list[Tool], config: ToolsConfig) -> list[Tool]:
    settings = config.store
    if not settings.path:
        return tools
    store = open_store(settings, config.names)
    age = settings.max_age_s or None
    return [
        Recorded(tool, store, settings.mode, age, _source(tool, name, config))
        if settings.keeps(name)
        else tool
        for name, tool in zip(config.names, tools, strict=True)
    ]
