"""A real server behind the guard, tested over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
import time

import httpx
import pytest

from coa_jax.errors import UserError
from coa_jax.serve.http.guard import GuardRules, check_exposure
from coa_jax.serve.http.json_app import JsonRoute, make_app
from coa_jax.serve.http.limits import ConnectionLimits
from coa_jax.serve.http.refusals import RefusalLog
from tests.serve.http.live import running
from tests.tools.fault_server import wait_until

LIMITS = ConnectionLimits(
    connections=20, header_seconds=0.5, body_seconds=0.5, idle_seconds=0.5, write_seconds=0.5
)
PATIENT = ConnectionLimits()
MAX_BODY = 1_000_000


class Work:
    """Routes whose work a test can hold and watch."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.cancelled = threading.Event()

    async def echo(self, body) -> bytes:
        return json.dumps(body).encode()

    async def large(self, body) -> bytes:
        return b'"' + b"x" * (64 << 20) + b'"'

    async def held(self, body) -> bytes:
        self.begun.set()
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b"true"


@contextlib.contextmanager
def serving(limits=PATIENT, key=None, local=True, work=None, grace=None):
    """The address of a server and its log."""
    work, lines = work or Work(), io.StringIO()
    routes = {
        "/echo": JsonRoute(work.echo, values=100, running=8, waiting=100),
        "/large": JsonRoute(work.large, values=9, running=8, waiting=100),
        "/held": JsonRoute(work.held, values=9, running=1, waiting=1),
    }
    rules = GuardRules(
        key, local and key is None, MAX_BODY, (*routes, "/health"), ("/health",), limits
    )
    log = RefusalLog(lines)
    with running(make_app(routes, rules, log), limits, log, grace) as address:
        yield address, lines


@contextlib.contextmanager
def connected(address):
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        yield connection


def rest(connection) -> bytes:
    """Everything until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            answer += data
    return answer


POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_headers_and_bodies_that_do_not_end_are_ended():
    with serving(LIMITS) as (address, log):
        for begun, status in (
            (b"POST /echo HT", b"408"),
            (POST, b"408"),
            (POST + b"Content-Length: 9\r\n\r\n", b"408"),
            (POST + b"Content-Length: 9\r\n\r\n[1,", b"408"),
            (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\n[1,", b"408"),
            (b"", b""),
        ):
            with connected(address) as connection:
                connection.sendall(begun)
                assert rest(connection)[9:12] == status
        with connected(address) as connection:  # a byte at a time is no progress
            with contextlib.suppress(OSError):
                for byte in POST * 100:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)
            assert rest(connection)[9:12] in (b"408", b"")
        written = log.getvalue()
    assert written.count("refused 408 - from 127.0.0.1: the headers were not complete") == 3
    assert written.count("refused 408 POST /echo from 127.0.0.1: the body was not complete") == 3


def test_a_connection_between_requests_ends_after_a_while():
    with serving(LIMITS) as (address, log), connected(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert rest(connection).endswith(b'{"status":"ok"}')
        assert log.getvalue() == ""


def test_a_client_that_reads_no_answer_is_dropped():
    with serving(LIMITS) as (address, log), connected(address) as connection:
        connection.sendall(POST.replace(b"/echo", b"/large") + b"Content-Length: 2\r\n\r\n{}")
        assert wait_until(lambda: "stopped reading" in log.getvalue(), 20.0)
        assert len(rest(connection)) < 64 << 20


@pytest.mark.parametrize(
    "begun", [b"GET /health HTTP/1.1\r\n", POST + b"Content-Length: 9\r\n\r\n[1", b""]
)
def test_of_too_many_connections_the_one_that_waited_longest_is_dropped(begun):
    with serving(ConnectionLimits(connections=20)) as (address, log), contextlib.ExitStack() as all:
        held = [all.enter_context(connected(address)) for _ in range(20)]
        for connection in held:
            connection.sendall(begun)
        for _ in range(3):
            assert httpx.get(f"{address}/health").status_code == 200
        assert rest(held[0]) == b""
        if begun.startswith(b"GET"):
            held[-1].sendall(b"Host: localhost\r\nConnection: close\r\n\r\n")
            assert rest(held[-1]).startswith(b"HTTP/1.1 200")
        assert "too many connections" in log.getvalue()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "LOCALHOST:80"}, 200),
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "localhost:80:80"}, 403),
        ({"Host": "10.0.0.1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Host": "localhost:99", "Origin": "http://localhost:99"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/JSON; charset=utf-8"}, 200),
    ],
)
def test_pages_of_other_sites_and_other_contents_are_refused(guarded, headers, status):
    address, _ = guarded
    sent = {"Content-Type": "application/json", **headers}
    answer = httpx.post(f"{address}/echo", content=b"[1]", headers=sent)
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]


@pytest.fixture(scope="module")
def guarded():
    with serving() as served:
        yield served


def test_with_a_key_other_names_and_pages_are_served_who_know_it():
    with serving(key="sesame") as (address, log):
        foreign = {"Origin": "http://x.example", "Host": "y.example"}
        for given, status in (("", 401), ("Bearer x", 401), ("Bearer sesame", 200)):
            headers = {**foreign, "Authorization": given}
            answer = httpx.post(f"{address}/echo", json=[1], headers=headers)
            assert answer.status_code == status
        assert httpx.get(f"{address}/health").status_code == 200
        assert "sesame" not in log.getvalue()


def test_chunked_bodies_and_requests_in_one_go_are_served(guarded):
    address, _ = guarded
    whole = json.dumps(["text " * 1000] * 90).encode()
    pieces = (whole[i : i + 5000] for i in range(0, len(whole), 5000))
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{address}/echo", content=pieces, headers=headers).json()[0][:4] == "text"
    with connected(address) as connection:
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        body = POST + b"Content-Length: 3\r\n\r\n[1]"
        connection.sendall((ask + b"\r\n") * 5 + body + ask + b"Connection: close\r\n\r\n")
        answers = rest(connection)
    assert answers.count(b"HTTP/1.1 200") == 7 and b"[1]" in answers


def test_a_body_that_is_too_large_has_its_answer_however_it_is_sent(guarded):
    address, _ = guarded
    for declared in (b"Content-Length: 3000000", b"Transfer-Encoding: chunked"):
        for close in (b"", b"Connection: close\r\n"):
            with connected(address) as connection:
                connection.sendall(POST + close + declared + b"\r\n\r\n")
                for _ in range(30):
                    chunk = b"1" * 100_000
                    chunked = b"chunked" in declared
                    connection.sendall(b"186a0\r\n" + chunk + b"\r\n" if chunked else chunk)
                if b"chunked" in declared:
                    connection.sendall(b"0\r\n\r\n")
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\na: " + b"b" * 20_000, b"431"),
        (b"GET /" + b"a" * 20_000, b"431"),
        (b"\x16\x03\x01\x02\x00", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"\r\n\r\n\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (POST + b"Content-Length: -1\r\n\r\n", b"400"),
        (POST + b"Content-Length: 99999999999999999999999999\r\n\r\n", b"400"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n1\r\n" * 5000, b""),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400"),
    ],
)
def test_what_is_hardly_http_is_refused(guarded, sent, status):
    address, _ = guarded
    with connected(address) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        assert rest(connection)[9:12] == status
    assert httpx.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize("length", ["Content-Length", "content-length "])
@pytest.mark.parametrize("coding", ["Transfer-Encoding: chunked", "transfer-Encoding: identity"])
def test_a_request_with_two_lengths_is_refused_and_none_is_served_behind_it(
    guarded, length, coding
):
    address, _ = guarded
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"3\r\n[1]\r\n0\r\n\r\n" + hidden
    for first, second in ((f"{length}: {len(body)}", coding), (coding, f"{length}: {len(body)}")):
        with connected(address) as connection:
            connection.sendall(POST + f"{first}\r\n{second}\r\n\r\n".encode() + body)
            answers = rest(connection)
        assert answers.startswith(b"HTTP/1.1 400") and answers.count(b"HTTP/1.1") == 1
        assert b"\r\nconnection: close\r\n" in answers.lower()


def test_a_route_has_its_own_places_and_a_client_that_leaves_gives_its_place_up():
    work = Work()
    with serving(work=work) as (address, log):
        ask = POST.replace(b"/echo", b"/held") + b"Content-Length: 2\r\n\r\n{}"
        with connected(address) as first:
            first.sendall(ask)
            assert work.begun.wait(20)
            with connected(address) as second:
                second.sendall(ask)
                held = f"{address}/held"
                assert wait_until(lambda: httpx.post(held, json={}).status_code == 429, 20.0)
                assert httpx.post(f"{address}/echo", json=[2]).json() == [2]
        assert work.cancelled.wait(20)
        work.gate.set()
        assert httpx.post(f"{address}/held", json={}, timeout=20).json() is True
        assert "too many requests wait for this path" in log.getvalue()


def test_a_request_that_outlasts_the_servers_end_is_told_so(caplog):
    work, answers = Work(), []

    def ask(address):
        answers.append(httpx.post(f"{address}/held", json={}, timeout=30))

    with serving(work=work, grace=1) as (address, _):
        asking = threading.Thread(target=ask, args=(address,))
        asking.start()
        assert work.begun.wait(20)
    asking.join(20)
    assert work.cancelled.is_set()
    assert answers[0].status_code == 503 and "shutting down" in answers[0].json()["error"]
    assert "Traceback" not in caplog.text


def test_a_flood_of_refusals_is_counted_and_not_written():
    now, lines = 0.0, io.StringIO()
    log = RefusalLog(lines, clock=lambda: now)
    for _ in range(10_000):
        log.note(413, "POST /echo", "127.0.0.1", "the body is too large\nand more")
    assert len(lines.getvalue().splitlines()) == 20
    now += 1.0
    log.note(404, "GET other", "10.0.0.1", "there is no such path")
    last = lines.getvalue().splitlines()[-1]
    assert last.endswith(
        "refused 404 GET other from 10.0.0.1: there is no such path (9980 more were refused before)"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.1", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(UserError, match=f"^{host or 'every address'} .*: give a key$"):
        check_exposure(host, None, "give a key")
    check_exposure(host, "sesame", "")
    for local in ("127.0.0.1", "localhost", "::1", "127.0.0.5"):
        check_exposure(local, None, "")
