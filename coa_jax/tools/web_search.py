"""Implements the tool ``web_search``, which sends a query to a search service.

An observation has the format of the release of the Chain-of-Agents paper: "Found N results:", a
blank line, "## Web Results" and the numbered results, with a blank line between two results. A
result consists of ``[title](link)``, the date and the source if the service names them, the link,
and the snippet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from coa_jax.config.extensions import ExtensionKind, Named, bind
from coa_jax.config.fields import Address, Between, Bounded, Count, Place, Seconds, Variable
from coa_jax.config.preflight import Needs, code_needs, declares
from coa_jax.tools.base import (
    Observation,
    Tool,
    ToolContext,
    failed_search,
    observe,
    refused_query,
    time_for,
)
from coa_jax.tools.bm25 import Index
from coa_jax.tools.corpus import corpus_needs
from coa_jax.tools.net.address import AddressGuard, parse_url
from coa_jax.tools.net.chat import refusal, trusting
from coa_jax.tools.net.errors import REFUSED, FaultDetector, FetchError
from coa_jax.tools.net.http import HttpRequest, RequestLimits, fetch_json
from coa_jax.tools.net.secrets import Secret, with_key

if TYPE_CHECKING:
    from coa_jax.tools.wiki_search import WikiSearch

_log = logging.getLogger(__name__)

_LONGEST_QUERY = 2000
_ATTEMPTS = 3
"""Maximum length of a query in characters. In a URL, a character may take up to nine bytes."""

LOCAL_HOST = "wiki.local"
"""Host in links to passages of the local index, which ``crawl_page`` opens without a network."""

MIRRORS = (
    "huggingface.co/datasets",
    "huggingface.co/spaces",
    "huggingface.co/api/datasets",
    "hf.co/datasets",
    "hf.co/spaces",
    "hf.co/api/datasets",
    "datasets-server.huggingface.co",
    "hf-mirror.com",
    "paperswithcode.com",
    "kaggle.com/datasets",
)
"""Addresses of copies of benchmarks. A model of the Chain-of-Agents paper (App C) found a copy."""

PROVIDERS = ExtensionKind(
    "search service",
    "coa_jax.search",
    {
        "serper": "coa_jax.tools.web_search:serper",
        "searxng": "coa_jax.tools.web_search:searxng",
        "local": "coa_jax.tools.web_search:local",
    },
    offers=("query", "count", "limits", "config", "index"),
    needs=("query", "config", "index"),
)
"""The setting for a search service, which is a `Provider`, or a function that returns a `Provider`.
The arguments of such a function are ``config`` (`WebSearchConfig`) and ``index``.
"""

_FIELD_CHARS, _LINK_CHARS = 300, 2000


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """A result of a web search, as the policy reads it.

    Attributes:
        title: title of the page.
        link: URL of the page.
        snippet: excerpt of the page.
        date: date of the page; "" is left out of the observation.
        source: name of the site; "" is left out of the observation.
    """

    title: str
    link: str
    snippet: str
    date: str = ""
    source: str = ""


Provider = Callable[[str, int, RequestLimits], Awaitable[Sequence[SearchResult]]]
"""A function that sends a query to a search service.

Its arguments are the query, the maximum number of results, and the limits of the request. It
returns the results, the best first, and raises FetchError if the service does not answer.
"""


@dataclasses.dataclass(frozen=True)
class WebSearchConfig(Bounded):
    """The settings of the search service that ``web_search`` uses.

    Attributes:
        provider: ``serper`` (the API of serper.dev, or of a proxy with the same API), ``searxng``
            (a SearXNG server), ``local`` (the index of ``wiki_search``), or a custom provider (see
            `PROVIDERS` and docs/extending.md). ``auto`` means ``serper`` if its key is set, else
            ``local``.
        options: option name -> value for a custom provider.
        url: URL of the service.
        key_env: environment variable with the API key of serper. The value of this variable is
            removed from the results of every provider.
        top_k: number of results in an observation, at most 20. The release of the
            Chain-of-Agents paper uses 10.
        snippet_chars: maximum length of a snippet in characters.
        timeout_s: time limit of a call with all its attempts, in seconds.
        blocked: hosts and path prefixes whose results are left out, see `AddressGuard.block`.
    """

    provider: Annotated[str, Named(PROVIDERS, "auto")] = "auto"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    url: Address = "https://google.serper.dev/search"
    key_env: Variable = "SERPER_API_KEY"
    top_k: Annotated[int, Between(1, 20)] = 10
    snippet_chars: Count = 600
    timeout_s: Seconds = 30.0
    blocked: tuple[Place, ...] = MIRRORS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url:
            trusting(self.url)  # before any setting is written to a file


def choose(config: WebSearchConfig) -> str:
    """Returns the name of the search service that the settings select on this machine.

    ``auto`` selects ``serper`` if the environment has its API key, and else ``local``.
    """
    if config.provider != "auto":
        return config.provider
    return "serper" if Secret(config.key_env) else "local"


def serper(config: WebSearchConfig) -> Provider:
    """Returns a provider for the API of serper.dev.

    A request is a POST of ``{"q": ..., "num": ...}`` with the header ``X-API-KEY``. The answer
    contains the results in ``organic``.

    Raises:
        UserError: the key is not set, or the URL is invalid.
    """
    secret, guard = Secret(config.key_env), trusting(config.url)
    secret.reveal()

    async def search(query: str, count: int, limits: RequestLimits) -> Sequence[SearchResult]:
        headers = {"Content-Type": "application/json", "X-API-KEY": secret.reveal()}
        body = json.dumps({"q": query, "num": count}).encode()
        answer = await fetch_json(HttpRequest(config.url, "POST", headers, body), limits, guard)
        return _results(secret.redact(answer), "organic", "link", "snippet")

    return search


def searxng(config: WebSearchConfig) -> Provider:
    """Returns a provider for a SearXNG server.

    A request is ``GET URL?q=...&format=json``. The answer contains the results in ``results``.

    Raises:
        UserError: the URL is invalid.
    """
    guard = trusting(config.url)

    async def search(query: str, count: int, limits: RequestLimits) -> Sequence[SearchResult]:
        parameters = urllib.parse.urlencode({"q": query, "format": "json"}, errors="replace")
        answer = await fetch_json(HttpRequest(f"{config.url}?{parameters}"), limits, guard)
        return _results(answer, "results", "url", "content")

    return search


def local(index: Callable[[], Index]) -> Provider:
    """Returns a provider that searches the run's local index instead of the web.

    Links in the results have the host `LOCAL_HOST`; ``crawl_page`` can open them.

    Args:
        index: function that returns the local index.
    """

    async def search(query: str, count: int, limits: RequestLimits) -> Sequence[SearchResult]:
        hits = await asyncio.to_thread(lambda: index().search(query, count))
        passages = [hit.passage for hit in hits]
        return [SearchResult(each.title, local_link(each.title), each.text) for each in passages]

    return search


def local_link(title: str) -> str:
    """Returns the URL of a passage of the local index.

    The path of the URL is the page, and the fragment after ``#`` is the section.

    >>> local_link("Burkina Faso: Longest border")
    "http://wiki.local/Burkina_Faso#Longest_border"
    """
    page, _, section = (part.strip().replace(" ", "_") for part in title.partition(":"))
    anchor = f"#{urllib.parse.quote(section)}" if section else ""
    return f"http://{LOCAL_HOST}/{urllib.parse.quote(page)}{anchor}"


def _results(answer: Any, key: str, link: str, snippet: str) -> list[SearchResult]:
    if not isinstance(answer, dict) or not isinstance(answer.get(key, []), list):
        raise FetchError("malformed", "the answer of the search service has the wrong form")
    results = []
    for row in answer.get(key, []):
        if isinstance(row, dict) and isinstance(row.get(link), str):
            fields = [row.get(name) for name in ("title", link, snippet, "date", "source")]
            results.append(SearchResult(*(str(field) if field else "" for field in fields)))
    return results


def provider_of(config: WebSearchConfig, index: Callable[[], Index]) -> Provider:
    """Returns the provider that the settings select on this machine.

    Args:
        config: settings of the search service.
        index: function that returns the local index.

    Raises:
        UserError: the provider is unknown, or a setting or API key that the provider needs is
            missing.
    """
    bound = bind(PROVIDERS, choose(config), config.options, "web_search.provider")
    if "query" not in bound.asks:
        made: Provider = bound(config=config, index=index)
        return made

    async def search(query: str, count: int, limits: RequestLimits) -> Sequence[SearchResult]:
        offered = {"query": query, "count": count, "limits": limits, "config": config}
        results: Sequence[SearchResult] = await bound(**offered, index=index)
        return results

    return search


class WebSearch:
    """The tool ``web_search``, which sends a query to a search service.

    Attributes:
        name: "web_search".
        deadline: time limit of a call in seconds.
        provider: name of the search service.
        settings: settings on which the answer to a query depends.
    """

    name = "web_search"

    def __init__(self, config: WebSearchConfig, index: Callable[[], Index]):
        """Creates the tool.

        Args:
            config: settings of the search service.
            index: function that returns the local index. It is called when the index is needed.

        Raises:
            UserError: a setting is invalid, or the environment variable with the API key is not
                set.
        """
        self.provider, self._search = choose(config), provider_of(config, index)
        if config.provider == "auto" and self.provider == "local":
            _log.warning(
                "web_search searches the local index, because %s is not set; to choose another "
                "provider, set web_search.provider", config.key_env
            )  # fmt: skip
        self._config, self._guard = config, AddressGuard(block=config.blocked)
        self._blame = FaultDetector()
        seconds = config.timeout_s
        self._limits = RequestLimits(seconds, read_s=seconds, attempts=_ATTEMPTS, redirects=0)
        self.deadline = config.timeout_s + 1.0
        url = config.url if self.provider in ("serper", "searxng") else ""
        parts = [self.provider, url, config.top_k, config.snippet_chars, config.blocked]
        if config.options:
            parts.append(dict(config.options))
        self.settings = json.dumps(parts, default=str)

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Searches for the query that the policy wrote between the tags."""
        start = time.monotonic()
        query = " ".join(arguments.split())
        in_address = self.provider == "searxng"
        sent = urllib.parse.quote(query, errors="replace") if in_address else query
        if len(sent) > _LONGEST_QUERY:
            text = "The query is too long. Search for its most telling words."
            return observe(start, text, "error", {"too_long": True})
        if refused := refused_query(self.name, arguments, context):
            return refused
        left_s = time_for(self._config.timeout_s, context)
        try:
            results = await self._search(query, self._config.top_k, self._limits.within(left_s))
        except FetchError as error:
            return failed_search(start, error, self._blame, provider=self.provider)
        self._blame.answered()
        shown = [r for r in results if not self._blocked(r.link)][: self._config.top_k]
        links = [result.link for result in shown]
        detail = {"provider": self.provider, "results": len(shown), "links": links}
        text = format_results(shown, query, self._config.snippet_chars)
        text, detail = Secret(self._config.key_env).redact([text, detail])
        return observe(start, text, "ok" if shown else "error", detail)

    def _blocked(self, link: str) -> bool:
        try:
            return self._guard.blocks(parse_url(link))
        except FetchError:
            return False  # the link is shown; opening the link reports the error


def format_results(results: Sequence[SearchResult], query: str, snippet_chars: int = 600) -> str:
    """Writes search results as an observation, as in the release of the Chain-of-Agents paper.

    Args:
        results: what the search service returned, the best first.
        query: what the policy searched for.
        snippet_chars: maximum length of a snippet in characters.
    """
    if not results:
        return f"No results found for query: '{query}'. Use a less specific query."
    entries = []
    for number, result in enumerate(results, 1):
        title, link = _line(result.title) or "No Title", _line(result.link, _LINK_CHARS)
        lines = [f"{number}. [{title}]({link})"]
        lines += [f"Date published: {_line(result.date)}"] if result.date else []
        lines += [f"Source: {_line(result.source)}"] if result.source else []
        lines += [link, _line(result.snippet, snippet_chars)]
        entries.append("\n".join(lines).strip())
    return f"Found {len(results)} results:\n\n## Web Results\n" + "\n\n".join(entries)


def _line(text: str, most: int = _FIELD_CHARS) -> str:
    return " ".join(text.split())[:most]


def needs(config: Any) -> Needs:
    """Returns the server and the key of the search service, or the corpus of the local index."""
    web = config.web_search
    provider = choose(web)
    if provider == "local":
        return corpus_needs(config.wiki_search.corpus)
    if provider not in ("serper", "searxng"):
        return code_needs(PROVIDERS, provider, web.options).under("web_search")
    key_env = web.key_env if provider == "serper" else ""
    return Needs.of_server("web_search.url", web.url, key_env)


async def probe(config: Any, seconds: float) -> tuple[bool, str]:
    """Checks whether the tool can be called, see `config.preflight`."""
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
        return with_key(False, where, web.key_env)
    try:
        await search(query, 1, RequestLimits(seconds, seconds, seconds, attempts=1, redirects=0))
    except FetchError as error:
        if query or error.status not in REFUSED or error.account:
            return False, f"{where}: {error.message}{refusal(error.status, key_env)}"
    return with_key(True, f"{where} answers", key_env)


@declares(needs, probe)
def make_tool(config: Any, search: WikiSearch) -> Tool:
    """Creates ``web_search``. Its provider ``local`` searches the local index of the run."""
    tool = WebSearch(config.web_search, search.warm_up)
    if tool.provider == "local":  # otherwise the first call would build the index
        search.warm_up()
    return tool
