"""The tools of a run from its settings."""

from __future__ import annotations

import asyncio

import pytest

from coa_jax.errors import UserError
from coa_jax.run.settings import build_config
from coa_jax.tools import make
from coa_jax.tools.base import Observation, Tool, ToolContext, call_tool
from coa_jax.tools.code import CodeConfig
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.net.store import Store
from coa_jax.tools.recorded import Recorded, StoreConfig
from coa_jax.tools.wiki_search import WikiConfig


def test_the_default_tools_work_at_once():
    search, code = make_tools(ToolsConfig(wiki_search=WikiConfig(top_k=2)))
    assert isinstance(search, Tool)
    assert isinstance(code, Tool)

    async def use():
        return (
            await call_tool(search, "capital of Norway", ToolContext()),
            await call_tool(code, "```py\nprint(6 * 7)\nprint('x' * 5000)\n```", ToolContext()),
        )

    found, ran = asyncio.run(use())
    assert (found.outcome, ran.outcome) == ("ok", "ok")
    assert "Norway" in found.text
    assert found.text.count("Doc ") == 2
    assert "42" in ran.text
    assert "x" * 1537 not in ran.text


def test_only_the_named_tools_are_made_in_their_order():
    assert [tool.name for tool in make_tools(ToolsConfig(names=("code",)))] == ["code"]
    assert [t.name for t in make_tools(ToolsConfig(names=("code", "wiki_search")))] == [
        "code",
        "wiki_search",
    ]
    assert make_tools(ToolsConfig(names=())) == []


def test_limits_reach_the_programs():
    (code,) = make_tools(ToolsConfig(names=("code",), code=CodeConfig(timeout_s=1.0)))
    assert code.timeout_s == 1.0
    seen = asyncio.run(call_tool(code, "```py\nwhile True: pass\n```", ToolContext()))
    assert seen.outcome == "timeout"


def test_the_web_tools_work_without_a_network_or_a_key(monkeypatch, tmp_path):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    names = ("web_search", "crawl_page")
    store = StoreConfig(path=str(tmp_path / "calls.sqlite"), tools=("web_search",))
    search, crawl = make_tools(ToolsConfig(names=names, store=store))
    assert (search.name, crawl.name) == names
    assert isinstance(search, Recorded) and not isinstance(crawl, Recorded)

    async def use():
        found = await call_tool(search, "capital of Norway", ToolContext())
        link = found.detail["links"][0]
        again = await call_tool(search, "capital of Norway", ToolContext())
        return found, again, await call_tool(crawl, link, ToolContext())

    found, again, page = asyncio.run(use())
    assert found.text == again.text and again.detail["stored"]
    assert "Oslo" in found.text
    assert page.ok and "Norway: Capital" in page.text


@pytest.mark.parametrize(
    ("mode", "named", "kept"),
    [
        ("cache", {}, ["web_search"]),
        ("record", {}, ["wiki_search", "web_search"]),
        ("replay", {}, ["wiki_search", "web_search"]),
        ("cache", {"tools": ("wiki_search",)}, ["wiki_search"]),
        ("replay", {"tools": ("wiki_search",)}, ["wiki_search"]),
    ],
)
def test_recordings_hold_all_tools_and_caches_the_web(monkeypatch, tmp_path, mode, named, kept):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    store = StoreConfig(path=str(tmp_path / "calls.sqlite"), mode=mode, **named)
    Store(store.path).put("key", "wiki_search", "x", Observation("x", True, "ok", 0.0))
    made = make_tools(ToolsConfig(names=("wiki_search", "web_search"), store=store))
    assert [tool.name for tool in made if isinstance(tool, Recorded)] == kept


@pytest.mark.parametrize("exists", [False, True])
def test_a_store_without_answers_cannot_be_replayed(tmp_path, exists):
    path = tmp_path / "deep" / "calls.sqlite"
    if exists:
        Store(path)
    store = StoreConfig(path=str(path), mode="replay")
    with pytest.raises(UserError, match=r"calls\.sqlite has no answers to replay; give") as told:
        make_tools(ToolsConfig(names=("code",), store=store))
    assert "\n" not in str(told.value) and path.exists() == exists
    # Nothing of the store is needed by tools that it does not hold.
    assert make_tools(ToolsConfig(names=(), store=store)) == []


@pytest.mark.parametrize(("provider", "built"), [("local", 1), ("serper", 0)])
def test_the_index_of_a_local_web_search_is_built_before_the_first_call(
    monkeypatch, provider, built
):
    monkeypatch.setenv("SERPER_API_KEY", "web-key-0123456789")
    calls = []
    monkeypatch.setattr(make.WikiSearch, "warm_up", lambda search: calls.append(search))
    settings = {"names": ("web_search",), "web_search": {"provider": provider}}
    make_tools(build_config(ToolsConfig, settings))
    assert len(calls) == built


RUN_CODE = "http://127.0.0.1:9/run_code"
CHAT = {"url": "http://127.0.0.1:9/v1", "model": "eyes"}


@pytest.mark.parametrize(
    ("name", "base", "change"),
    [
        ("code", {}, {"code": {"timeout_s": 1.0}}),
        ("code", {}, {"code": {"memory_mb": 512}}),
        ("code", {}, {"code": {"url": RUN_CODE}}),
        *(
            ("code", {"code": {"url": RUN_CODE}}, {"code": {"url": RUN_CODE, **change}})
            for change in ({"url": f"{RUN_CODE}r"}, {"timeout_s": 1.0}, {"memory_mb": 512})
        ),
        *(
            ("visual_inspector", {"visual_inspector": {"chat": CHAT}}, {"visual_inspector": change})
            for change in (
                {"chat": {**CHAT, "url": "http://127.0.0.1:8/v1"}},
                {"chat": {**CHAT, "model": "more eyes"}},
                {"chat": {**CHAT, "max_tokens": 9}},
                {"chat": CHAT, "allow_hosts": ("a.example",)},
            )
        ),
    ],
)
def test_a_cache_tells_apart_what_other_limits_and_addresses_answer(tmp_path, name, base, change):
    store = {"path": str(tmp_path / "calls.sqlite"), "tools": (name,)}

    def key(**settings):
        values = {"names": (name,), "store": store, **settings}
        (made,) = make_tools(build_config(ToolsConfig, values, "config.tools"))
        return made.key("the same", ToolContext())

    assert key(**base) == key(**base) != key(**{**base, **change})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"names": ("web_search",), "web_search": {"top_k": 0}}, "top_k is 0"),
        ({"crawl_page": {"summariser": {}}}, r"config\.tools\.crawl_page\.summariser is not"),
        ({"store": {"path": "/proc/x/y"}}, "^/proc/x/y "),
        ({"names": ("code", "telepathy")}, r"tools.names\[1\] is 'telepathy'"),
        (
            {"names": ("wiki_search",), "wiki_search": {"top_k": 0}},
            "top_k is 0; give a whole number from 1",
        ),
        (
            {"names": ("code",), "code": {"memory_mb": 0}},
            "memory_mb is 0; give a whole number from 1",
        ),
        ({"store": {"tools": ("nonsense",)}}, r"tools\.store\.tools\[0\] is 'nonsense'; give one"),
        ({"protocol": "no name"}, r"config\.tools\.protocol is 'no name'; give a name of letters"),
        ({"nmaes": ("code",)}, r"config\.tools\.nmaes is not a setting"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(UserError, match=message):
        make_tools(build_config(ToolsConfig, values, "config.tools"))


def test_programs_run_without_isolation_only_with_the_environments_consent(monkeypatch):
    monkeypatch.delenv("COA_JAX_ALLOW_UNSAFE_CODE", raising=False)
    with pytest.raises(UserError, match="COA_JAX_ALLOW_UNSAFE_CODE"):
        make_tools(ToolsConfig(names=("code",), unsafe=True))
