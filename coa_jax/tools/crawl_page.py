"""The ``crawl_page`` tool: returns the text, or a summary, of pages whose URLs are joined by ``|``.

The pages of an observation are separated by blank lines. A page is ``Page i [address] Summary:``
and the text below, or ``Page i [address]: [Page content not accessible: why]`` (the format of the
release).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from coa_jax.bounds import Bounded, Bytes, Count, Place, Seconds, Times
from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.protocol import parse_urls
from coa_jax.tools import page_text
from coa_jax.tools.base import Observation, Outcome, ToolContext, is_repeat, time_for
from coa_jax.tools.net.address import Guard, host_of, parse_url
from coa_jax.tools.net.chat import ChatConfig, check_client
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import Limits, Request, fetch
from coa_jax.tools.net.text import clip
from coa_jax.tools.robots import Robots
from coa_jax.tools.summarize import click_intent, last_query, summarize
from coa_jax.tools.turns import Turns
from coa_jax.tools.web_search import LOCAL_HOST, MIRRORS
from coa_jax.tools.wiki_search import Index
from coa_jax.tools.worker import WorkerBusyError, WorkerError, Workers

_log = logging.getLogger(__name__)

_BAD_CALL = (
    "No address was found. Write one or more addresses that begin with http:// or https://, joined"
    " by |."
)


@dataclasses.dataclass(frozen=True)
class CrawlConfig(Bounded):
    """How pages are read.

    Attributes:
        max_pages: pages per call; further addresses are listed but not opened.
        page_chars: characters of a page in an observation. The summariser reads up to eight times
            as many characters of its text.
        timeout_s: seconds of a call, including summaries.
        page_timeout_s: seconds to fetch one page, including all attempts.
        max_bytes: maximum size of a page in bytes, decompressed.
        attempts: maximum number of attempts per page.
        robots: whether the robots.txt of sites is respected.
        allow_hosts: hosts and networks allowed besides the public ones, as in `Guard.allow`.
        blocked: hosts and path prefixes that are not opened, as in `Guard.block`.
        concurrency: pages that are read concurrently, over all calls.
        summarizer: model that writes the summaries; without one the text itself is returned.
    """

    max_pages: Times = 5
    page_chars: Count = 6000
    timeout_s: Seconds = 120.0
    page_timeout_s: Seconds = 30.0
    max_bytes: Bytes = 8 << 20
    attempts: Times = 2
    robots: bool = True
    allow_hosts: tuple[Place, ...] = ()
    blocked: tuple[Place, ...] = MIRRORS
    concurrency: Times = 16
    summarizer: ChatConfig = dataclasses.field(default_factory=ChatConfig)


class CrawlPage:
    """The tool that reads web pages.

    Attributes:
        name: "crawl_page".
        deadline: seconds a call may take.
        settings: settings on which answers depend, besides the addresses.
        tailored: whether answers depend on the result of `depends_on`.
    """

    name = "crawl_page"

    def __init__(self, config: CrawlConfig, index: Callable[[], Index]):
        """Sets up the limits; nothing is fetched or started yet.

        Args:
            config: see `CrawlConfig`.
            index: returns the local index, for links from the local search.

        Raises:
            UserError: a package is missing, or a setting is wrong.
        """
        packages = page_text.missing_packages()
        if packages:
            raise missing("crawl_page", ", ".join(packages), "web")
        if config.summarizer:
            check_client()
        for name in ("max_pages", "page_chars", "concurrency", "timeout_s"):
            if not getattr(config, name) > 0:
                raise UserError(f"crawl_page: {name} must be positive")
        self._config, self._index = config, index
        self._limits = Limits(
            total_s=min(config.page_timeout_s, config.timeout_s),
            attempts=config.attempts,
            max_bytes=config.max_bytes,
        )
        self._guard = Guard(config.allow_hosts, config.blocked)
        self._robots = Robots(self._limits, self._guard) if config.robots else None
        self._workers = Workers("coa_jax.tools.page_text:extract")
        self._turns = Turns(config.concurrency)
        self.deadline = config.timeout_s + 1.0
        self.tailored = bool(config.summarizer)
        self.settings = json.dumps(
            [
                *(config.page_chars, config.max_pages, config.robots),
                *(config.allow_hosts, config.blocked),
                *(config.summarizer.url, config.summarizer.model),
            ]
        )

    def depends_on(self, context: ToolContext) -> list[str]:
        """Returns the texts of the trajectory on which a summary depends, besides the addresses."""
        return [context.question, last_query(context), context.think.strip()]

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Reads the pages whose addresses stand between the tags, concurrently."""
        start = time.monotonic()
        urls = list(dict.fromkeys(parse_urls(arguments)))
        if not urls:
            return Observation(_BAD_CALL, False, "bad_call", time.monotonic() - start)
        if is_repeat(self.name, arguments, context):
            text = "These pages were already read. Use what they say or open others."
            seconds = time.monotonic() - start
            return Observation(text, False, "error", seconds, {"duplicate": True})
        budget = time_for(self._config.timeout_s, context)
        kept = urls[: self._config.max_pages]
        call = _Call(self, context, start + budget)
        try:
            pages = await asyncio.gather(*(call.page(i, url) for i, url in enumerate(kept, 1)))
        finally:
            if call.intent is not None:
                call.intent.cancel()
        texts = [text for text, _ in pages]
        if len(urls) > len(kept):
            left = len(urls) - len(kept)
            texts.append(f"[{left} more left out: at most {len(kept)} pages are read in a call]")
        errors = [error for _, error in pages if error is not None]
        ok = len(errors) < len(kept)
        outcome: Outcome = "ok" if ok else "fault" if "fault" in errors else "error"
        if set(errors) == {"timeout"} and not ok:
            outcome = "timeout"
        detail: dict[str, Any] = {"urls": kept, "failed": len(errors), "errors": errors}
        if call.summary_failures:
            detail["summary_failures"] = call.summary_failures
        if errors or call.summary_failures:
            detail["incomplete"] = True
        seconds = time.monotonic() - start
        return Observation("\n\n".join(texts), ok, outcome, seconds, detail)

    def local_page(self, url: str) -> str:
        """Returns the text behind a link of the local search, made by `local_link`.

        The text consists of all passages of one page. If the link names a section, that section
        comes first, so that it is visible for any `CrawlConfig.page_chars`.

        Raises:
            FetchError: the page does not exist.
        """
        parts = urllib.parse.urlsplit(url)
        title, section = (
            urllib.parse.unquote(part).strip("/").replace("_", " ")
            for part in (parts.path, parts.fragment)
        )
        found = [p for p in self._index().passages if p.title.partition(":")[0].strip() == title]
        if not title or not found:
            raise FetchError("status", "there is no such page", 404)
        found.sort(key=lambda p: not section or p.title.partition(":")[2].strip() != section)
        return "\n\n".join(f"{p.title}\n{p.text}" for p in found)


@dataclasses.dataclass
class _Call:
    """One call of the tool: its pages share a deadline and a click intent."""

    tool: CrawlPage
    context: ToolContext
    end: float
    summary_failures: list[str] = dataclasses.field(default_factory=list)
    intent: asyncio.Task[str] | None = None

    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.001)

    async def page(self, number: int, url: str) -> tuple[str, str | None]:
        """Returns (text of one page in the observation, kind of its failure or None)."""
        try:
            async with asyncio.timeout(self.left()), self.tool._turns.here():
                text = await self.read(url)
        except FetchError as error:
            return (
                f"Page {number} [{url}]: [Page content not accessible: {error.message}]",
                error.kind,
            )
        except TimeoutError:
            why = "it took too long"
            return f"Page {number} [{url}]: [Page content not accessible: {why}]", "timeout"
        except Exception:  # a bug costs this page only, not the whole call
            _log.exception("crawl_page cannot read %s", url)
            return f"Page {number} [{url}]: [Page content not accessible: it failed]", "fault"
        return f"Page {number} [{url}] Summary:\n{await self.shorten(text)}", None

    async def read(self, url: str) -> str:
        """Returns the text of a page.

        Raises:
            FetchError: the page cannot be fetched or read.
            WorkerBusyError: no process is free to parse the page, which is a fault of the tool.
        """
        tool, most = self.tool, 8 * self.tool._config.page_chars
        parsed = parse_url(url)
        if host_of(parsed) == LOCAL_HOST:
            return await asyncio.to_thread(tool.local_page, url)
        if tool._robots is not None and not tool._guard.blocks(parsed):
            why = await tool._robots.why_not(parsed)
            if why:
                raise FetchError("refused", why)
        request = Request(str(parsed), types=page_text.READABLE)
        response = await fetch(request, tool._limits.within(self.left()), tool._guard)
        half = self.left() / 2  # to wait, so that a busy tool is distinguished from a slow page
        ask = functools.partial(
            tool._workers.ask,
            response.body,
            dict(response.headers),
            response.url,
            most,
            timeout=min(half, tool._limits.total_s),
            wait=half,
        )
        try:
            found = await asyncio.to_thread(ask)
        except WorkerBusyError:
            raise
        except WorkerError as error:
            raise FetchError("malformed", "its content cannot be read") from error
        if not found["text"]:
            raise FetchError("malformed", "the page holds no text")
        title = found["title"]
        return (
            f"{title}\n\n{found['text']}" if title and title not in found["text"] else found["text"]
        )

    async def shorten(self, text: str) -> str:
        """Returns the summary, or the start of the text if there is no summariser or it failed."""
        config = self.tool._config
        if not config.summarizer:
            return clip(text, config.page_chars)
        try:
            async with asyncio.timeout(self.left()):
                intent = await self.aim()
                summary = await summarize(
                    config.summarizer, text, intent, self.context, self.left()
                )
                return clip(summary, config.page_chars)
        except (FetchError, TimeoutError) as error:
            why = error.message if isinstance(error, FetchError) else "it took too long"
            self.summary_failures.append(why)
            return f"[No summary: {why}. The page begins:]\n{clip(text, config.page_chars)}"

    async def aim(self) -> str:
        """Returns the click intent, computed once.

        If the model fails, the question replaces the intent.
        """
        if self.intent is None:
            config = self.tool._config.summarizer
            self.intent = asyncio.ensure_future(click_intent(config, self.context, self.left() / 2))
        try:
            return await asyncio.shield(self.intent)
        except FetchError as error:
            self.summary_failures.append(f"intent: {error.message}")
            return self.context.question
