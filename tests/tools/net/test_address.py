"""No request reaches an address that is not public, unless it is allowed."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import httpcore2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.tools.net.address import AddressGuard, is_public, parse_url, resolve
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import HttpRequest, RequestLimits, fetch

FAST = RequestLimits(total_s=3, connect_s=1, read_s=1, attempts=1)

FORMS = (
    "http://127.0.0.1:{port}/page",
    "http://127.1:{port}/page",
    "http://127.255.0.1:{port}/page",
    "http://2130706433:{port}/page",
    "http://0x7f000001:{port}/page",
    "http://0x7f.0.0.1:{port}/page",
    "http://017700000001:{port}/page",
    "http://0177.0.0.01:{port}/page",
    "http://0:{port}/page",
    "http://0.0.0.0:{port}/page",
    "http://localhost:{port}/page",
    "http://LOCALHOST.:{port}/page",
    "http://[::1]:{port}/page",
    "http://[::]:{port}/page",
    "http://[::ffff:127.0.0.1]:{port}/page",
    "http://[::ffff:7f00:1]:{port}/page",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/page",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[fe80::1%25lo]:{port}/page",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://169.254.169.254/latest/meta-data/",
    "http://168.63.129.16/metadata",
    "http://100.100.100.200/latest/meta-data/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://user@127.0.0.1:{port}/page",
    "http://public.example@127.0.0.1:{port}/page",
    "http://\uff11\uff12\uff17.0.0.1:{port}/page",
    "file:///etc/passwd",
    "ftp://127.0.0.1/",
    "gopher://127.0.0.1:{port}/_GET",
    "unix:///var/run/docker.sock",
    "http:///etc/passwd",
    "http://127.0.0.1:{port}\\@public.example/",
    "http://public.example\t@127.0.0.1:{port}/page",
    "//127.0.0.1:{port}/page",
    "http://%31%32%37.0.0.1:{port}/page",
    "http://127。0。0。1:{port}/page",
    "http://①②⑦.⓪.⓪.①:{port}/page",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:{port}/page",
    "http://lo\u00adcalhost:{port}/page",
    "http://foo.localhost:{port}/page",
    "http://1.1.1.1:99999/",
    "http://1.1.1.1:0/",
    "http://wiki.local:{port}/page",
    "http://4294967297:{port}/page",
    "http://127.0.0.1.:{port}/page",
    "http://[::1%25eth0]:{port}/page",
    "http://[fec0::1]/",
    "http://[::ffff:0:127.0.0.1]:{port}/page",
    "http://public.example:80@127.0.0.1:{port}/page",
    "http://127.0.0.1:{port}#@public.example/",
    "http:////127.0.0.1:{port}/page",
    "http:127.0.0.1:{port}/page",
    "http+unix://%2Fvar%2Frun%2Fdocker.sock/info",
    "view-source:http://127.0.0.1:{port}/page",
)

PUBLIC_ONLY = AddressGuard()


def refused(url, guard=PUBLIC_ONLY):
    with pytest.raises(FetchError) as caught:
        asyncio.run(fetch(HttpRequest(url), FAST, guard))
    return caught.value.kind


@pytest.mark.parametrize("form", FORMS)
def test_no_spelling_reaches_this_machine(server, form):
    server.hits.clear()
    # A host that no resolver knows is not reached either.
    assert refused(form.format(port=server.port)) in ("refused", "unreachable")
    assert not server.hits


@pytest.mark.parametrize(
    "target",
    ["http://2130706433:{port}/page", "file:///etc/passwd", "//[::1]:{port}/page",
     "http://[::ffff:127.0.0.1]:{port}/page", "%5C%5C127.0.0.2:{port}%5Cpage", "http://localhost.:{port}/"],
)  # fmt: skip
def test_a_redirect_does_not_lead_there(server, target):
    server.hits.clear()
    allowed = AddressGuard(allow=(f"127.0.0.1:{server.port}",))
    target = target.format(port=server.port)
    assert refused(server.url(f"/redirect?to={target}"), allowed) == "refused"
    assert dict(server.hits) == {"/redirect": 1}


def test_a_name_that_changes_its_address_is_looked_up_once(server, monkeypatch):
    """A rebinding name is public when it is checked and private when it is connected to."""
    answers = iter(["93.184.216.34", "127.0.0.1", "127.0.0.1"])
    asked, connected = [], []

    async def getaddrinfo(self, host, port, **options):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    async def connect_tcp(self, host, port, *arguments):
        connected.append(host)
        raise httpcore2.ConnectError("far away")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    assert refused(f"http://rebind.example:{server.port}/page") == "unreachable"
    assert (asked, connected) == (["rebind.example"], ["93.184.216.34"])


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch):
    async def getaddrinfo(self, host, port, **options):
        pair = ("93.184.216.34", "10.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in pair]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    assert refused("http://mixed.example/") == "refused"


@pytest.mark.parametrize("allow", ["127.0.0.1", "127.0.0.0/8", "127.0.0.1:{port}"])
def test_what_is_allowed_is_reached(server, allow):
    guard = AddressGuard(allow=(allow.format(port=server.port),))
    assert asyncio.run(fetch(HttpRequest(server.url("/page")), FAST, guard)).status == 200


@pytest.mark.parametrize("allow", ["127.0.0.1:9", "10.0.0.0/8", "localhost", "::1/128"])
def test_other_things_that_are_allowed_do_not_help(server, allow):
    assert refused(server.url("/page"), AddressGuard(allow=(allow,))) == "refused"


@pytest.mark.parametrize("allow", ["LocalHost", "LOCALHOST:8000"])
def test_the_case_of_an_allowed_host_does_not_matter(allow):
    assert asyncio.run(resolve("localhost", 8000, AddressGuard(allow=(allow,))))
    with pytest.raises(FetchError):
        asyncio.run(resolve("localhost", 8000, AddressGuard(allow=(f"x.{allow}",))))


def test_blocked_hosts_and_paths_are_refused_even_when_redirected_to(server):
    guard = AddressGuard(allow=("127.0.0.1",), block=("127.0.0.1/page",))
    assert refused(server.url("/page?a=1"), guard) == "refused"
    assert refused(server.url("/redirect?to=/PAGE"), guard) == "refused"
    assert asyncio.run(fetch(HttpRequest(server.url("/gzip")), FAST, guard)).status == 200
    names = AddressGuard(block=("huggingface.co/datasets",))
    assert names.blocks(parse_url("https://www.huggingface.co./datasets/gaia"))
    for path in ("//datasets/gaia", "/papers/../datasets", "/x/%2e%2e/datasets", "/./Datasets/x"):
        assert names.blocks(parse_url(f"https://huggingface.co{path}")), path
    assert not names.blocks(parse_url("https://huggingface.co/papers"))
    assert not names.blocks(parse_url("https://nothuggingface.co/datasets"))


def test_a_network_that_is_none_is_explained():
    with pytest.raises(UserError, match=r"10\.0\.0\.0/99"):
        AddressGuard(allow=("10.0.0.0/99",))


@given(st.ip_addresses(v=4, network="10.0.0.0/8") | st.ip_addresses(v=4, network="127.0.0.0/8"))
def test_private_addresses_are_not_public_in_any_wrapping(inner):
    low = int(inner)
    wrappings = [0, 0xFFFF << 32, 0x64FF9B << 96, (0x2002 << 112) | (low << 80), 0x5EFE << 32]
    assert not is_public(inner)
    for prefix in wrappings:
        wrapped = ipaddress.IPv6Address(prefix | (0 if prefix >> 112 == 0x2002 else low))
        assert not is_public(wrapped), wrapped


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    for candidate in (text, f"http://{text}/", f"http://a.example/{text}"):
        try:
            assert parse_url(candidate).scheme in ("http", "https")
        except FetchError as error:
            assert error.kind == "refused"


@pytest.mark.parametrize(
    "text",
    ["192.0.0.8", "192.88.99.1", "198.18.0.1", "100.64.0.1", "fec0::1", "3fff::1", "64:ff9b:1::1",
     "5f00::1", "100:0:0:1::1", "2001:db8::1", "4000::1", "ff0e::1"],
)  # fmt: skip
def test_addresses_for_special_use_are_not_public(text):
    assert not is_public(ipaddress.ip_address(text))


def test_public_addresses_are_public():
    for text in ("93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(ipaddress.ip_address(text))
    assert asyncio.run(resolve("8.8.8.8", 80, AddressGuard())) == ["8.8.8.8"]
