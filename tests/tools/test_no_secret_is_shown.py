"""Keys reach the services they are for, and appear nowhere else, whatever these send back."""

from __future__ import annotations

import asyncio
import json
import logging
import os

import pytest

from coa_jax.settings import build, complete
from coa_jax.tasks.judge import Judge, JudgeConfig
from coa_jax.tools.base import ToolContext, call
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.worker import Workers
from tests.tools import fault_server

KEY = "hush-0123456789-abcdef"
NAME = "COA_JAX_TEST_CREDS"  # a name that tells nobody that it is a secret
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)

CALLS = {
    "web_search": "lighthouses",
    "wiki_search": "lighthouses",
    "code": "```py\nprint(1)\n```",
    "crawl_page": "http://127.0.0.1:{port}/page",
    "visual_inspector": '{{"file_path": "http://127.0.0.1:{port}/image"}}',
    "far": "anything",
}


LOOK = """```py
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/*/environ"):
    try:
        print(open(path).read())
    except OSError:
        pass
```"""


def body_of(path, shown):
    """An answer in the form of each service, with some text in every place for text."""
    if "search" in path:
        return {"organic": [{"title": shown, "link": f"http://x.example/{shown}",
                             "snippet": shown, "source": shown, "date": shown}]}  # fmt: skip
    if "retrieve" in path:
        return {"result": [[{"document": {"title": shown, "text": shown, "id": shown},
                             "score": 1.0}]]}  # fmt: skip
    if "run_code" in path:
        ran = {"status": "Finished", "return_code": 0, "stdout": shown, "stderr": shown}
        return {"status": "Success", "message": shown, "run_result": ran}
    return {"choices": [{"message": {"content": f"It is {shown}.", "role": "assistant"}}]}


def echo(way):
    """A page that repeats the key it was given, in some way."""

    def page(handler):
        sent = handler.headers
        given = sent.get("authorization", "") or sent.get("x-api-key", "")
        handler.owner.given.append(given)
        key = given.removeprefix("Bearer ") or "no key"
        answer = json.dumps(body_of(handler.parts.path, f"Bearer {key}")).encode()
        if way == "content":
            handler.answer(answer, content_type="application/json", x_key=key)
        elif way == "no JSON":
            handler.answer(f"<b>{key}</b>".encode())
        elif way == "other JSON":
            handler.json({"error": {"message": key, key: [key]}})
        elif way == "type":
            handler.answer(answer, content_type=f"text/{key}")
        elif way == "redirect":
            handler.answer(b"", 302, location=f"http://127.0.0.1:1/{key}?k={key}")
        elif way == "status":
            handler.answer(key.encode(), 401, www_authenticate=key)
        elif way == "reason":
            handler.wfile.write(f"HTTP/1.1 403 {key}\r\nContent-Length: 0\r\n\r\n".encode())
        else:
            handler.wfile.write(f"HTTP/1.1 {key}\r\n{key}\r\n\r\n".encode())

    return page


WAYS = ("content", "other JSON", "type", "status")
FURTHER = ("no JSON", "redirect", "reason", "garbage")


def configured(server, folder):
    """All tools that can have a key, each at a server that repeats it; answers are recorded."""
    chat = {"url": server.url("/llm"), "model": "m", "key_env": NAME, "attempts": 1}
    return complete(ToolsConfig, {
        "names": ("web_search", "wiki_search", "code", "crawl_page", "visual_inspector", "far"),
        "wiki_url": server.url("/retrieve"), "code_url": server.url("/run_code"),
        "remote_key_env": NAME,
        "web_search": {"provider": "serper", "url": server.url("/search"), "key_env": NAME},
        "crawl_page": {"allow_hosts": (f"127.0.0.1:{server.port}",), "summarizer": chat},
        "visual_inspector": {"chat": chat, "allow_hosts": (f"127.0.0.1:{server.port}",)},
        "mcp": {"far": {"url": server.url("/mcp"), "key_env": NAME, "timeout_s": 5.0,
                        "description": "d"}},
        "store": {"path": str(folder / "calls.sqlite"), "mode": "record", "tools": ()},
    })  # fmt: skip


@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in FURTHER)]
)
def test_a_key_that_a_service_sends_back_is_in_no_trace_log_or_recording(
    tmp_path, monkeypatch, caplog, capfd, way
):
    monkeypatch.setenv(NAME, KEY)
    caplog.set_level(logging.DEBUG)
    with fault_server.running() as server:
        server.given = []
        for path in ("/search", "/retrieve", "/run_code", "/llm/chat/completions", "/mcp"):
            server.pages[path] = echo(way)
        server.pages["/image"] = lambda handler: handler.answer(PNG, content_type="image/png")
        values = configured(server, tmp_path)
        config = build(ToolsConfig, values)
        tools = make_tools(config)
        context = ToolContext(deadline=8.0, question="q", think="I want to know")

        async def use():
            calls = [call(t, CALLS[t.name].format(port=server.port), context) for t in tools]
            judge = Judge(JudgeConfig(
                ChatConfig(server.url("/llm"), "m", NAME, attempts=1),
                attempts=1, cache=str(tmp_path / "verdicts.sqlite"),
            ))  # fmt: skip
            return await asyncio.gather(*calls, judge("q", ["a"], "b"))

        *seen, _ = asyncio.run(use())
        keyed = [given for given in server.given if KEY in given]
        assert len(keyed) >= 6  # each of the services was given it
        shown = [repr(seen), json.dumps([s.detail for s in seen]), values.to_json(), repr(config),
                 repr(tools), repr([vars(tool) for tool in tools]), caplog.text]  # fmt: skip
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


def test_programs_and_parsers_do_not_have_the_environment(monkeypatch):
    monkeypatch.setenv(NAME, KEY)
    (code,) = make_tools(ToolsConfig(names=("code",)))
    seen = asyncio.run(call(code, LOOK, ToolContext()))
    assert seen.ok and "PATH" in seen.text and KEY not in seen.text
    assert os.environ[NAME] == KEY
    assert Workers("os:getenv").ask(NAME, timeout=30.0) is None
