"""The client of OpenAI-compatible endpoints: failures it retries, and responses it refuses."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json

import pytest

from coa_jax.errors import UserError
from coa_jax.tasks.judge import Judge, JudgeConfig
from coa_jax.tools.net import chat as chat_module
from coa_jax.tools.net.chat import ChatConfig, Client, budget_tracker_of, chat
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.visual_inspector import VisualConfig, VisualInspector
from tests.tools import fault_server

ASK = [{"role": "user", "content": "?"}]
GOOD = {"choices": [{"message": {"content": " Oslo\n"}}],
        "usage": {"prompt_tokens": 30, "completion_tokens": 5}}  # fmt: skip
ROUTE = "/v1/chat/completions"


def serve(server, *answers):
    """Answers of a server, one after the other; the last one is that of all further requests."""
    left = list(answers)
    server.hits.clear()
    server.pages[ROUTE] = lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(chat_module, "_BACKOFF_S", 0.001)


def good(handler):
    handler.json(GOOD)


def asked(server, **options):
    config = ChatConfig(server.url("/v1"), "m", **options)
    return asyncio.run(chat(config, ASK))


def test_failures_in_passing_are_tried_again_and_only_answers_are_paid_for(server):
    silent = {**GOOD, "choices": [{"message": {"content": " "}}]}
    serve(
        server,
        lambda h: h.answer(b"busy", 503),
        lambda h: h.answer(b"[1, 2", content_type="application/json"),
        lambda h: h.json({"error": "none"}),
        lambda h: h.json(silent),
        good,
    )
    config = {"attempts": 5, "max_calls": 7}
    assert asked(server, **config) == "Oslo"
    assert server.hits[ROUTE] == 5
    spent = budget_tracker_of(ChatConfig(server.url("/v1"), "m", **config)).spent
    assert (spent.calls, spent.prompt, spent.unmetered) == (2, 60, 0)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_refusal_is_not_tried_again_and_keeps_the_words_of_the_server(server, status):
    serve(server, lambda h: h.json({"error": {"message": "no credits"}}, status))
    with pytest.raises(FetchError) as caught:
        asked(server)
    assert (caught.value.kind, caught.value.status, server.hits[ROUTE]) == ("status", status, 1)
    assert "no credits" in caught.value.said and "credits" not in caught.value.message
    assert caught.value.account == (status in (400, 422))


def test_a_redirect_takes_no_message_to_another_address(server):
    serve(server, lambda h: h.answer(b"", 307, location="/elsewhere"))
    server.pages["/elsewhere"] = good
    with pytest.raises(FetchError, match="status 307"):
        asked(server)
    assert server.hits["/elsewhere"] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_is_read_up_to_its_limit_in_bytes_also_a_packed_one(server, packed):
    body = json.dumps({**GOOD, "more": "x" * (9 << 20)}).encode()
    headers = {"content_encoding": "gzip"} if packed else {}
    body = gzip.compress(body) if packed else body
    serve(server, lambda h: h.answer(body, content_type="application/json", **headers))
    with pytest.raises(FetchError) as caught:
        asked(server)
    assert (caught.value.kind, server.hits[ROUTE]) == ("too_large", 1)


@pytest.mark.parametrize("limit", [{"timeout_s": 0.3}, {"seconds": 0.3}])
def test_an_attempt_and_a_call_end_with_their_time_also_while_bytes_arrive(server, limit):
    serve(server, server.pages["/drip"])
    config = ChatConfig(server.url("/v1"), "m", timeout_s=limit.get("timeout_s", 60), attempts=1)
    seconds = fault_server.stopwatch()
    with pytest.raises(FetchError) as caught:
        asyncio.run(chat(config, ASK, limit.get("seconds")))
    assert caught.value.kind == "timeout"
    assert seconds() < 10  # of 30


def test_texts_without_a_chat_are_continued(server):
    server.pages["/v1/completions"] = lambda h: h.json({"said": json.loads(h.body)})

    async def ask():
        async with Client(ChatConfig(server.url("/v1"), "m")) as client:
            return await client.ask({"prompt": [1, 2], "prompt_logprobs": 1}, lambda a: a["said"])

    assert asyncio.run(ask()) == {"model": "m", "prompt": [1, 2], "prompt_logprobs": 1}


def test_without_its_package_who_needs_the_client_says_so_at_once(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "openai" else found(name, *a)
    )
    chat_config = ChatConfig("http://localhost:1/v1", "m")
    for make in (
        lambda: Judge(JudgeConfig(chat_config)),
        lambda: VisualInspector(VisualConfig(chat_config)),
        lambda: Client(chat_config),
    ):
        with pytest.raises(UserError, match=r"needs openai; run: .*(endpoint|openai)"):
            make()
    Judge(JudgeConfig())  # without an endpoint nothing is needed


def test_the_highest_cost_counts_the_replies_that_the_request_allows():
    options = {"prices": (("m", 0.0, 2.0),), "max_tokens": 100}
    assert ChatConfig("http://localhost:1/v1", "m", **options).money(0) == pytest.approx(200e-6)
    options["request"] = {"max_tokens": None, "max_completion_tokens": 5000}
    longer = ChatConfig("http://localhost:1/v1", "m", **options)
    assert longer.money(0) == pytest.approx(10_000e-6)
