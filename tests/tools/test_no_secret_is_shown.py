"""Keys reach only their services, and appear nowhere else, whatever these services return."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from coa_jax.errors import UserError
from coa_jax.run.settings import build_config
from coa_jax.tasks.judge import Judge, JudgeConfig
from coa_jax.tools.base import Observation, ToolContext, call_tool
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.mcp_tool import McpConfig, McpTool
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.web_search import SearchResult, WebSearch, WebSearchConfig
from coa_jax.tools.worker import Workers
from tests.tools import fault_server
from tests.tools.echo_services import CALLS, FURTHER, KEY, NAME, WAYS, configured, open_services

SERVER = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))
LOOK = """```py
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/*/environ"):
    try:
        print(open(path).read())
    except OSError:
        pass
```"""


@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in FURTHER)]
)
def test_a_key_that_a_service_sends_back_is_in_no_trace_log_or_recording(
    tmp_path, monkeypatch, caplog, capfd, way
):
    monkeypatch.setenv(NAME, KEY)
    caplog.set_level(logging.DEBUG)
    with fault_server.running() as server:
        open_services(server, way)
        values = configured(server, tmp_path)
        config = build_config(ToolsConfig, values)
        tools = make_tools(config)
        context = ToolContext(deadline=60.0, question="q", think="I want to know")

        async def use():
            calls = [call_tool(t, CALLS[t.name].format(port=server.port), context) for t in tools]
            judge = Judge(JudgeConfig(
                ChatConfig(server.url("/llm"), "m", NAME, attempts=1),
                cache=str(tmp_path / "verdicts.sqlite"),
            ))  # fmt: skip
            return await asyncio.gather(*calls, judge("q", ["a"], "b"))

        *seen, _ = asyncio.run(use())
        keyed = [given for given in server.given if KEY in given]
        assert len(keyed) >= 6  # each of the services was given it
        shown = [repr(seen), json.dumps([s.detail for s in seen]), values.to_json(), repr(config),
                 repr(tools), repr([vars(tool) for tool in (*tools, tools[0].tool)]),
                 caplog.text]  # fmt: skip
    out, err = capfd.readouterr()
    shown += [out, err]
    assert not [text for text in shown if KEY in text]
    kept = list(tmp_path.iterdir())
    assert any(path.name.startswith("calls.sqlite") for path in kept)
    assert not [path for path in kept if KEY.encode() in path.read_bytes()]
    if way == "content":  # where the answer is used, the key is taken out of it
        texts = {tool.name: s.text for tool, s in zip(tools, seen, strict=True)}
        for name in ("web_search", "wiki_search", "code", "crawl_page", "visual_inspector"):
            assert "Bearer [secret]" in texts[name], texts[name]


@pytest.mark.parametrize(("way", "indent"), [("result", 24), ("error", 0)])
def test_a_key_that_a_program_was_given_and_says_is_hidden(monkeypatch, way, indent):
    """Also where the cut of a long answer would leave the beginning of the key."""
    monkeypatch.setenv(NAME, KEY)
    monkeypatch.setenv("TIDES", "/var/lib/tides")
    settings = {"command": SERVER, "tool": "leak", "env": (NAME, "TIDES"), "max_chars": 31}
    tool = McpTool("leak", McpConfig(**settings))
    body = json.dumps({"names": [NAME, "TIDES"], "way": way, "indent": indent})
    seen = asyncio.run(call_tool(tool, body, ToolContext()))
    assert seen.outcome == ("ok" if way == "result" else "error")
    assert "hush" not in seen.text and "[sec" in seen.text
    long = McpTool("leak", McpConfig(**{**settings, "max_chars": 300}))
    assert "/var/lib/tides" in asyncio.run(call_tool(long, body, ToolContext())).text


class Careless:
    """A tool of somebody else, that puts its key into what it says."""

    name, deadline = "careless", 5.0

    async def __call__(self, arguments, context):
        key = os.environ["CARELESS_API_KEY"]
        if arguments == "raise":
            raise RuntimeError(f"401 for https://far.example/?key={key}")
        return Observation(f"key {key}", True, "ok", 0.0, {"header": {"auth": f"Bearer {key}"}})


@pytest.mark.parametrize("way", ["raise", "say"])
def test_the_key_of_somebody_elses_tool_is_in_no_observation(monkeypatch, way):
    monkeypatch.setenv("CARELESS_API_KEY", KEY)
    seen = asyncio.run(call_tool(Careless(), way, ToolContext()))
    assert "[secret]" in repr(seen) and KEY not in repr(seen)


async def careless_search(query, count, limits):
    return [SearchResult(f"for {os.environ[NAME]}", "http://x.example/", "")]


def test_results_of_an_own_search_service_are_shown_without_its_key(monkeypatch):
    monkeypatch.setenv(NAME, KEY)
    config = WebSearchConfig(provider=f"{__name__}:careless_search", key_env=NAME)
    seen = asyncio.run(call_tool(WebSearch(config, lambda: None), "q", ToolContext()))
    assert "[for [secret]](http://x.example/)" in seen.text


@pytest.mark.parametrize(
    "url", [f"http://me:{KEY}@far.example/", f"http://a.example/?api_key={KEY}"]
)
@pytest.mark.parametrize("where", ["wiki_search", "code", "web_search", "summarizer", "mcp"])
def test_an_address_with_a_key_in_it_is_refused_before_it_is_written(url, where):
    values = {
        "summarizer": {"crawl_page": {"summarizer": {"url": url, "model": "m"}}},
        "mcp": {"mcp": {"far": {"url": url}}},
    }.get(where, {where: {"url": url}})
    with pytest.raises(UserError) as caught:
        build_config(ToolsConfig, values)
    assert KEY not in str(caught.value) and ".example/" in str(caught.value)


def test_programs_and_parsers_do_not_have_the_environment(monkeypatch):
    monkeypatch.setenv(NAME, KEY)
    (code,) = make_tools(ToolsConfig(names=("code",)))
    seen = asyncio.run(call_tool(code, LOOK, ToolContext()))
    assert seen.ok and "PATH" in seen.text and KEY not in seen.text
    assert os.environ[NAME] == KEY
    assert Workers("os:getenv").ask(NAME, timeout=30.0) is None
