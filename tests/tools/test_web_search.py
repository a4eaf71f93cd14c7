"""Searching the web: the observation of the release, providers, failures, secrets."""

from __future__ import annotations

import asyncio
import json
import sys
import types

import pytest

from coa_jax.errors import UserError
from coa_jax.tools import web_search
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.bm25 import WikiIndex
from coa_jax.tools.corpus import Passage
from coa_jax.tools.web_search import SearchResult, WebSearch, WebSearchConfig, format_results
from tests.tools import fault_server

KEY = "serper-key-0123456789"
ROWS = [
    {"title": "Lighthouse", "link": "https://a.example/1", "snippet": "Built in\n1868.",
     "date": "3 May 2020", "source": "Almanac", "position": 1},
    {"title": "Keeper", "link": "https://b.example/2"},
    {"title": "no link"},
    {"title": "Mirror", "link": "https://huggingface.co/datasets/x", "snippet": "the answer"},
]  # fmt: skip
PASSAGES = (
    Passage("Aland: Capital", "The capital of Aland is Mariehamn."),
    Passage("Aland: Area", "The area of Aland is 1,580 sq km."),
)


@pytest.fixture(scope="module")
def server(server):
    server.pages["/search"] = lambda h: h.json({"organic": ROWS})
    server.pages["/searx"] = lambda h: h.json(
        {"results": [{"title": "T", "url": "https://c.example/", "content": "text"}]}
    )
    server.pages["/none"] = lambda h: h.json({"organic": []})
    server.pages["/strange"] = lambda h: h.json({"organic": "soon"})
    server.pages["/denied"] = lambda h: h.json({"message": h.headers["x-api-key"]}, 403)
    return server


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", KEY)


@pytest.fixture(scope="module")
def index():
    return WikiIndex.build(PASSAGES)


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch):
    monkeypatch.setattr(web_search, "_ATTEMPTS", 1)


def tool(server, path="/search", **options):
    options = {"timeout_s": 2.0, "blocked": ("huggingface.co/datasets",), **options}
    return WebSearch(WebSearchConfig(url=server.url(path), **options), lambda: None)


def ask(tool, query="lighthouse of Aland", history=(), deadline=None):
    return asyncio.run(call_tool(tool, query, ToolContext(history=history, deadline=deadline)))


def test_observations_have_the_form_of_the_release(server):
    server.requests.clear()
    search = tool(server)
    seen = ask(search, " lighthouse\nof Aland ")
    assert isinstance(search, Tool) and seen.ok
    assert seen.text == (
        "Found 2 results:\n\n## Web Results\n"
        "1. [Lighthouse](https://a.example/1)\nDate published: 3 May 2020\nSource: Almanac\n"
        "https://a.example/1\nBuilt in 1868.\n\n"
        "2. [Keeper](https://b.example/2)\nhttps://b.example/2"
    )
    ((method, _, headers, body),) = server.requests
    assert (method, headers["x-api-key"]) == ("POST", KEY)
    assert json.loads(body) == {"q": "lighthouse of Aland", "num": 10}


def test_pages_that_are_blocked_are_not_shown(server):
    assert "huggingface" in ask(tool(server, blocked=())).text
    assert "huggingface" not in ask(tool(server)).text


def test_no_results_name_the_query(server):
    seen = ask(tool(server, "/none"), "xyzzy")
    assert (seen.ok, seen.outcome) == (False, "error")
    assert seen.text == "No results found for query: 'xyzzy'. Use a less specific query."


def test_a_metasearch_server_answers_too(server):
    seen = ask(tool(server, "/searx", provider="searxng"), "a & b")
    assert seen.text.endswith("1. [T](https://c.example/)\nhttps://c.example/\ntext")
    assert server.requests[-1][1] == "/searx?q=a+%26+b&format=json"


def test_the_local_index_needs_neither_key_nor_network(index, monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY")
    search = WebSearch(WebSearchConfig(), lambda: index)
    assert search.provider == "local"
    seen = ask(search, "capital of Aland")
    assert seen.text.startswith(
        "Found 2 results:\n\n## Web Results\n1. [Aland: Capital](http://wiki.local/Aland#Capital)\n"
        "http://wiki.local/Aland#Capital\nThe capital of Aland is Mariehamn."
    )


def test_with_a_key_the_web_is_searched(server):
    assert tool(server).provider == "serper"


def test_another_provider_is_a_function(monkeypatch):
    async def mine(query, count, limits):
        return [SearchResult(query, f"https://{count}.example", "s")]

    module = types.ModuleType("my_search")
    module.mine = mine
    monkeypatch.setitem(sys.modules, "my_search", module)
    search = WebSearch(WebSearchConfig(provider="my_search:mine", top_k=3), lambda: None)
    assert "1. [q](https://3.example)" in ask(search, "q").text


@pytest.mark.parametrize("path", [*fault_server.FAULTS, "/strange", "/denied"])
def test_a_service_that_fails_is_a_fault_or_a_timeout_in_time(server, path):
    late = path in ("/hang", "/drip")
    search = tool(server, path, timeout_s=0.5 if late else 7.0)
    seconds = fault_server.stopwatch()
    seen = ask(search)
    assert seconds() < 10  # of 30
    assert seen.outcome == ("timeout" if late else "fault")
    assert seen.text.startswith("The search failed: ")
    assert "127.0.0.1" not in seen.text and KEY not in f"{seen}"


def test_a_query_that_cannot_be_searched_is_the_mistake_of_who_wrote_it(server):
    for provider, query in (("serper", "word " * 900), ("searxng", "灯" * 230)):
        seen = ask(tool(server, provider=provider), query)
        assert (seen.ok, seen.outcome) == (False, "error") and "too long" in seen.text
        assert seen.detail == {"too_long": True}
    server.pages["/choosy"] = choosy
    search = tool(server, "/choosy")
    for status in ("400", "422", "413", "414"):
        assert ask(search).ok
        assert ask(search, status).outcome == "error"
    assert ask(tool(server, "/choosy"), "413").outcome == "error"  # only its size explains it


def test_only_in_an_address_is_a_sign_of_another_script_as_long_as_nine(server, index):
    assert ask(tool(server), "灯" * 1900).ok
    assert ask(tool(server, "/searx", provider="searxng"), "灯" * 220).ok
    local = WebSearch(WebSearchConfig(provider="local"), lambda: index)
    assert ask(local, "capital of Aland " + "灯" * 230).ok


def test_half_a_surrogate_pair_is_searched_for_as_a_sign_that_is_not_known(server):
    assert ask(tool(server, "/searx", provider="searxng"), "a\ud800").ok
    assert ask(tool(server), "a\ud800").ok


def choosy(handler):
    """Refuses the query "400" with this status, "empty" like a service without credits."""
    query = json.loads(handler.body)["q"]
    if query == "empty":
        handler.json({"message": "Not enough credits", "statusCode": 400}, 400)
    elif query.isdecimal():
        handler.json({"message": "Query not allowed."}, int(query))
    else:
        handler.json({"organic": ROWS})


def test_a_service_that_refuses_whatever_is_asked_is_no_mistake_of_the_policy(server):
    server.pages["/choosy"] = choosy
    search = tool(server, "/choosy")
    assert ask(search, "400").outcome == "fault"  # nothing shows that it takes our settings
    assert ask(search).ok
    assert ask(search, "empty").outcome == "fault"
    # An account that is empty in words we do not know is refused again and again.
    outcomes = [ask(search, "400").outcome for _ in range(5)]
    assert outcomes == ["error", "error", "error", "fault", "fault"]
    assert ask(search).ok and ask(search, "422").outcome == "error"


def test_the_deadline_of_the_caller_comes_first(server):
    seen = ask(tool(server, "/hang", timeout_s=30), deadline=4)
    assert seen.outcome == "timeout" and seen.seconds < 4
    assert seen.text.startswith("The search failed: ")


def test_empty_and_repeated_queries(server):
    assert ask(tool(server), " \n").outcome == "bad_call"
    repeat = ask(tool(server), "a  b", (("web_search", " a b"),))
    assert repeat.outcome == "error" and "already searched" in repeat.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": "altavista"}, "serper, searxng, local"),
        ({"provider": "no_such_module:f"}, "no_such_module"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 21}, "top_k"),
        ({"provider": "serper", "key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        ({"provider": "serper", "url": "ftp://x"}, "ftp://x"),
    ],
)
def test_mistakes_are_explained(options, message):
    with pytest.raises(UserError, match=message):
        WebSearch(WebSearchConfig(**options), lambda: None)


def test_titles_cannot_break_the_form():
    text = format_results([SearchResult("a\n\n2. [b", "https://a.example", "x" * 999)], "q", 10)
    assert text.split("\n")[3:] == [
        "1. [a 2. [b](https://a.example)",
        "https://a.example",
        "x" * 10,
    ]


def test_no_field_of_a_result_fills_the_observation():
    long = "y" * 1_000_000
    text = format_results([SearchResult(*(long,) * 5)], "q", 600)
    assert len(text) < 6000 and text.startswith("Found 1 results:")
