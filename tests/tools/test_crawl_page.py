"""Reading pages: text, PDF, robots, summaries, failures page by page."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from coa_jax.errors import UserError
from coa_jax.tools import crawl_page, page_text
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.bm25 import WikiIndex
from coa_jax.tools.corpus import Passage
from coa_jax.tools.crawl_page import CrawlConfig, CrawlPage
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.net.store import Store
from coa_jax.tools.recorded import Recorded
from coa_jax.tools.web_search import local_link
from coa_jax.tools.worker import Workers
from tests.tools import fault_server

KEY = "chat-key-0123456789"
FACT = "The lighthouse of Aland was built in 1868 and is 42 metres tall."


TEXTS = {"/malformed", "/notjson", "/deep", "/noise"}
"""Text that is no use, which is not for the tool to judge."""


def pdf(text: str) -> bytes:
    """A PDF file of one page."""
    stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    content, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 6\n0000000000 65535 f \n" + table
    return content + head + b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % len(content)


def reply(handler):
    """A chat endpoint that answers with what it was asked."""
    asked = json.loads(handler.body)["messages"][0]["content"]
    answer = "to learn its height" if "hope to find" in asked else f"Query: {len(asked)} characters"
    handler.json({"choices": [{"message": {"role": "assistant", "content": answer}}]})


@pytest.fixture(scope="module")
def server(server):
    pages = server.pages
    pages["/pdf"] = lambda h: h.answer(pdf(FACT), content_type="application/pdf")
    pages["/hiddenpdf"] = lambda h: h.answer(pdf(FACT))
    pages["/badpdf"] = lambda h: h.answer(b"%PDF-1.4 broken", content_type="application/pdf")
    pages["/plain"] = lambda h: h.answer(FACT.encode(), content_type="text/plain")
    pages["/json"] = lambda h: h.answer(b'{"height": 42}', content_type="application/json")
    pages["/long"] = lambda h: h.answer(b"word " * 50_000, content_type="text/plain")
    attributes = " ".join(f"a{i}=1" for i in range(300_000))
    pages["/attributes"] = lambda h: h.answer(f"<p {attributes}>{FACT}</p>".encode())
    many = " ".join(f"a{i}=1" for i in range(9_000))
    pages["/tags"] = lambda h: h.answer(f"<p {many}>{FACT}</p>".encode() * 90)
    pages["/llm/chat/completions"] = reply
    pages["/deaf/chat/completions"] = lambda h: h.json({"error": h.headers["authorization"]}, 500)
    return server


@pytest.fixture(scope="module")
def index():
    passages = (Passage("Aland: Capital", "Mariehamn."), Passage("Aland: Area", "1,580 sq km."))
    return WikiIndex.build(passages)


@pytest.fixture(autouse=True, scope="module")
def limits():
    """One attempt per page, in less time, so that a page that fails costs little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crawl_page, "_PAGE_S", 3.0)
        patch.setattr(crawl_page, "_ATTEMPTS", 1)
        yield


@pytest.fixture(scope="module")
def reader(index, limits):
    return tool(index)


def tool(index=None, **options):
    options = {"allow_hosts": ("127.0.0.1",), **options}
    return CrawlPage(CrawlConfig(**options), lambda: index)


def ask(tool, arguments, **context):
    return asyncio.run(call_tool(tool, arguments, ToolContext(**context)))


def test_pages_come_back_in_the_form_of_the_release(server, reader):
    page, missing = server.url("/page"), server.url("/missing")
    seen = ask(reader, f"{page} | [the keeper]({missing})|not an address")
    assert isinstance(reader, Tool) and seen.ok and seen.outcome == "ok"
    first, second = seen.text.rsplit("\n\n", 1)
    assert first.startswith(f"Page 1 [{page}] Summary:\nLighthouses")
    assert FACT in first and "Imprint" not in first
    why = "the server answered with status 404"
    assert second == f"Page 2 [{missing}]: [Page content not accessible: {why}]"
    assert (seen.detail["failed"], seen.detail["errors"]) == (1, ["status"])


@pytest.mark.parametrize(
    "path", ["/pdf", "/hiddenpdf", "/plain", "/gzip", "/klingon", "/redirect?to=/page"]
)
def test_kinds_of_content_that_can_be_read(server, reader, path):
    assert FACT in ask(reader, server.url(path)).text


def test_wrong_encodings_and_json(server, reader):
    assert "gardien âgé" in ask(reader, server.url("/latin1")).text
    assert '"height": 42' in ask(reader, server.url("/json")).text


@pytest.mark.parametrize("path", sorted({*fault_server.FAULTS, "/badpdf"} - TEXTS))
def test_each_fault_is_a_text_in_time(server, reader, path, monkeypatch):
    url = server.url(path)
    monkeypatch.setattr(crawl_page, "_PAGE_S", 1.0)
    monkeypatch.setattr(crawl_page, "_MAX_BYTES", 1 << 20)
    hurried = tool()
    hurried._workers = reader._workers
    seconds = fault_server.stopwatch()
    seen = ask(hurried, url)
    assert seconds() < 15  # of 30
    assert (seen.ok, seen.outcome) == (False, "timeout" if path in ("/hang", "/drip") else "error")
    assert seen.text.startswith(f"Page 1 [{url}]: [Page content not accessible: ")
    assert seen.text.count("\n") == 0


@pytest.mark.parametrize("path", ["/attributes", "/tags"])
def test_a_page_that_takes_too_long_to_parse_is_the_fault_of_the_page(server, path):
    seconds = fault_server.stopwatch()
    # 10 s of processor time take much longer on a busy machine.
    seen = ask(tool(timeout_s=150.0), server.url(path))
    assert (seen.outcome, seen.detail["errors"]) == ("error", ["malformed"])
    assert seconds() < 140


def test_one_slow_page_does_not_cost_the_others(server, reader):
    seen = ask(reader, f"{server.url('/hang')}|{server.url('/page')}", deadline=3)
    assert seen.ok and FACT in seen.text and "took too long" in seen.text
    assert seen.seconds < 3


def test_private_addresses_are_refused(server):
    closed = tool(allow_hosts=())
    server.hits.clear()
    seen = ask(closed, f"{server.url('/page')}|http://169.254.169.254/latest")
    assert seen.outcome == "error"
    assert seen.text.count("does not belong to the public internet") == 2
    assert not server.hits


def test_blocked_pages_are_not_opened(server, index):
    seen = ask(tool(index, blocked=("127.0.0.1/page",)), server.url("/page"))
    assert "on the list of those that are not opened" in seen.text


def test_robots_are_respected_unless_told_otherwise(server, index):
    rules = b"User-agent: *\nDisallow: /p*e\nAllow: /plain\n"
    server.pages["/robots.txt"] = lambda h: h.answer(rules, content_type="text/plain")
    try:
        polite = tool(index)
        server.hits.clear()
        assert "does not allow robots" in ask(polite, server.url("/page")).text
        assert FACT in ask(polite, server.url("/plain")).text
        assert server.hits["/robots.txt"] == 1
        assert FACT in ask(tool(index, robots=False), server.url("/page")).text
        server.pages["/robots.txt"] = lambda h: h.answer(b"", 503)
        assert "rules for robots cannot be read" in ask(tool(index), server.url("/page")).text
    finally:
        server.pages["/robots.txt"] = fault_server.missing


def test_rules_for_robots_are_read_again_only_after_a_failure_that_may_pass(server, index):
    rules = lambda h: h.answer(b"User-agent: *", content_type="text/plain")  # noqa: E731
    found = []
    try:
        for failure in (lambda h: h.answer(b"", 503), fault_server.missing):
            polite = tool(index)
            server.hits.clear()
            for page in (failure, rules, rules):
                server.pages["/robots.txt"] = page
                seen = ask(polite, server.url("/plain"))
                found.append((FACT in seen.text, server.hits["/robots.txt"]))
    finally:
        server.pages["/robots.txt"] = fault_server.missing
    assert found == [(False, 1), (True, 2), (True, 2), (True, 1), (True, 1), (True, 1)]


def test_links_of_the_local_search_can_be_opened(reader):
    seen = ask(reader, "http://wiki.local/Aland | http://wiki.local/Atlantis")
    assert "Aland: Capital\nMariehamn.\n\nAland: Area\n1,580 sq km." in seen.text
    assert "[Page content not accessible: there is no such page]" in seen.text


def test_the_section_that_a_local_link_names_comes_first(reader):
    link = local_link("Aland: Area")
    assert link == "http://wiki.local/Aland#Area"
    told = ask(reader, link).text
    assert told.index("Aland: Area\n1,580 sq km.") < told.index("Aland: Capital\nMariehamn.")
    other = "http://wiki.local/Aland#Nothing_of_this_name"
    assert (
        ask(reader, other).text.partition("\n")[2]
        == (ask(reader, "http://wiki.local/Aland").text.partition("\n")[2])
    )


def test_a_page_that_breaks_the_reader_costs_its_own_entry_only(server, reader, monkeypatch):
    def broken(title):
        raise RuntimeError("oh")

    monkeypatch.setattr(reader, "local_page", broken)
    far = "http://127.0.0.1:99999/"
    seen = ask(reader, f"http://wiki.local./Aland|{far}|{server.url('/page')}")
    assert seen.ok and FACT in seen.text
    assert seen.detail["errors"] == ["fault", "refused"]
    assert ask(reader, f"http://wiki.local/Aland|{far}").outcome == "fault"


def test_that_no_process_is_free_to_read_a_page_is_not_the_fault_of_the_page(server):
    busy = tool(timeout_s=2.0)
    busy._workers = Workers("time:sleep", count=1)
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(busy._workers.ask, 3.0, timeout=10)
        while not busy._workers._free.empty():  # until the only process is taken
            time.sleep(0.01)
        seen = ask(busy, server.url("/page"))
        sleeping.result()
    assert (seen.outcome, seen.detail["errors"]) == ("fault", ["fault"])


def test_what_a_stored_answer_depends_on_names_it(index, tmp_path):
    chat = ChatConfig("http://127.0.0.1:1/llm", "small")
    store = Store(tmp_path / "calls.sqlite")

    def key(context, mode="cache", **options):
        return Recorded(tool(index, **options), store, mode).key("http://a.example", context)

    context = ToolContext(question="How tall is it?")
    other = ToolContext(question="Who built it?")
    assert key(context) == key(other)
    assert key(context) != key(context, blocked=("a.example",))
    assert key(context) != key(context, robots=False)
    for mode in ("cache", "record"):
        assert key(context, mode, summarizer=chat) != key(other, mode, summarizer=chat)


@pytest.mark.parametrize("recorded_with_summaries", [True, False])
def test_a_recording_is_replayed_with_and_without_a_summariser(
    server, index, tmp_path, recorded_with_summaries
):
    store, url = Store(tmp_path / "calls.sqlite"), server.url("/page")
    with_it = tool(index, summarizer=ChatConfig(server.url("/llm"), "small"))
    tools = [with_it, tool(index)] if recorded_with_summaries else [tool(index), with_it]
    asked = {"question": "How tall?", "think": "I must know how tall it is."}
    first = ask(Recorded(tools[0], store, "record"), url, **asked)
    for again in tools:
        assert ask(Recorded(again, store, "replay"), url, **asked).text == first.text
    # A summary is of its question, a page is the same for all.
    other = ask(Recorded(tools[1], store, "replay"), url, question="Who built it?")
    assert other.outcome == ("fault" if recorded_with_summaries else "ok")


def test_long_pages_and_long_lists_are_cut(server, index):
    short = tool(index, page_chars=100)
    seen = ask(short, "|".join(server.url(f"/long?{i}") for i in range(7)))
    assert seen.text.count("characters left out") == 5 and len(seen.text) < 1500
    assert seen.text.endswith("[2 more left out: at most 5 pages are read in a call]")


def test_summaries_know_the_query_and_the_intent(server, index, monkeypatch):
    monkeypatch.setenv("CHAT_KEY", KEY)
    chat = ChatConfig(server.url("/llm"), "small", key_env="CHAT_KEY")
    server.requests.clear()
    seen = ask(
        tool(index, summarizer=chat),
        f"{server.url('/page')}|{server.url('/plain')}",
        history=(("web_search", "lighthouse"), ("web_search", "lighthouse height"), ("code", "x")),
        think="I must know how tall it is.",
        question="How tall?",
    )
    assert seen.text.count("Summary:\nQuery: ") == 2
    asked = [json.loads(r[3])["messages"][0]["content"] for r in server.requests if r[0] == "POST"]
    assert len(asked) == 3  # one intent, two pages
    assert "I must know how tall it is." in asked[0]
    for prompt in asked[1:]:
        assert "Search query: lighthouse height" in prompt and FACT in prompt
        assert "Aim: to learn its height" in prompt
    posts = [r for r in server.requests if r[0] == "POST"]
    assert all(r[2]["authorization"] == f"Bearer {KEY}" for r in posts)
    assert all("authorization" not in r[2] for r in server.requests if r[0] == "GET")


def test_a_summariser_that_fails_leaves_the_page_and_says_so(server, index, monkeypatch):
    monkeypatch.setenv("CHAT_KEY", KEY)
    deaf = ChatConfig(server.url("/deaf"), "small", key_env="CHAT_KEY", attempts=1)
    seen = ask(tool(index, summarizer=deaf), server.url("/page"), think="why")
    assert seen.ok and FACT in seen.text
    assert "[No summary: the server answered with status 500. The page begins:]" in seen.text
    assert seen.detail["summary_failures"] and KEY not in f"{seen}"


def test_a_cache_keeps_no_page_that_lacks_its_summary_and_no_list_that_lacks_a_page(
    server, index, tmp_path
):
    url, store = server.url("/page"), Store(tmp_path / "calls.sqlite")
    deaf = ChatConfig(server.url("/weak"), "small", attempts=1)
    cached = Recorded(tool(index, summarizer=deaf), store, "cache")
    server.pages["/weak/chat/completions"] = lambda h: h.answer(b"busy", 503)
    assert "[No summary: " in ask(cached, url).text
    server.pages["/weak/chat/completions"] = reply
    assert "Summary:\nQuery: " in ask(cached, url).text
    assert ask(cached, url).detail["stored"]
    both = f"{url}|{server.url('/late')}"
    server.pages["/late"] = lambda h: h.answer(b"busy", 503)
    assert ask(cached, both).detail["failed"] == 1
    server.pages["/late"] = server.pages["/page"]
    assert ask(cached, both).detail["failed"] == 0


def test_calls_without_an_address_and_repeats(reader, server):
    assert ask(reader, "lighthouse height").outcome == "bad_call"
    repeat = ask(reader, server.url("/page"), history=(("crawl_page", server.url("/page")),))
    assert repeat.outcome == "error" and "already read" in repeat.text


def test_missing_packages_and_wrong_settings_are_explained(monkeypatch):
    with pytest.raises(UserError, match="page_chars"):
        tool(page_chars=0)
    with pytest.raises(UserError, match=r"^model is missing; .*http://a.example/v1"):
        ChatConfig("http://a.example/v1")
    monkeypatch.setattr(page_text, "missing_packages", lambda: ["trafilatura"])
    with pytest.raises(UserError, match="crawl_page needs trafilatura; run: "):
        tool()
