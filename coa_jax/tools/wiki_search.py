"""Implements the tool ``wiki_search``, which searches a corpus here or on a server.

By default the corpus is that of the demonstration, the World Factbook. An observation has the
format of the wiki server that the authors of the Chain-of-Agents paper released: a line ``Doc k
(Title: t)`` and the passage for each result, with a blank line between results. Of passages
with equal scores, the earlier passage of the corpus comes first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from coa_jax.config.fields import Address, Bounded, Place, Sparse, Times
from coa_jax.config.preflight import Needs, declares
from coa_jax.model.config import EncoderConfig
from coa_jax.storage import local
from coa_jax.tools.base import (
    Observation,
    Tool,
    ToolContext,
    failed_search,
    observe,
    refused_query,
    server_answers,
    time_for,
)
from coa_jax.tools.bm25 import Hit, Index, load_index
from coa_jax.tools.corpus import DEFAULT, Passage, corpus_needs, default_corpus, split_contents
from coa_jax.tools.dense import Retrieval, check_retrieval
from coa_jax.tools.net.chat import post_json, trusting
from coa_jax.tools.net.errors import FaultDetector, FetchError
from coa_jax.tools.net.http import RequestLimits


@dataclasses.dataclass(frozen=True)
class WikiConfig(Bounded):
    """The settings of ``wiki_search``.

    Attributes:
        corpus: JSONL file with the passages; "" for the World Factbook.
        top_k: number of passages in an observation.
        retrieval: how passages are found: ``bm25`` (by words), ``dense`` (by vectors of
            ``encoder``) or ``hybrid`` (both combined).
        encoder: model that computes the vectors for dense and hybrid retrieval.
        url: URL of a server's endpoint ``/retrieve``, which the tool calls; "" searches the local
            index.
    """

    corpus: Place = ""
    top_k: Times = 3
    retrieval: Retrieval = "bm25"
    encoder: Annotated[EncoderConfig, Sparse()] = dataclasses.field(default_factory=EncoderConfig)
    url: Address = ""


class WikiSearch:
    """The tool ``wiki_search``, which answers a query with the best passages of a corpus.

    Calls run in threads, so that a search does not block the event loop. Any number of calls may
    run concurrently. If a trajectory repeats a query, the observation only says that the query was
    repeated.
    """

    name = "wiki_search"
    deadline = 30.0

    def __init__(
        self,
        top_k: int = 3,
        passages: Sequence[Passage] | None = None,
        load: Callable[..., Index] = load_index,
    ):
        """Creates the tool. The index is loaded by the first call, or by `warm_up`.

        Args:
            top_k: number of passages in an observation.
            passages: passages of the corpus; None for the default corpus.
            load: function that loads or builds the index. Its argument is ``passages``.
        """
        self.top_k = top_k
        self._load = functools.partial(load, passages)
        self._index: Index | None = None
        self._lock = threading.Lock()

    def warm_up(self) -> Index:
        """Returns the search index, which is loaded or built in the first call."""
        with self._lock:
            if self._index is None:
                self._index = self._load()
            return self._index

    def search(self, query: str) -> list[Hit]:
        """Returns the best passages for a query, at most ``top_k``, with their scores."""
        return self.warm_up().search(query, self.top_k)

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Searches for the query that the policy wrote between the tags."""
        start = time.monotonic()
        if refused := refused_query(self.name, arguments, context):
            return refused
        hits = await asyncio.to_thread(self.search, " ".join(arguments.split()))
        return hits_observation(start, hits, {"scores": [round(hit.score, 4) for hit in hits]})


def hits_observation(
    start: float, hits: Sequence[Hit], more: Mapping[str, Any] | None = None
) -> Observation:
    """Returns the observation for the results of a search.

    Args:
        start: time at which the call began, on the clock of ``time.monotonic``.
        hits: search results; the text says so if there are none.
        more: entries to add to ``Observation.detail`` if there are results, such as the scores.
    """
    if not hits:
        return observe(start, "Nothing was found. Try other or fewer words.", "error", {"hits": 0})
    detail = {"hits": len(hits), "titles": [hit.passage.title for hit in hits], **(more or {})}
    return observe(start, format_hits(hits), "ok", detail)


def format_hits(hits: Sequence[Hit]) -> str:
    """Writes search results as the text of an observation.

    Each result is a line "Doc k (Title: t)", followed by the text of the passage. A blank line
    separates two results.
    """
    documents = (
        f"Doc {k} (Title: {hit.passage.title})\n{hit.passage.text}" for k, hit in enumerate(hits, 1)
    )
    return "\n\n".join(documents)


class RemoteSearch:
    """The tool ``wiki_search`` on a server with the endpoint ``/retrieve`` of Search-R1.

    Attributes:
        name: "wiki_search".
        deadline: time limit of a call in seconds.
        settings: settings on which the answer to a query depends.
    """

    name = "wiki_search"

    def __init__(self, url: str, top_k: int = 3, timeout_s: float = 30.0, key_env: str = ""):
        """Creates the tool.

        Args:
            url: URL of ``/retrieve``.
            top_k: number of passages in an observation.
            timeout_s: time limit of a call in seconds.
            key_env: environment variable with a bearer token; "" for no token.

        Raises:
            UserError: the URL is invalid.
        """
        trusting(url)
        self._url, self._top_k, self._key_env = url, top_k, key_env
        self._blame = FaultDetector()
        self._limits = RequestLimits(total_s=timeout_s, read_s=timeout_s, redirects=0)
        self.deadline = timeout_s + 1.0
        self.settings = json.dumps([url, top_k])

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Searches for the query that the policy wrote between the tags."""
        start = time.monotonic()
        if refused := refused_query(self.name, arguments, context):
            return refused
        query = " ".join(arguments.split())
        body = {"queries": [query], "topk": self._top_k, "return_scores": True}
        try:
            answer = await post_json(
                self._url,
                body,
                self._limits.within(time_for(self._limits.total_s, context)),
                self._key_env,
            )
            hits = _hits(answer)[: self._top_k]
        except FetchError as error:
            return failed_search(start, error, self._blame)
        self._blame.answered()
        return hits_observation(start, hits)


def _hits(answer: Any) -> list[Hit]:
    """Parses the answer of the server to a single query, with or without scores."""
    try:
        (rows,) = answer["result"]
        hits = []
        for row in rows:
            document = row.get("document", row)
            if "contents" in document:
                passage = split_contents(document["contents"])
            else:
                passage = Passage(str(document.get("title", "")), document["text"])
            hits.append(Hit(passage, float(row.get("score", 0.0))))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = "the answer of the search server has the wrong form"
        raise FetchError("malformed", wrong) from error
    return hits


def needs(config: Any) -> Needs:
    """Returns the search server and its key, or the package of the default corpus."""
    wiki = config.wiki_search
    if not wiki.url:
        return corpus_needs(wiki.corpus)
    return Needs.of_server("wiki_search.url", wiki.url, config.remote_key_env)


async def probe(config: Any, seconds: float) -> tuple[bool, str]:
    """Checks whether the tool can be called, see `config.preflight`."""
    wiki = config.wiki_search
    if wiki.url:
        key = config.remote_key_env
        remote = RemoteSearch(wiki.url, wiki.top_k, seconds, key)
        return await server_answers(remote, wiki.url, "capital", key, seconds)
    check_retrieval(wiki.retrieval, wiki.encoder)
    how = f"local {wiki.retrieval} index"
    if wiki.retrieval != "bm25":
        from coa_jax.tools.encoder import TextEncoder

        TextEncoder(wiki.encoder)  # raises an error if its files cannot be used
        how += f" with {wiki.encoder.path}"
    if wiki.corpus:
        there = Path(local(wiki.corpus)).expanduser().is_file()
        return there, f"{how} of {wiki.corpus}{'' if there else ', which does not exist'}"
    return bool(default_corpus().version), f"{how} of the corpus {DEFAULT}"


@declares(needs, probe)
def make_tool(config: Any, search: WikiSearch) -> Tool:
    """Creates ``wiki_search``, which calls a server if ``url`` is set, or searches locally."""
    wiki = config.wiki_search
    if wiki.url:
        return RemoteSearch(wiki.url, wiki.top_k, key_env=config.remote_key_env)
    search.warm_up()
    return search
