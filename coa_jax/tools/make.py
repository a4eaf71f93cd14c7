"""The tools of a run, from its configuration."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from coa_jax.bounds import (
    Address,
    Bounded,
    Count,
    MiB,
    Natural,
    NotNegative,
    OneOf,
    Place,
    Seconds,
    Text,
    Times,
    Variable,
    check,
)
from coa_jax.errors import UserError
from coa_jax.extensions import Extension, Kind, Named, bind, find, is_path, refuse_result
from coa_jax.protocol import (
    LEVELS,
    TOOL_FORMS,
    add_note,
    add_protocol,
    get_protocol,
    names_with_levels,
    protocol_with_tools,
    split_level,
)
from coa_jax.settings import build
from coa_jax.storage import version
from coa_jax.tools.base import Tool
from coa_jax.tools.code import CodeTool
from coa_jax.tools.code_libraries import Library
from coa_jax.tools.corpus import read_corpus
from coa_jax.tools.crawl_page import CrawlConfig, CrawlPage
from coa_jax.tools.dense import Retrieval, check_retrieval, load_retriever
from coa_jax.tools.encoder import EncoderConfig
from coa_jax.tools.mcp_tool import McpConfig, McpTool
from coa_jax.tools.net.chat import trusting
from coa_jax.tools.net.store import Store
from coa_jax.tools.recorded import Mode, Recorded
from coa_jax.tools.remote import RemoteCode, RemoteSearch
from coa_jax.tools.turns import run_blocking
from coa_jax.tools.visual_inspector import VisualConfig, VisualInspector
from coa_jax.tools.web_search import WebSearch, WebSearchConfig
from coa_jax.tools.wiki_search import WikiSearch

TOOLS = Kind(
    "tool",
    "coa_jax.tools",
    {
        name: f"coa_jax.tools.make:make_{name}"
        for name in ("wiki_search", "code", "web_search", "crawl_page", "visual_inspector")
    },
    offers=("config", "search"),
)
"""A class of tools, or a function that makes one, of ``config`` (`ToolsConfig`), of ``search`` (the
`WikiSearch` of the run) and of its options."""

_WANTED = (
    "an object with a name, a deadline in seconds, and "
    "async def __call__(self, arguments: str, context: ToolContext) -> Observation"
)


@dataclasses.dataclass(frozen=True)
class StoreConfig(Bounded):
    """Answers of tools that are kept on disk.

    Attributes:
        path: of the SQLite file, which many processes may share; "" for none.
        mode: ``cache``, ``record`` or ``replay``, see ``coa_jax.tools.recorded``.
        tools: whose answers; empty for all tools where calls are recorded or replayed, and for
            ``web_search`` and ``crawl_page``, which cost money and time, in a cache.
        max_age_s: seconds after which a cache asks again; 0 for never.
        max_entries: how many answers are kept, the youngest; 0 for all.
    """

    path: Place = ""
    mode: Mode = "cache"
    tools: tuple[Place, ...] = ()
    max_age_s: NotNegative = 0.0
    max_entries: Natural = 0

    def keeps(self, name: str) -> bool:
        """Whether the answers of a tool are kept."""
        if not self.tools:
            return self.mode != "cache" or name in ("web_search", "crawl_page")
        return name in self.tools


@dataclasses.dataclass(frozen=True)
class ToolsConfig(Bounded):
    """Which tools there are, and their limits.

    Attributes:
        names: of ``wiki_search``, ``code``, ``web_search``, ``crawl_page``, ``visual_inspector``,
            the tags in ``mcp`` and ``own``, tools of installed packages, and tools by
            ``package.module:name``.
        protocol: name of a further protocol over just these tools, which tasks can then ask for
            (``questions.jsonl:protocol=NAME``); "" for none.
        top_k: passages in an observation of ``wiki_search``.
        corpus: JSONL file with the passages of ``wiki_search``; "" for the Factbook.
        retrieval: how ``wiki_search`` and the local ``web_search`` find passages: ``bm25`` by
            words, ``dense`` by the vectors of ``encoder``, ``hybrid`` both.
        encoder: the model of dense and hybrid retrieval.
        wiki_url: ``/retrieve`` of a server that ``wiki_search`` asks instead of its own index.
        passage_chars: longest passage of free text, in characters.
        code_timeout_s: wall seconds of a program.
        code_cpu_s: processor seconds of each process of a program.
        code_memory_mb: MiB of memory of a program.
        code_output_chars: characters of a program's output that the policy reads.
        code_session: programs of a trajectory continue its earlier ones, so that variables survive
            between calls; off, each is alone, as in the paper.
        code_libraries: packages that programs may import: names (``numpy``), requirements, or
            directories with installed packages, see `coa_jax.tools.code_libraries`.  The prompt
            names them.  With ``code_url`` they are what that server has.
        code_url: ``/run_code`` of a server that runs programs instead of this machine.
        remote_key_env: environment variable with the bearer token of these two servers.
        code_unsafe: run programs without isolation; has an effect only together with the
            environment variable ``COA_JAX_ALLOW_UNSAFE_CODE=1``.
        web_search: where ``web_search`` looks.
        crawl_page: how ``crawl_page`` reads.
        visual_inspector: which model looks at images.
        mcp: tag -> settings of a tool of a Model Context Protocol server, see `McpConfig`.
        own: tag -> ``path`` and ``options`` of a tool of your own, or of one by its short name,
            see `Extension` and docs/extending.md.
        store: answers that are kept.
    """

    names: tuple[Place, ...] = ("wiki_search", "code")
    protocol: Annotated[str, Text(100, r"([A-Za-z]\w*)?", "a name of letters and digits")] = ""
    top_k: Times = 3
    corpus: Place = ""
    retrieval: Retrieval = "bm25"
    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    wiki_url: Address = ""
    passage_chars: Count = 300
    code_timeout_s: Seconds = 7.0
    code_cpu_s: Seconds = 5.0
    code_memory_mb: MiB = 5120
    code_output_chars: Count = 1536
    code_session: bool = False
    code_libraries: tuple[Library, ...] = ()
    code_url: Address = ""
    remote_key_env: Variable = ""
    code_unsafe: bool = False
    web_search: WebSearchConfig = dataclasses.field(default_factory=WebSearchConfig)
    crawl_page: CrawlConfig = dataclasses.field(default_factory=CrawlConfig)
    visual_inspector: VisualConfig = dataclasses.field(default_factory=VisualConfig)
    mcp: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, group in (("mcp", self.mcp), ("own", self.own)):
            for tag in group:
                check(
                    tag,
                    Annotated[str, Text(100, r"[a-z][a-z0-9_]*", "small letters, digits and _")],
                    kind,
                )
        for tag, settings in self.mcp.items():
            if tag in TOOLS.built_in:
                raise UserError(f"mcp.{tag} is a tool that is built in; choose another tag")
            if tag in self.own:
                raise UserError(f"mcp.{tag} is in own, too; choose another tag for one of them")
            build(McpConfig, settings, f"mcp.{tag}")
        for tag, settings in self.own.items():
            if not build(Extension, settings, f"own.{tag}").path and not TOOLS.knows(tag):
                raise UserError(f"own.{tag}.path is missing; give package.module:name")
        known = Annotated[str, Named(TOOLS, *self.mcp, *self.own)]
        check(self.names, tuple[known, ...], "names")
        check(self.store.tools, tuple[known, ...], "store.tools")
        for address in filter(None, (self.wiki_url, self.code_url)):
            trusting(address)  # before a setting is written anywhere

    @property
    def tags(self) -> tuple[str, ...]:
        """The tag of each tool in ``names``.

        Raises:
            UserError: nothing has the name of a tool.
        """
        return tuple(_tag(name) if is_path(name) else name for name in self.names)


Tools: TypeAlias = ToolsConfig | Mapping[str, Any] | Sequence[str | Tool]
"""Settings of tools, or the tools themselves: built-in ones by name, others as objects."""


def check_protocol(name: str, tools: ToolsConfig, where: str = "protocol") -> None:
    """Refuses the name of a protocol that is neither built in nor made by the tools' settings."""
    made = (tools.protocol, f"{tools.protocol}:{LEVELS[1]}") if tools.protocol else ()
    check(name, Annotated[str, OneOf(*names_with_levels(), *made)], where)


def make_tools(config: ToolsConfig, described: Mapping[str, str] | None = None) -> list[Tool]:
    """The tools, ready to be called.

    Args:
        config: the settings.
        described: tags that an environment answers, with what the policy is told of each; the
            protocol that the settings make has them too.

    Raises:
        UserError: a name is unknown, a setting, package or key is missing, or programs cannot be
            isolated on this machine.
    """
    passages = read_corpus(config.corpus) if config.corpus else None
    check_retrieval(config.retrieval, config.encoder)
    load = functools.partial(load_retriever, config.retrieval, config.encoder)
    search = WikiSearch(config.top_k, config.passage_chars, passages=passages, load=load)
    tools = [_made(name, config, search) for name in config.names]
    if config.protocol:
        own = dict(described or {})
        told = {tool.name: _description(tool) for tool in tools if _is_new(tool)}
        asked = {tool.name: getattr(tool, "schema", None) for tool in tools if _is_new(tool)}
        schemas = {name: schema for name, schema in asked.items() if isinstance(schema, Mapping)}
        tags = tuple(dict.fromkeys((*(tool.name for tool in tools), *own)))
        add_protocol(protocol_with_tools(config.protocol, tags, {**told, **own}, schemas))
    if "code" in config.names:
        add_note("code", _note(config, tools))
    return _stored(tools, config)


def _made(name: str, config: ToolsConfig, search: WikiSearch) -> Tool:
    """A tool by its name, checked against what a tool is."""
    if name in config.mcp:
        return McpTool(name, build(McpConfig, config.mcp[name], f"config.tools.mcp.{name}"))
    where = f"config.tools.own.{name}" if name in config.own else "config.tools.names"
    named = _own(name, config)
    path = named.path or name
    tool = bind(TOOLS, path, named.options, where)(config=config, search=search)
    fits = isinstance(tool, Tool) and isinstance(tool.name, str)
    if not fits or not isinstance(tool.deadline, int | float) or not _takes_a_call(tool):
        raise refuse_result(TOOLS, path, tool, _WANTED, where)
    tag = _tag(name) if is_path(name) else name
    if tool.name != tag:
        raise UserError(
            f"{where}: the tool {path} has the name {tool.name!r}, and the config calls it {tag!r};"
            " give both the same"
        )
    return tool


def _own(name: str, config: ToolsConfig) -> Extension:
    return build(Extension, config.own.get(name, {}), f"config.tools.own.{name}")


def _tag(path: str) -> str:
    """The tag of a tool by ``package.module:name``: the name of its class, or else its own."""
    found = find(TOOLS, path, "config.tools.names")
    tag = getattr(found, "name", None)
    return tag if isinstance(tag, str) else path.rpartition(":")[2]


def _takes_a_call(tool: Tool) -> bool:
    """Whether a tool can be awaited with arguments and a context."""
    called = type(tool).__call__
    try:
        inspect.signature(called).bind(tool, "", None)
    except TypeError:
        return False
    return inspect.iscoroutinefunction(called)


def _is_new(tool: Tool) -> bool:
    """Whether the prompts know nothing of the tag of a tool."""
    return isinstance(tool, McpTool) or tool.name not in TOOL_FORMS


def _description(tool: Tool) -> str:
    """What the policy is told of a tool: ``description``, or the first line of its docstring.

    Raises:
        UserError: there is neither.
    """
    if isinstance(tool, McpTool):
        return run_blocking(tool.describe())
    said = (
        getattr(tool, "description", None) or (type(tool).__doc__ or "").strip().partition("\n")[0]
    )
    if not isinstance(said, str) or not said:
        raise UserError(
            f"config.tools.protocol: nothing says what the tool {tool.name!r} does; give its class "
            "a docstring or an attribute description"
        )
    return said


def tools_for(
    protocol: str, config: ToolsConfig, described: Mapping[str, str] | None = None
) -> list[Tool]:
    """The tools that have a tag in a protocol, which may be the one that the settings make.

    Args:
        protocol: a name, with or without a level.
        config: the settings; tools that the protocol lacks are left out.
        described: see `make_tools`.

    Raises:
        UserError: the protocol is unknown, and see `make_tools`.
    """
    if split_level(protocol)[0] != config.protocol:
        known = get_protocol(protocol).tools
        pairs = zip(config.names, config.tags, strict=True)
        kept = tuple(name for name, tag in pairs if tag in known)
        config = dataclasses.replace(config, names=kept, protocol="")
    return make_tools(config, described)


def make_wiki_search(config: ToolsConfig, search: WikiSearch) -> Tool:
    """``wiki_search``: a server's, or the index of the run."""
    if config.wiki_url:
        return RemoteSearch(config.wiki_url, config.top_k, key_env=config.remote_key_env)
    search.warm_up()
    return search


def make_web_search(config: ToolsConfig, search: WikiSearch) -> Tool:
    """``web_search``, whose local provider is the index of the run."""
    return WebSearch(config.web_search, search.warm_up)


def make_crawl_page(config: ToolsConfig, search: WikiSearch) -> Tool:
    """``crawl_page``, which opens links into the index of the run too."""
    return CrawlPage(config.crawl_page, search.warm_up)


def make_visual_inspector(config: ToolsConfig) -> Tool:
    """``visual_inspector``."""
    return VisualInspector(config.visual_inspector)


def make_code(config: ToolsConfig) -> Tool:
    """``code``: a server's, or the sandbox of this machine."""
    if config.code_url:
        return RemoteCode(
            config.code_url,
            config.code_timeout_s,
            config.code_memory_mb,
            config.code_output_chars,
            key_env=config.remote_key_env,
            session=config.code_session,
        )
    return CodeTool(
        timeout_s=config.code_timeout_s,
        cpu_s=config.code_cpu_s,
        memory_mb=config.code_memory_mb,
        max_output_chars=config.code_output_chars,
        unsafe=config.code_unsafe,
        session=config.code_session,
        libraries=config.code_libraries,
    )


def _note(config: ToolsConfig, tools: list[Tool]) -> str:
    """What the prompt says of the packages that programs can import."""
    for tool in tools:
        if isinstance(tool, CodeTool):
            return tool.libraries.note()
    packages = ", ".join(config.code_libraries)
    return f"It can import the standard library and these packages: {packages}." if packages else ""


def _index(config: ToolsConfig) -> str:
    """Names what the local index holds and how it is searched."""
    parts: list[object] = [config.retrieval, config.top_k, config.passage_chars]
    if config.retrieval != "bm25":
        parts.append(dataclasses.asdict(config.encoder))
    if config.corpus:
        parts.append(version(config.corpus))
    return json.dumps(parts)


def _source(tool: Tool, name: str, config: ToolsConfig) -> str:
    """On what the answers of a tool depend beside its tag."""
    if isinstance(tool, WikiSearch | WebSearch | CrawlPage):
        return _index(config)
    if is_path(name) or name in config.own:
        return json.dumps([name, dataclasses.asdict(_own(name, config))], default=str)
    return ""


def named_tools(tools: Tools) -> dict[str, Any]:
    """Settings of `ToolsConfig` by name; of tools that are objects, ``names`` and ``own``."""
    if isinstance(tools, ToolsConfig):
        return dataclasses.asdict(tools)
    if not isinstance(tools, Sequence):
        return dict(tools)
    names, own = [], {}
    for tool in tools:
        names.append(tool if isinstance(tool, str) else tool.name)
        if not isinstance(tool, str):
            own[tool.name] = {"path": TOOLS.name_of(functools.partial(_same, tool), tool.name)}
    return {"names": tuple(names), **({"own": own} if own else {})}


def _same(tool: Tool, /) -> Tool:
    """Makes a tool that is there already."""
    return tool


def _stored(tools: list[Tool], config: ToolsConfig) -> list[Tool]:
    kept = config.store
    if not kept.path:
        return tools
    store = Store(kept.path, kept.max_entries)
    pairs = zip(config.names, tools, strict=True)
    return [
        Recorded(tool, store, kept.mode, kept.max_age_s or None, _source(tool, name, config))
        if kept.keeps(name)
        else tool
        for name, tool in pairs
    ]
