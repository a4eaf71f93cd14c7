"""Services that echo the key they receive, and the tools that can use one."""

from __future__ import annotations

import itertools
import json

from coa_jax.run.settings import complete_config
from coa_jax.tools.make import ToolsConfig
from tests.tools.fault_server import FaultServer

KEY = "hush-0123456789-abcdef"
NAME = "COA_JAX_TEST_CREDS"  # a name that tells nobody that it is a secret
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
SERVICES = ("/search", "/retrieve", "/run_code", "/llm/chat/completions", "/mcp")

CALLS = {
    "web_search": "lighthouses",
    "wiki_search": "lighthouses",
    "code": "```py\nprint(1)\n```",
    "crawl_page": "http://127.0.0.1:{port}/page",
    "visual_inspector": '{{"file_path": "http://127.0.0.1:{port}/image"}}',
    "far": "anything",
}


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


def open_services(server: FaultServer, *ways: str) -> None:
    """All services repeat the key, in each way in turn; ``server.given`` keeps what they got."""
    server.given = []
    pages = itertools.cycle(map(echo, ways))
    for path in SERVICES:
        server.pages[path] = lambda handler: next(pages)(handler)
    server.pages["/image"] = lambda handler: handler.answer(PNG, content_type="image/png")


def configured(server, folder):
    """All tools that can have a key, each at a server that repeats it; answers are recorded."""
    chat = {"url": server.url("/llm"), "model": "m", "key_env": NAME, "attempts": 1}
    return complete_config(ToolsConfig, {
        "names": ("web_search", "wiki_search", "code", "crawl_page", "visual_inspector", "far"),
        "wiki_search": {"url": server.url("/retrieve")}, "code": {"url": server.url("/run_code")},
        "remote_key_env": NAME,
        "web_search": {"provider": "serper", "url": server.url("/search"), "key_env": NAME},
        "crawl_page": {"allow_hosts": (f"127.0.0.1:{server.port}",), "summarizer": chat},
        "visual_inspector": {"chat": chat, "allow_hosts": (f"127.0.0.1:{server.port}",)},
        "mcp": {"far": {"url": server.url("/mcp"), "key_env": NAME, "timeout_s": 5.0,
                        "description": "d"}},
        "store": {"path": str(folder / "calls.sqlite"), "mode": "record", "tools": ()},
    })  # fmt: skip
