"""Requests end within their deadline, with a response or with the reason of the failure."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.tools.net import http
from coa_jax.tools.net.address import AddressGuard
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import HttpRequest, RequestLimits, fetch, fetch_json
from tests.tools.fault_server import PAGE, stopwatch

LIMITS = RequestLimits(
    total_s=15, connect_s=5, read_s=5, attempts=2, backoff_s=0.05, max_bytes=1 << 20
)
SHORT = dataclasses.replace(LIMITS, total_s=1.5, connect_s=0.5, read_s=0.4)
LOCAL = AddressGuard(allow=("127.0.0.1",))


def get(server, path, limits=LIMITS, guard=LOCAL, **request):
    return asyncio.run(fetch(HttpRequest(server.url(path), **request), limits, guard))


@pytest.mark.parametrize("path", ["/page", "/gzip", "/deflate", "/redirect?to=/page"])
def test_pages_arrive_whole(server, path):
    response = get(server, path)
    assert response.body.decode() == PAGE
    assert response.status == 200 and response.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/hang", "timeout"),
        ("/drip", "timeout"),
        ("/drop", "unreachable"),
        ("/reset", "unreachable"),
        ("/garbage", "unreachable"),
        ("/headers", "unreachable"),
        ("/500", "status"),
        ("/429", "status"),
        ("/missing", "status"),
        ("/big", "too_large"),
        ("/declared", "too_large"),
        ("/bomb", "too_large"),
        ("/badgzip", "malformed"),
        ("/cutgzip", "malformed"),
        ("/brotli", "malformed"),
        ("/nowhere", "malformed"),
        ("/loop", "redirects"),
    ],
)
def test_each_fault_has_its_kind_and_ends_in_time(server, path, kind):
    seconds = stopwatch()
    with pytest.raises(FetchError) as caught:
        get(server, path, SHORT if kind == "timeout" else LIMITS)
    assert caught.value.kind == kind
    assert seconds() < 10  # of 30
    assert "127.0.0.1" not in caught.value.message


def test_a_bomb_never_unfolds_in_memory(server):
    tracemalloc.start()
    try:
        with pytest.raises(FetchError):
            get(server, "/bomb")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of 64 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["/malformed", "/notjson", "/deep", "/empty", "/page"])
def test_what_is_no_json_is_malformed(server, path):
    with pytest.raises(FetchError) as caught:
        asyncio.run(fetch_json(HttpRequest(server.url(path)), LIMITS, LOCAL))
    assert caught.value.kind == "malformed"


def test_failures_in_passing_are_tried_again_and_others_are_not(server):
    server.hits.clear()
    assert get(server, "/flaky", dataclasses.replace(LIMITS, attempts=3)).status == 200
    assert server.hits["/flaky"] == 3
    for path in ("/missing", "/big", "/brotli?"):
        with pytest.raises(FetchError):
            get(server, path)
    with pytest.raises(FetchError):
        get(server, "/500")
    assert (server.hits["/missing"], server.hits["/big"], server.hits["/500"]) == (1, 1, 2)


@pytest.mark.parametrize(
    ("statuses", "again"),
    [
        ((408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529), True),
        ((400, 401, 402, 403, 404, 410, 413, 422, 501, 505), False),
    ],
)
def test_statuses_that_may_pass_are_tried_again(server, statuses, again):
    server.hits.clear()
    for status in statuses:
        server.pages[f"/status/{status}"] = lambda h, status=status: h.answer(b"no", status)
        with pytest.raises(FetchError):
            get(server, f"/status/{status}")
        assert server.hits[f"/status/{status}"] == (2 if again else 1), status


def test_a_wait_that_the_server_asks_for_is_not_begun_when_time_will_not_do(server):
    seconds = stopwatch()
    with pytest.raises(FetchError) as caught:
        get(server, "/429")
    assert (caught.value.status, caught.value.retry_after) == (429, 3600.0)
    assert seconds() < 10


def test_waits_grow_between_attempts(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    async def attempt():
        raise FetchError("unreachable", "gone")

    monkeypatch.setattr(http.asyncio, "sleep", sleep)
    limits = RequestLimits(total_s=1000, attempts=6, backoff_s=1.0)
    with pytest.raises(FetchError):
        asyncio.run(http.retry(attempt, limits))
    assert len(waits) == 5
    assert all(2**k / 2 <= wait <= 2**k for k, wait in enumerate(waits))


def test_unwanted_types_are_not_read(server):
    with pytest.raises(FetchError) as caught:
        get(server, "/binary", types=("text/", "application/pdf"))
    assert caught.value.kind == "type"
    assert get(server, "/page", types=("text/",)).status == 200


def test_headers_of_a_request_do_not_follow_a_redirect(server):
    server.requests.clear()
    get(server, "/redirect?to=/page", headers={"X-API-KEY": "not for others"})
    first, second = server.requests
    assert first[2]["x-api-key"] == "not for others"
    assert "x-api-key" not in second[2]


def test_a_post_carries_its_body_and_becomes_a_get_after_a_redirect(server):
    server.requests.clear()
    get(server, "/redirect?to=/page", method="POST", body=b"{}")
    assert [(r[0], r[3]) for r in server.requests] == [("POST", b"{}"), ("GET", b"")]


def test_nobody_listening_is_unreachable():
    with pytest.raises(FetchError) as caught:
        asyncio.run(fetch(HttpRequest("http://127.0.0.1:9/"), LIMITS, LOCAL))
    assert caught.value.kind == "unreachable"


def test_cancelling_ends_a_request_at_once(server):
    async def scenario():
        task = asyncio.create_task(fetch(HttpRequest(server.url("/hang")), RequestLimits(), LOCAL))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    seconds = stopwatch()
    asyncio.run(scenario())
    assert seconds() < 10  # of 30


def test_a_request_shows_neither_headers_nor_body():
    request = HttpRequest(
        "http://a.example/", headers={"X-API-KEY": "abcdef123"}, body=b"abcdef123"
    )
    assert "abcdef123" not in repr(request)


@given(st.binary(max_size=3000), st.integers(1, 50), st.booleans())
def test_compressed_bodies_come_back_whatever_the_pieces(content, size, raw):
    if raw:
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        packed, coding = packer.compress(content) + packer.flush(), "deflate"
    else:
        packed, coding = gzip.compress(content) + b"bytes after the end", "gzip"

    async def pieces():
        for start in range(0, len(packed), size):
            yield packed[start : start + size]

    read = http._read(pieces(), {"content-encoding": coding}, 4000)
    assert asyncio.run(read) == content
