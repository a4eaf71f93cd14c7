"""Decides to which hosts a tool may connect: to public hosts, and to hosts that settings allow.

A host name is resolved once. Each of its addresses is checked, and the connection goes to a checked
address. The name is not resolved again, because a second look-up could return another address (DNS
rebinding). Unusual spellings of an address (decimal, octal, hexadecimal, short, mapped into IPv6,
full-width digits) need no special rules, because the resolved address is checked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import posixpath
import re
import socket
from typing import TYPE_CHECKING

from coa_jax.errors import UserError
from coa_jax.tools.net.errors import FetchError

if TYPE_CHECKING:
    import httpx2

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_MAX_URL = 4096
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
# IPv6 networks with an IPv4 address in their last 32 bits.
_EMBEDDED_IN = ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")
_EMBEDDED = tuple(map(ipaddress.IPv6Network, _EMBEDDED_IN))
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Networks for special use (IANA) that some versions of Python's `ipaddress` report as public.
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
# Metadata services of cloud providers that have public addresses.
_METADATA = frozenset({ipaddress.ip_address("168.63.129.16")})


@dataclasses.dataclass(frozen=True)
class AddressGuard:
    """The addresses that a tool may open in addition to public addresses, and those it may not.

    Attributes:
        allow: host names with a port (``localhost:8000``), host names without a port, which allow
            all ports (``search.lab``), and networks (``10.1.0.0/16``). They are allowed even if
            their addresses are not public.
        block: host names, which include their subdomains, and path prefixes on hosts
            (``huggingface.co/datasets``). These hosts and paths are never opened.
    """

    allow: tuple[str, ...] = ()
    block: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for entry in self.allow:
            if "/" in entry:
                try:
                    ipaddress.ip_network(entry)
                except ValueError as error:
                    raise UserError(f"the allowed network {entry!r} is invalid: {error}") from None

    def blocks(self, url: httpx2.URL) -> bool:
        """Returns whether ``block`` forbids a URL, by its host or by a prefix of its path."""
        host, path = host_of(url), f"/{url.path.lower().lstrip('/')}"
        path = posixpath.normpath(path)  # removes dots and double slashes, as servers do
        for entry in self.block:
            name, _, start = entry.lower().partition("/")
            if (host == name or host.endswith(f".{name}")) and path.startswith(f"/{start}"):
                return True
        return False


def parse_url(text: str) -> httpx2.URL:
    """Parses an absolute http or https URL. The fragment after ``#`` is removed.

    Raises:
        FetchError: the text is not an absolute http or https URL, or contains a user name, spaces
            or control characters.
    """
    import httpx2  # here, because settings import this module and need no client

    if len(text) > _MAX_URL:
        raise FetchError("refused", "the address is too long")
    if _UNSAFE.search(text):
        raise FetchError("refused", "the address holds blanks or control characters")
    try:
        url = httpx2.URL(text)
        host = host_of(url)
    except (httpx2.InvalidURL, ValueError, TypeError) as error:
        raise FetchError("refused", "the address cannot be read") from error
    if url.scheme not in ("http", "https"):
        raise FetchError("refused", "only http and https addresses can be opened")
    if not host:
        raise FetchError("refused", "the address names no host")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise FetchError("refused", "the address has an invalid port")
    if url.userinfo:
        raise FetchError("refused", "addresses with a user name are not opened")
    return url.copy_with(fragment=None)


def host_of(url: httpx2.URL) -> str:
    """Returns the host of a URL in lower case, without a final dot."""
    return url.raw_host.decode("ascii").rstrip(".").lower()


def port_of(url: httpx2.URL) -> int:
    """Returns the port of a URL, or the default port of its scheme."""
    return url.port or (443 if url.scheme == "https" else 80)


def is_public(address: IPAddress) -> bool:
    """Returns whether an address is public.

    An IPv6 address that contains an IPv4 address is public if the IPv4 address is public.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if inner := _embedded(address):
            return all(map(is_public, inner))
        if address not in _UNICAST:  # site-local and unassigned addresses
            return False
    if address in _METADATA or any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _embedded(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Returns the IPv4 addresses that an IPv6 address contains."""
    isatap = (int(address) >> 32) & 0xFFFFFFFF in (0x00005EFE, 0x02005EFE)
    addresses = [address.sixtofour, *(address.teredo or ())]
    if isatap or any(address in network for network in _EMBEDDED):
        addresses.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in addresses if each is not None]


async def resolve(host: str, port: int, guard: AddressGuard) -> list[str]:
    """Returns all addresses of a host, after checking that connections to them are allowed.

    Args:
        host: host name or address.
        port: port of the connection.
        guard: allowed and blocked addresses.

    Raises:
        FetchError: the host has no address, or has an address that is not allowed.
    """
    loop = asyncio.get_running_loop()
    try:
        entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise FetchError("unreachable", "the host name is not known") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if not {host, f"{host}:{port}"}.isdisjoint(map(str.lower, guard.allow)):
        return addresses
    networks = [ipaddress.ip_network(entry) for entry in guard.allow if "/" in entry]
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        if any(mapped in network for network in networks):
            continue
        if "%" in text or not is_public(address):
            raise FetchError("refused", "the address does not belong to the public internet")
    return addresses
