"""Which tools a configuration makes, what they would ask, and whether that answers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

from coa_jax.errors import UserError
from coa_jax.installed import install_hint
from coa_jax.settings import build
from coa_jax.tools import page_text
from coa_jax.tools.code_libraries import find_libraries, try_imports
from coa_jax.tools.dense import check_retrieval
from coa_jax.tools.encoder import Encoder
from coa_jax.tools.make import ToolsConfig
from coa_jax.tools.mcp_tool import McpConfig, McpTool
from coa_jax.tools.net.chat import ChatConfig, trusting
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import Limits, Request, fetch
from coa_jax.tools.net.secrets import Secret
from coa_jax.tools.net.store import Store
from coa_jax.tools.sandbox.isolation import find_isolation
from coa_jax.tools.sandbox.limits import Limits as ProgramLimits
from coa_jax.tools.web_search import choose

_QUICK = Limits(total_s=5.0, connect_s=3.0, read_s=5.0, attempts=1, redirects=0)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is known of a tool.

    Attributes:
        name: its tag.
        ok: whether calls can be expected to work.
        text: how it is configured, and what is wrong.
    """

    name: str
    ok: bool
    text: str


async def findings(config: ToolsConfig) -> list[Finding]:
    """A finding for each tool of a configuration and for the store, in their order."""
    checks: dict[str, Callable[[ToolsConfig], Awaitable[tuple[bool, str]]]] = {
        "wiki_search": _wiki,
        "code": _code,
        "web_search": _web,
        "crawl_page": _crawl,
        "visual_inspector": _visual,
    }
    found: list[Awaitable[Finding]] = []
    for name in config.names:
        if name in config.mcp:
            found.append(_finding(name, _mcp(name, config)))
        else:
            found.append(_finding(name, checks[name](config)))
    if config.store.path:
        found.append(_finding("store", _store(config)))
    return list(await asyncio.gather(*found))


async def _finding(name: str, check: Awaitable[tuple[bool, str]]) -> Finding:
    try:
        ok, text = await check
    except UserError as error:
        ok, text = False, str(error)
    return Finding(name, ok, text)


async def _answers(url: str) -> tuple[bool, str]:
    """Whether a server answers at all; an error status is an answer."""
    try:
        await fetch(Request(url), _QUICK, trusting(url))
    except FetchError as error:
        reached = error.kind in ("status", "type", "redirects", "too_large", "malformed")
        return reached, f"{url} answers" if reached else f"{url}: {error.message}"
    return True, f"{url} answers"


def _with_key(ok: bool, text: str, key_env: str) -> tuple[bool, str]:
    """Adds whether a key is there; never the key."""
    if not key_env:
        return ok, text
    there = bool(Secret(key_env))
    return ok and there, f"{text}, key {key_env} {'is set' if there else 'is NOT set'}"


async def _chat(config: ChatConfig) -> tuple[bool, str]:
    ok, text = await _answers(f"{config.url.rstrip('/')}/models")
    return _with_key(ok, f"{config.model} at {text}", config.key_env)


async def _wiki(config: ToolsConfig) -> tuple[bool, str]:
    if config.wiki_url:
        return _with_key(*await _answers(config.wiki_url), config.remote_key_env)
    check_retrieval(config.retrieval, config.encoder)
    how = f"local {config.retrieval} index"
    if config.retrieval != "bm25":
        Encoder(config.encoder)  # says what is wrong with its files
        how += f" with {config.encoder.path}"
    if config.corpus:
        there = Path(config.corpus).expanduser().is_file()
        return there, f"{how} of {config.corpus}{'' if there else ', which is not there'}"
    there = _factbook()
    return there, f"{how} of the World Factbook" + ("" if there else ", not installed")


def _factbook() -> bool:
    from coa_jax.tools import factbook_pages

    try:
        factbook_pages.package_version()
    except UserError:
        return False
    return True


async def _code(config: ToolsConfig) -> tuple[bool, str]:
    if config.code_url:
        return _with_key(*await _answers(config.code_url), config.remote_key_env)
    isolation = find_isolation()
    text = f"programs run here, isolated by {isolation.backend}"
    libraries = find_libraries(config.code_libraries, isolation.interpreter)
    limits = ProgramLimits(config.code_timeout_s, config.code_cpu_s, config.code_memory_mb)
    tried = await try_imports(isolation, limits, libraries)
    return all(ok for ok, _ in tried), "; ".join([text, *(each for _, each in tried)])


async def _web(config: ToolsConfig) -> tuple[bool, str]:
    web = config.web_search
    provider = choose(web)
    if provider == "local":
        return True, f"local index (no key in {web.key_env})" if web.key_env else "local index"
    if provider not in ("serper", "searxng"):
        return True, f"provider {provider}"
    ok, text = await _answers(web.url)
    return _with_key(ok, f"{provider}: {text}", web.key_env if provider == "serper" else "")


async def _crawl(config: ToolsConfig) -> tuple[bool, str]:
    missing = page_text.missing_packages()
    if missing:
        return False, f"{', '.join(missing)} not installed; run: {install_hint('web')}"
    crawl = config.crawl_page
    parts = ["robots respected" if crawl.robots else "robots IGNORED"]
    if crawl.allow_hosts:
        parts.append(f"also allowed: {', '.join(crawl.allow_hosts)}")
    if not crawl.summarizer:
        return True, "; ".join([*parts, "no summariser: pages are shown as they are"])
    ok, text = await _chat(crawl.summarizer)
    return ok, "; ".join([*parts, f"summaries by {text}"])


async def _visual(config: ToolsConfig) -> tuple[bool, str]:
    visual = config.visual_inspector
    if not visual.chat:
        return False, "no model is configured: each call will say so"
    ok, text = await _chat(visual.chat)
    return ok, f"{text}; files: {visual.folder or 'none'}"


async def _mcp(tag: str, config: ToolsConfig) -> tuple[bool, str]:
    tool = McpTool(tag, build(McpConfig, config.mcp[tag], f"config.tools.mcp.{tag}"))
    return True, await tool.describe()


async def _store(config: ToolsConfig) -> tuple[bool, str]:
    entries = len(Store(config.store.path))
    return True, f"{config.store.mode} of {entries} answers in {config.store.path}"
