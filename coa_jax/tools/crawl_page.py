"""Implements the tool ``crawl_page``, which reads web pages.

The body of a call is one or more URLs, joined by ``|``. The observation has the format of the
release of the Chain-of-Agents paper, with a blank line between two pages. A page is ``Page i
[address] Summary:`` followed by the text or its summary, or ``Page i [address]: [Page content not
accessible: why]``.
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
from typing import TYPE_CHECKING, Annotated, Any

from coa_jax.config.fields import Bounded, Count, Place, Seconds, Sparse
from coa_jax.config.installed import install_hint, missing
from coa_jax.config.preflight import Needs, declares
from coa_jax.protocol import parse_urls
from coa_jax.tools import page_text
from coa_jax.tools.base import Observation, Outcome, Tool, ToolContext, is_repeat, observe, time_for
from coa_jax.tools.bm25 import Index
from coa_jax.tools.code_libraries import isolation_here
from coa_jax.tools.concurrency import ConcurrencyLimit
from coa_jax.tools.isolated import isolated_workers
from coa_jax.tools.net.address import AddressGuard, host_of, parse_url
from coa_jax.tools.net.chat import ChatConfig, check_client
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import HttpRequest, RequestLimits, fetch
from coa_jax.tools.net.text import clip_text, decode, media_type
from coa_jax.tools.robots import Robots
from coa_jax.tools.summarize import click_intent, last_query, summarize
from coa_jax.tools.web_search import LOCAL_HOST, MIRRORS
from coa_jax.tools.worker import WorkerBusyError, WorkerError

if TYPE_CHECKING:
    from coa_jax.tools.wiki_search import WikiSearch

_log = logging.getLogger(__name__)

_BAD_CALL = (
    "No address was found. Write one or more addresses that begin with http:// or https://, joined"
    " by |."
)

_MAX_PAGES = 5
"""Maximum number of pages per call; the observation says how many pages were not opened."""
_CONCURRENCY = 16
"""Maximum number of pages that all calls of a process together read at the same time."""
_PAGE_S, _ATTEMPTS, _MAX_BYTES = 30.0, 2, 8 << 20
"""Limits of fetching a page: seconds of all attempts, attempts, bytes after decompression."""
_CPU_S = 10.0
"""Limit on the processor time for parsing one page, in seconds."""


@dataclasses.dataclass(frozen=True)
class CrawlConfig(Bounded):
    """The settings of ``crawl_page``.

    Attributes:
        page_chars: maximum number of characters of a page in an observation. The summariser reads
            up to eight times as many characters of the page.
        timeout_s: time limit of a call, including summaries, in seconds.
        robots: whether to leave out pages that the robots.txt of their site forbids crawlers to
            read.
        allow_hosts: hosts and networks that may be opened although they are not public, see
            `AddressGuard.allow`.
        blocked: hosts and path prefixes whose pages are not opened, see `AddressGuard.block`.
        summarizer: model that writes the summaries. Without a model, the observation contains the
            beginning of the page's text.
    """

    page_chars: Count = 6000
    timeout_s: Seconds = 120.0
    robots: bool = True
    allow_hosts: tuple[Place, ...] = ()
    blocked: tuple[Place, ...] = MIRRORS
    summarizer: Annotated[ChatConfig, Sparse()] = dataclasses.field(default_factory=ChatConfig)

    @property
    def call_money(self) -> float:
        """Highest cost of the summariser's requests in a call of ``crawl_page``.

        A call has one request for each page, at most five, and one that asks what the policy hopes
        to find on the pages.
        """
        return (_MAX_PAGES + 1) * self.summarizer.money(8 * self.page_chars)


class CrawlPage:
    """The tool ``crawl_page``, which opens web pages and returns their texts or summaries.

    Attributes:
        name: "crawl_page".
        deadline: time limit of a call in seconds.
        settings: settings on which the answer to a call depends; part of the key of stored answers.
        tailored: whether the answer to a call depends on the trajectory's earlier text too, see
            `depends_on`. This is the case if a model writes summaries.
    """

    name = "crawl_page"

    def __init__(
        self,
        config: CrawlConfig,
        index: Callable[[], Index],
        backend: str = "auto",
        unsafe: bool = False,
    ):
        """Creates the tool, and tests the isolation of this machine.

        Args:
            config: settings of the tool.
            index: function that returns the local index, for links to its passages.
            backend: kind of isolation in which pages are parsed, see `isolation_here`.
            unsafe: whether pages are parsed without isolation. The environment variable
                ``COA_JAX_ALLOW_UNSAFE_CODE=1`` must be set too.

        Raises:
            UserError: a package is missing, an allowed network is invalid, or no isolation works on
                this machine.
        """
        packages = page_text.missing_packages()
        if packages:
            raise missing("crawl_page", ", ".join(packages), "web")
        if config.summarizer:
            check_client()
        self._config, self._index = config, index
        seconds = min(_PAGE_S, config.timeout_s)
        self._limits = RequestLimits(seconds, attempts=_ATTEMPTS, max_bytes=_MAX_BYTES)
        self._guard = AddressGuard(config.allow_hosts, config.blocked)
        self._robots = Robots(self._limits, self._guard) if config.robots else None
        isolation = isolation_here(backend, unsafe)
        self._workers = isolated_workers(
            "coa_jax.tools.page_text:extract",
            isolation,
            page_text.PACKAGES,
            warm_up="import trafilatura, pypdf",
        )
        self._limit = ConcurrencyLimit(_CONCURRENCY)
        self.deadline = config.timeout_s + 1.0
        self.tailored = bool(config.summarizer)
        pages = (config.page_chars, _MAX_PAGES, config.robots)
        places = (config.allow_hosts, config.blocked)
        model = (config.summarizer.url, config.summarizer.model)
        self.settings = json.dumps([*pages, *places, *model])

    def depends_on(self, context: ToolContext) -> list[str]:
        """Returns the texts of the trajectory on which a model's summaries depend.

        `Recorded` makes these texts a part of the key of a stored answer.
        """
        return [context.question, last_query(context), context.think.strip()]

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Concurrently reads the pages whose URLs the policy wrote between the tags."""
        start = time.monotonic()
        urls = list(dict.fromkeys(parse_urls(arguments)))
        if not urls:
            return observe(start, _BAD_CALL, "bad_call")
        if is_repeat(self.name, arguments, context):
            text = "These pages were already read. Use what they say or open others."
            return observe(start, text, "error", {"duplicate": True})
        opened = urls[:_MAX_PAGES]
        call = _Call(self, context, start + time_for(self._config.timeout_s, context))
        try:
            pages = await asyncio.gather(*(call.page(i, url) for i, url in enumerate(opened, 1)))
        finally:
            if call.intent is not None:
                call.intent.cancel()
        texts = [text for text, _ in pages]
        if len(urls) > len(opened):
            more = len(urls) - len(opened)
            texts.append(f"[{more} more left out: at most {len(opened)} pages are read in a call]")
        errors = [error for _, error in pages if error is not None]
        outcome: Outcome = "ok"
        if len(errors) == len(opened):
            only = errors[0] == "timeout" and len(set(errors)) == 1
            outcome = "timeout" if only else "fault" if "fault" in errors else "error"
        detail: dict[str, Any] = {"urls": opened, "failed": len(errors), "errors": errors}
        if call.summary_failures:
            detail["summary_failures"] = call.summary_failures
        if errors or call.summary_failures:
            detail["incomplete"] = True
        return observe(start, "\n\n".join(texts), outcome, detail)

    def local_page(self, url: str) -> str:
        """Returns the text of a page of the local index, in which ``wiki_search`` searches.

        The text consists of all passages of the page. If the URL names a section, this section
        comes first, so that it is in the observation even if the text is truncated.

        Args:
            url: URL that `local_link` has created.

        Raises:
            FetchError: the page does not exist.
        """
        parts = urllib.parse.urlsplit(url)
        title, section = (
            urllib.parse.unquote(part).strip("/").replace("_", " ")
            for part in (parts.path, parts.fragment)
        )
        passages = [p for p in self._index().passages if p.title.partition(":")[0].strip() == title]
        if not title or not passages:
            raise FetchError("status", "there is no such page", 404)
        passages.sort(key=lambda p: not section or p.title.partition(":")[2].strip() != section)
        return "\n\n".join(f"{p.title}\n{p.text}" for p in passages)


@dataclasses.dataclass
class _Call:
    """A call of the tool. All pages of a call share a deadline and a click intent."""

    tool: CrawlPage
    context: ToolContext
    end: float
    summary_failures: list[str] = dataclasses.field(default_factory=list)
    intent: asyncio.Task[str] | None = None

    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.001)

    async def page(self, number: int, url: str) -> tuple[str, str | None]:
        """Reads a page; returns (text for the observation, kind of the failure or None)."""
        try:
            async with asyncio.timeout(self.left()), self.tool._limit.semaphore():
                text = await self.read(url)
        except FetchError as error:
            why, kind = error.message, str(error.kind)
        except TimeoutError:
            why, kind = "it took too long", "timeout"
        except Exception:  # a defect affects only this page, not the whole call
            _log.exception("crawl_page cannot read %s", url)
            why, kind = "it failed", "fault"
        else:
            return f"Page {number} [{url}] Summary:\n{await self.shorten(text)}", None
        return f"Page {number} [{url}]: [Page content not accessible: {why}]", kind

    async def read(self, url: str) -> str:
        """Returns the text of a page.

        Raises:
            FetchError: the page cannot be fetched or read.
            WorkerBusyError: the page cannot be parsed in time, because all processes or the machine
                are busy. This is a fault of the tool.
        """
        tool, most = self.tool, 8 * self.tool._config.page_chars
        parsed = parse_url(url)
        if host_of(parsed) == LOCAL_HOST:
            return await asyncio.to_thread(tool.local_page, url)
        if tool._robots is not None and not tool._guard.blocks(parsed):
            why = await tool._robots.why_not(parsed)
            if why:
                raise FetchError("refused", why)
        request = HttpRequest(str(parsed), types=page_text.READABLE)
        response = await fetch(request, tool._limits.within(self.left()), tool._guard)
        left_s = self.left()
        # The limit on processor time is much lower than the limit on wall time, so that a slow page
        # is not taken for a busy tool.
        ask = functools.partial(
            tool._workers.ask, timeout=min(left_s / 8, _CPU_S), wait=0.8 * left_s
        )

        def parse() -> Any:
            body, headers = response.body, dict(response.headers)
            kind = media_type(headers)
            content = body if page_text.is_pdf(body, kind) else decode(body, headers)
            return ask(content, kind, response.url, most)

        try:
            page = await asyncio.to_thread(parse)
        except WorkerBusyError:
            raise
        except WorkerError as error:
            raise FetchError("malformed", "its content cannot be read") from error
        if not page["text"]:
            raise FetchError("malformed", "the page holds no text")
        title, text = page["title"], page["text"]
        return text if title in text else f"{title}\n\n{text}"

    async def shorten(self, text: str) -> str:
        """Returns the summary of a text.

        If there is no summariser, or the summariser fails, the result is the beginning of the text.
        """
        config = self.tool._config
        if not config.summarizer:
            return clip_text(text, config.page_chars)
        try:
            async with asyncio.timeout(self.left()):
                aim = await self.aim()
                remaining_s = self.left()
                summary = await summarize(config.summarizer, text, aim, self.context, remaining_s)
                return clip_text(summary, config.page_chars)
        except (FetchError, TimeoutError) as error:
            why = error.message if isinstance(error, FetchError) else "it took too long"
            self.summary_failures.append(why)
            return f"[No summary: {why}. The page begins:]\n{clip_text(text, config.page_chars)}"

    async def aim(self) -> str:
        """Returns what the policy hopes to find (the click intent), computed once per call.

        If the model that infers the intent fails, the question of the task replaces the intent.
        """
        if self.intent is None:
            config = self.tool._config.summarizer
            self.intent = asyncio.ensure_future(click_intent(config, self.context, self.left() / 2))
        try:
            return await asyncio.shield(self.intent)
        except FetchError as error:
            self.summary_failures.append(f"intent: {error.message}")
            return self.context.question


def needs(config: Any) -> Needs:
    """Returns the packages that read pages, and the server and key of the summariser."""
    summarizer = config.crawl_page.summarizer.needs()
    return Needs(("web",)) + summarizer.under("crawl_page.summarizer")


async def probe(config: Any, seconds: float) -> tuple[bool, str]:
    """Checks whether the tool can be called, see `config.preflight`."""
    absent = page_text.missing_packages()
    if absent:
        return False, f"{', '.join(absent)} not installed; run: {install_hint('web')}"
    crawl = config.crawl_page
    parts = ["robots respected" if crawl.robots else "robots IGNORED"]
    if crawl.allow_hosts:
        parts.append(f"also allowed: {', '.join(crawl.allow_hosts)}")
    if not crawl.summarizer:
        return True, "; ".join([*parts, "no summariser: pages are shown as they are"])
    ok, text = await crawl.summarizer.probe(seconds)
    return ok, "; ".join([*parts, f"summaries by {text}"])


@declares(needs, probe)
def make_tool(config: Any, search: WikiSearch) -> Tool:
    """Creates ``crawl_page``, which opens web pages and pages of the run's local index."""
    return CrawlPage(config.crawl_page, search.warm_up, unsafe=config.unsafe)
