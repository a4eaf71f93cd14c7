"""Checks which pages the robots.txt of a site allows robots to read (RFC 9309)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from coa_jax.tools.net.address import AddressGuard
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import HttpRequest, RequestLimits, fetch
from coa_jax.tools.net.text import decode

if TYPE_CHECKING:
    import httpx2

AGENT = "coa_jax"
_KEPT, _KEPT_S, _MAX_BYTES = 1000, 3600.0, 512 << 10


class Robots:
    """Reads the robots.txt of sites, and caches the rules for an hour."""

    def __init__(self, limits: RequestLimits, guard: AddressGuard):
        self._limits = dataclasses.replace(limits, max_bytes=_MAX_BYTES, attempts=1)
        self._guard = guard
        self._rules: OrderedDict[str, tuple[float, Any]] = OrderedDict()

    async def why_not(self, url: httpx2.URL) -> str | None:
        """Returns the reason why a page must not be read; None if the page may be read.

        If robots.txt cannot be read because of a server error (5xx), no page may be read. If the
        site has no robots.txt (4xx), all pages may be read. If the connection fails, the result is
        None, because the request for the page itself will fail too. After a failure that may be
        temporary, robots.txt is read again for the next page.
        """
        site = str(url.copy_with(path="/", query=None)).rstrip("/")
        entry = self._rules.get(site)
        if entry is None or time.monotonic() - entry[0] > _KEPT_S:
            rules, lasting = await self._read(f"{site}/robots.txt")
            entry = (time.monotonic(), rules)
            if lasting:
                self._rules[site] = entry
            if len(self._rules) > _KEPT:
                self._rules.popitem(last=False)
        rules = entry[1]
        if rules is None or isinstance(rules, str):
            return rules
        allowed = await asyncio.to_thread(rules.can_fetch, str(url), AGENT)
        return None if allowed else "the site does not allow robots to read this page"

    async def _read(self, url: str) -> tuple[Any, bool]:
        """Returns the rules at a URL, and whether another request would give the same rules."""
        from protego import Protego

        try:
            response = await fetch(HttpRequest(url), self._limits, self._guard)
        except FetchError as error:
            if error.kind == "status" and (error.status or 0) >= 500:
                return "the site's rules for robots cannot be read", not error.transient
            return None, not error.transient
        text = decode(response.body, response.headers)
        # Some encodings can contain surrogate halves, which the parser does not accept.
        text = text.encode("utf-8", "replace").decode()
        return await asyncio.to_thread(Protego.parse, text), True
