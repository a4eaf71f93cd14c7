"""Requests that a server refuses, and its behaviour when clients disconnect or it is stopped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.api import save_model
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.serve.run import open_listener, serve
from coa_jax.serve.score import score
from coa_jax.serve.service import Service
from tests import forked, tiny_policy
from tests.serve.live import CONFIG, engine, meter, server, until

REPOSITORY = Path(__file__).resolve().parents[2]
LOOK = {"type": "function", "function": {"name": "look"}}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
BROKEN = {"type": "function", "function": {"name": "look", "arguments": "[1]"}}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "river?"}], "temperature": 1.0}

TEXT = {"model": "tiny", "prompt": "river", "max_tokens": 4}


@pytest.fixture(scope="module")
def address():
    with server() as where:
        yield where


def post(address, body, route="chat/completions", **options):
    return httpx.post(f"{address}/v1/{route}", json=body, timeout=60, **options)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt-4o"}, 404, "there is no model 'gpt-4o' here, but tiny and tiny-agent"),
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role: "),
        ({"temprature": 1}, 400, "temprature: this server does not know the field"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty: "),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.function: "),
        ({"model": "tiny-agent", "tools": [LOOK]}, 400, "the agent has tools of its own"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, 400,
         "tool_calls are for messages of the assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN]}]}, 400,
         "messages[0].tool_calls: the arguments are no JSON object"),
        ({"functions": [LOOK]}, 400, "functions: this server does not know the field"),
        ({"temperature": -1}, 400, "temperature: "),
        ({"top_p": 0}, 400, "top_p: "),
        ({"n": 9}, 400, "n is 9; this server allows 8"),
        ({"max_tokens": 100_000}, 400, "max_tokens is 100000; the prompt has "),
        ({"messages": [{"role": "user", "content": "x " * 600}]}, 400, "context has room for 256"),
        ({"top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        ({"stop": [""]}, 400, "stop"),
        ({"model": "tiny-agent", "stop": "x"}, 400, "send no stop strings"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options are for streams"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_openais_form(address, change, status, message):
    answer = post(address, {**ASK, **change})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["code"] == status
    streamed = post(address, {**ASK, **change, "stream": True})
    if "stream_options" not in change:
        assert streamed.status_code == status


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model":', b"[" * 20_000]
)
def test_what_is_no_request_is_a_400(address, content):
    headers = {"content-type": "application/json"}
    for route in ("chat/completions", "completions"):
        answer = httpx.post(f"{address}/v1/{route}", content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def test_large_bodies_unknown_paths_and_other_methods_are_refused(address):
    large = post(address, {**ASK, "user": "x" * CONFIG.max_body})
    assert (large.status_code, large.json()["error"]["code"]) == (413, 413)
    assert httpx.get(f"{address}/v1/nothing").json()["error"]["code"] == 404
    assert httpx.get(f"{address}/v1/completions").json()["error"]["code"] == 405


def test_a_request_that_is_refused_for_one_of_its_prompts_leaves_none_running():
    asked = {"model": "tiny", "prompt": ["one", "two", "three", "four", "five", "six"], "n": 1}
    with server(dataclasses.replace(CONFIG, max_waiting=1)) as address:
        answer = post(address, {**asked, "max_tokens": 200, "temperature": 1}, "completions")
        assert answer.status_code == 429
        until(address, "coa_jax_running", 0)
        assert meter(address, "coa_jax_generated_tokens_total") == 0


def test_only_who_has_the_key_is_served():
    with server(api_key="sesame") as address:
        assert post(address, ASK).status_code == 401
        assert post(address, ASK, headers={"Authorization": "Bearer other"}).status_code == 401
        assert httpx.get(f"{address}/v1/models").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        given = {"Authorization": "Bearer sesame"}
        assert post(address, {**ASK, "max_tokens": 2}, headers=given).status_code == 200
        assert "sesame" not in httpx.get(f"{address}/metrics", headers=given).text


def test_a_server_of_this_machine_has_other_names_with_a_key_or_where_it_listens_to_others(address):
    foreign = {"Host": "evil.example"}
    for route in ("/health", "/v1/models", "/"):
        answer = httpx.get(f"{address}{route}", headers=foreign)
        assert answer.status_code == 403
        assert "its own machine" in answer.json()["error"]["message"]
    assert post(address, {**ASK, "max_tokens": 1}, headers=foreign).status_code == 403
    with server(api_key="sesame") as address:
        assert httpx.get(f"{address}/v1/models", headers=foreign).status_code == 401
        given = {**foreign, "Authorization": "Bearer sesame"}
        assert httpx.get(f"{address}/v1/models", headers=given).status_code == 200
    with server(dataclasses.replace(CONFIG, host="0.0.0.0", allow_no_key=True)) as address:
        assert httpx.get(f"{address}/v1/models", headers=foreign).status_code == 200


def test_other_machines_are_served_with_a_key_only_unless_the_operator_says_otherwise():
    public = dataclasses.replace(CONFIG, host="0.0.0.0", api_key_env="COA_JAX_API_KEY")
    with pytest.raises(UserError, match=r"set the key .* COA_JAX_API_KEY.*allow_no_key=True"):
        open_listener(public, None)
    open_listener(public, "sesame").close()
    open_listener(dataclasses.replace(public, allow_no_key=True), None).close()


def test_refusals_are_logged_in_a_line_without_content(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr("coa_jax.serve.run.RefusalLog", lambda: RefusalLog(written))
    with server() as address:
        hidden = {"messages": [{"role": "user", "content": "hush" * 9000}], "model": "tiny"}
        assert post(address, hidden).status_code == 400
        assert post(address, {**ASK, "model": "hush"}).status_code == 404
        assert post(address, {**ASK, "hush": 1}).status_code == 400
        assert post(address, {**ASK, "temperature": "hush"}).status_code == 400
        assert httpx.get(f"{address}/hush?hush", headers={"X": "hush"}).status_code == 404
        assert httpx.request("HUSH", f"{address}/v1/models").status_code == 405
    lines = written.getvalue().splitlines()
    assert [line.split("refused ")[1] for line in lines] == [
        "400 POST /v1/chat/completions from 127.0.0.1: the prompt has more than 256 tokens; "
        "this model's context has room for 256",
        "404 POST /v1/chat/completions from 127.0.0.1: there is no such model",
        "400 POST /v1/chat/completions from 127.0.0.1: this server does not know the field",
        "400 POST /v1/chat/completions from 127.0.0.1: temperature: must be a number",
        "404 GET other from 127.0.0.1: there is no such path",
        "405 - /v1/models from 127.0.0.1: the path does not take this method",
    ]


def test_more_requests_than_may_wait_are_refused_and_come_in_later():
    with server(dataclasses.replace(CONFIG, max_waiting=2)) as address:
        ask = {**ASK, "max_tokens": 150, "temperature": 5.0}
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            codes = [a.status_code for a in pool.map(lambda _: post(address, ask), range(12))]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 6
        assert post(address, ask).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(address, stream):
    ask = {**ASK, "n": 4, "temperature": 5.0, "max_tokens": 200, "stream": stream}
    url = f"{address}/v1/chat/completions"
    if stream:
        with httpx.stream("POST", url, json=ask) as response:
            next(response.iter_text())
    else:
        for seed in range(50):  # until one is long enough to be left
            try:
                httpx.post(url, json={**ask, "seed": seed}, timeout=0.05)
            except httpx.ReadTimeout:
                break
        else:
            pytest.fail("every answer was there within 50 ms")
    assert until(address, "coa_jax_running", 0.0) < 1.0
    assert meter(address, "coa_jax_waiting") == 0


def test_a_client_that_leaves_before_its_first_event_gives_its_place_up(monkeypatch):
    decode, gate = Engine.decode, threading.Event()

    def decode_later(self):
        gate.wait(30)
        return decode(self)

    monkeypatch.setattr(Engine, "decode", decode_later)
    with server() as address:
        try:
            for route, ask in (("chat/completions", ASK), ("completions", TEXT)):
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{address}/v1/{route}", json={**ask, "stream": True}, timeout=0.3)
                left = f'coa_jax_requests_total{{route="/v1/{route}",status="499"}}'
                until(address, left, 1.0)
        finally:
            gate.set()
        until(address, "coa_jax_running", 0.0)


def test_what_breaks_in_the_server_is_counted_as_a_500(monkeypatch):
    def fail(*_):
        raise RuntimeError("no ids today")

    monkeypatch.setattr("coa_jax.serve.completions.encode_plain", fail)
    with server() as address:
        assert post(address, TEXT, "completions").status_code == 500
        assert meter(address, 'coa_jax_requests_total{route="/v1/completions",status="500"}') == 1
        assert 'status="0"' not in httpx.get(f"{address}/metrics").text


def test_requests_for_scores_have_places_and_a_thread_of_their_own(monkeypatch):
    gate, entered = threading.Event(), threading.Event()

    def score_later(*arguments):
        entered.set()
        gate.wait(30)
        return score(*arguments)

    monkeypatch.setattr("coa_jax.serve.service.score", score_later)
    scored = {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    with (
        server(dataclasses.replace(CONFIG, max_waiting=1)) as address,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(post, address, scored, "completions")
        try:
            assert entered.wait(10)
            assert post(address, scored, "completions").status_code == 429
            assert post(address, {**ASK, "prompt_logprobs": 1}).status_code == 429
            assert post(address, TEXT, "completions").status_code == 200  # it decodes meanwhile
        finally:
            gate.set()
        assert first.result().status_code == 200
        assert post(address, scored, "completions").status_code == 200


def test_a_server_that_ends_waits_for_scores_and_takes_no_new_request_for_them():
    async def go():
        async with Service(tiny_policy.policy(), [engine()], [], CONFIG) as service:
            with service.scoring(True):
                assert service.busy
                await service.drain(0.1)
                assert service.busy  # it has not lost its place
                assert len(await service.score([1, 2, 3])) == 3
                with pytest.raises(Refused, match="shutting down"), service.scoring(True):
                    pass
            assert not service.busy
        with pytest.raises(Refused, match="shutting down"):
            await service.score([1, 2, 3])

    asyncio.run(go())


def test_a_server_whose_engine_breaks_down_ends_with_its_exception(monkeypatch):
    def fail(self):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(Engine, "decode", fail)
    listener = open_listener(CONFIG, None)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def go():
        service = Service(tiny_policy.policy(), [engine()], [], CONFIG)
        serving = serve([service], listener, None, asyncio.Event())  # nobody asks for the end
        asking = asyncio.to_thread(post, address, ASK)
        return await asyncio.gather(asyncio.wait_for(serving, 30), asking, return_exceptions=True)

    ended, answer = asyncio.run(go())
    assert (type(ended), str(ended)) == (RuntimeError, "the device is lost")
    assert answer.status_code == 500


def test_the_meters_count_what_was_served():
    with server() as address:
        answer = post(address, {**ASK, "max_tokens": 5, "n": 3}).json()
        agent = {**ASK, "model": "tiny-agent", "temperature": 0}
        agent["messages"] = [{"role": "user", "content": tiny_policy.TASKS[0].question}]
        post(address, agent)
        post(address, {"model": "no"})
        text = httpx.get(f"{address}/metrics").text
        generated = answer["usage"]["completion_tokens"]
        assert meter(address, "coa_jax_generated_tokens_total") > generated > 3
        assert 'coa_jax_completions_total{reason="answer"} 1.0' in text
        assert 'coa_jax_tool_calls_total{outcome="ok",tool="wiki_search"} 1.0' in text
        assert 'coa_jax_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
        assert meter(address, "coa_jax_first_text_seconds_count") == 2
        assert meter(address, 'coa_jax_requests_total{route="/v1/models",status="418"}') == 0
        for unknown in ("coa_jax_walking", 'coa_jax_walks_total{route="/"}'):
            with pytest.raises(KeyError, match="walk"):
                meter(address, unknown)


def fuzz(address, examples):
    """Sends what the published description allows, and what it forbids; returns the statuses."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    modes = [schema.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]
    statuses: list[int] = []

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
    )  # fmt: skip
    @given(case=st.one_of(modes))
    def send(case):
        answer = case.call(timeout=30)
        statuses.append(answer.status_code)
        assert answer.status_code < 500, (answer.status_code, answer.text, case.body)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    send()
    return statuses


def test_requests_drawn_from_the_published_description_never_break_the_server(address):
    statuses = fuzz(address, 60)
    assert 400 in statuses
    assert httpx.get(f"{address}/health").status_code == 200


@pytest.mark.slow
def test_a_thousand_drawn_requests_never_break_the_server(address):
    statuses = fuzz(address, 1000)
    assert {200, 400} <= set(statuses)
    assert until(address, "coa_jax_running", 0.0) < 10


def command(model: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "coa_jax.cli.serve", f"--config.model={model}", "--config.name=tiny",
        "--config.engine.slots=2", *arguments,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "model"
    save_model(tiny_policy.policy(), path)
    return path


def test_sigterm_lets_requests_finish_and_ends_with_0(model, address):
    taken = address.rpartition(":")[2]
    options = {"cwd": REPOSITORY, "text": True, "env": {**os.environ, "JAX_PLATFORMS": "cpu"}}
    refused = forked.run(command(model, f"--config.port={taken}")[1:], REPOSITORY)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: cannot listen on 127.0.0.1:{taken}: ")
    assert len(refused.stderr.splitlines()) == 1

    with subprocess.Popen(
        command(model, "--config.port=0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        try:
            line = next(line for line in process.stdout if line.startswith("serving"))
            ask = {**ASK, "max_tokens": 150, "temperature": 5.0, "n": 2, "stream": True}
            url = f"{line.split()[3]}/v1/chat/completions"
            with httpx.stream("POST", url, json=ask, timeout=60) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [text for text in lines if text]
            assert first.startswith("data: {") and rest[-1] == "data: [DONE]"
            # Both were let finish.
            ends = [r for r in rest if '"finish_reason": "' in r]
            assert len(ends) == 2, rest
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err
